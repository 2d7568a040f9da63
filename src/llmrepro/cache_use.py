"""What the caches did: the prompt cache by the engine's counters, held against its answers; the page cache."""

from collections.abc import Iterable

from llmrepro import page_cache
from llmrepro.client import Record

APART = 0.005  # of the hit rate: counters against the sum over requests, beyond which it is told
QUERIES, HITS = "prefix_queries_tokens", "prefix_hits_tokens"


def hit_rate(started: dict[int, dict], server: str, workload: str) -> tuple[float | None, int]:
    """(share of the prompt tokens that came from the prompt cache, boots that counted them), warm-ups included:
    the difference of the engine's counters before and after a workload, summed over a server's boots."""
    counted = [
        c for b in started.values() if b["server"] == server and (c := _counted(b, workload)) is not None and c[0]
    ]
    if not counted:
        return None, 0
    return sum(hits for _, hits in counted) / sum(queries for queries, _ in counted), len(counted)


def _counted(boot: dict, workload: str) -> tuple[float, float] | None:
    """(prompt tokens, of them cached) of a workload in one boot; None where a reading is missing."""
    read = boot.get("counters", {}).get(workload, {})
    before, after = read.get("before", {}), read.get("after", {})
    if not all(name in reading for name in (QUERIES, HITS) for reading in (before, after)):
        return None
    return after[QUERIES] - before[QUERIES], after[HITS] - before[HITS]


def flags(started: dict[int, dict], records: list[Record]) -> list[str]:
    """Where counters and answers disagree, and boots that did not start in the state of the page cache that
    they were made for. `records` with the boots that asked them, warm-ups included."""
    found = []
    for n, boot in started.items():
        for workload in boot.get("counters", {}):
            mine = [r for r in records if (r.boot, r.workload) == (n, workload)]
            found += _disagreement(n, workload, _counted(boot, workload), mine)
    return found + _wrong_states(started)


def _disagreement(n: int, workload: str, counted: tuple[float, float] | None, mine: list[Record]) -> list[str]:
    asked = [(r.prompt_tokens, r.cached_tokens) for r in mine if r.status != "skipped"]
    if counted is None or not counted[0] or not asked or any(None in a for a in asked):
        return []
    own = sum(c for _, c in asked) / sum(p for p, _ in asked)
    if abs(counted[1] / counted[0] - own) <= APART:
        return []
    rate = counted[1] / counted[0]
    return [
        f"boot {n}: of the prompt tokens of {workload} the engine counted {rate:.1%} as cached, answers {own:.1%}"
    ]


def in_state(boot: dict) -> bool | None:
    """Whether a boot started in the state of the page cache that it was made for; None where it is unknown."""
    share = boot.get("weights_cached_share")
    if share is None:
        return None
    return share <= page_cache.COLD if boot["page_cache"] == "evicted" else share >= page_cache.WARM


def _wrong_states(started: dict[int, dict]) -> list[str]:
    made = {n: b for n, b in started.items() if "page_cache" in b}
    unknown = [n for n, b in made.items() if in_state(b) is None]
    warm = [n for n, b in made.items() if in_state(b) is False and b["page_cache"] == "evicted"]
    cold = [n for n, b in made.items() if in_state(b) is False and b["page_cache"] == "warm"]
    found = []
    if warm:
        most = max(made[n]["weights_cached_share"] for n in warm)
        found.append(
            f"{numbered(warm)}: up to {most:.0%} of the weights could not be put out of the page cache, so this "
            "start is no cold one; another process may have them open, or their file system is in memory"
        )
    if cold:
        least = min(made[n]["weights_cached_share"] for n in cold)
        found.append(f"{numbered(cold)}: no more than {least:.0%} of the weights fitted into the page cache")
    if unknown:
        found.append(f"{numbered(unknown)}: how much of the weights was in the page cache cannot be known here")
    return found


def numbered(numbers: Iterable[int]) -> str:
    """Boots by their numbers: "boot 3", "boots 3, 6, 8 to 12"."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][-1] + 1:
            spans[-1].append(n)
        else:
            spans.append([n])
    told = [f"{s[0]} to {s[-1]}" if len(s) > 2 else ", ".join(map(str, s)) for s in spans]
    return f"boot{'s' * (sum(map(len, spans)) > 1)} {', '.join(told)}"
