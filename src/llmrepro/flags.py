"""What a reader must know before believing a number: failures, drift, a busy machine, clocks that disagree."""

from collections import Counter
from statistics import fmean

from llmrepro import cache_use, intervals, metrics
from llmrepro.client import Record
from llmrepro.metrics import ANSWERED
from llmrepro.recipe import Recipe

BUSY_CPUS, BUSY_STEAL = 0.2, 0.05  # kept busy by others during a boot; share of all CPU time taken
DIFFERS = 0.03  # client against server beyond this is flagged


def of(records: list[Record], rows: list[dict], recipe: Recipe) -> list[str]:
    """What a reader must know before believing a number."""
    ladders = {w.id for w in recipe.workloads if w.rises}
    suites = {w.id for w in recipe.workloads if w.kind == "chat"}
    found = []
    skipped = {(r.workload, r.case, r.server): r.error for r in records if r.status == "skipped"}
    found += [
        f"{case} of {workload} ({server}) was not asked: {why}"
        for (workload, case, server), why in skipped.items()
    ]
    records = [r for r in records if r.status != "skipped"]
    failed = [r for r in records if r.status not in ANSWERED or (r.workload in ladders and r.status != "ok")]
    if failed:
        kinds = ", ".join(f"{n} {s.replace('_', ' ')}" for s, n in Counter(r.status for r in failed).items())
        found.append(f"{len(failed)} of {len(records)} requests failed ({kinds}); no mean includes them")
    found += _disagreements(rows)
    repeated = sum(_repeats(r) for r in records if r.status in ANSWERED)
    if repeated:
        found.append(f"{repeated} of {len(records)} answers are one token over and over")
    return found + _drift(records) + _twice(records) + _broken_rounds(records, suites)


def changed(records: list[Record], started: dict[int, dict]) -> list[str]:
    """What tells that the folder is not as it was written, so that no word is earned by it."""
    return _twice([r for r in records if not r.warmup]) + without_boot(records, started)


def _twice(records: list[Record]) -> list[str]:
    """Requests with more than one answer, which no run of the kit writes."""
    twice = sum(n > 1 for n in _answers(records).values())
    said = f"{twice} requests stand more than once in records.jsonl: the folder was changed by hand"
    return [said] if twice else []


def _answers(records: list[Record]) -> Counter[tuple]:
    """How often each request was answered."""
    good = [r for r in records if r.status in ANSWERED]
    return Counter((r.server, r.boot, r.workload, r.case, r.repeat, r.stream_number) for r in good)


def _broken_rounds(records: list[Record], suites: set[str]) -> list[str]:
    """Rounds of suites without an answer to every prompt, which are in none of their values."""
    found, answers = [], _answers(records)
    for workload in sorted({r.workload for r in records} & suites):
        mine = [k for k in {(r.server, r.boot, r.case, r.repeat) for r in records if r.workload == workload}]
        cases = {case for _, _, case, _ in mine}
        rounds = {(server, boot, repeat) for server, boot, _, repeat in mine}
        whole = [k for k in rounds if all(answers[k[0], k[1], workload, case, k[2], 0] for case in cases)]
        if len(whole) < len(rounds):
            found.append(
                f"{len(rounds) - len(whole)} of {len(rounds)} rounds of {workload} lack an answer; no suite value "
                "includes them"
            )
    return found


def without_boot(records: list[Record], started: dict[int, dict]) -> list[str]:
    """Records of boots that the folder has no file of: what they were measured under is not known."""
    lost = sorted({r.boot for r in records if r.boot not in started})
    return [f"{cache_use.numbered(lost)}: its file is missing, the folder was changed by hand"] if lost else []


def _repeats(record: Record) -> bool:
    """Whether one token fills the answer; a few tokens cannot tell."""
    enough = (record.output_tokens or 0) >= metrics.MIN_DECODE_TOKENS
    return enough and (metrics.repetition_share(record) or 0) >= 0.9


def disturbances(started: dict[int, dict], cpus: int | None) -> list[str]:
    """Boots beside which the machine did something else: other programs, or the hypervisor."""
    others = {n: b["machine"].get("other_cpus") for n, b in started.items() if "machine" in b}
    steals = {n: b["machine"].get("steal_share") for n, b in started.items() if "machine" in b}
    busy = {n: other for n, other in others.items() if other is not None and other > BUSY_CPUS}
    stolen = {n: share for n, share in steals.items() if share is not None and share > BUSY_STEAL}
    found = []
    if busy:
        of = f" of {cpus}" if cpus else ""
        found.append(
            f"{cache_use.numbered(busy)}: other programs kept {_up_to(busy, '{:.1f}')}{of} CPUs busy meanwhile; "
            "close what else runs"
        )
    if stolen:
        share = _up_to(stolen, "{:.0%}")
        found.append(
            f"{cache_use.numbered(stolen)}: the hypervisor took {share} of the CPU's time; choose a calmer hour"
        )
    return found


def _up_to(values: dict[int, float], form: str) -> str:
    return ("up to " if len(values) > 1 else "") + form.format(max(values.values()))


def _disagreements(rows: list[dict]) -> list[str]:
    """Decode speeds that the client and the server's own clock put more than DIFFERS apart."""
    where = ("server", "workload", "case", "statistic")
    own = {tuple(r[k] for k in where): r for r in rows if r["metric"] == "decode_tps.server"}
    found = []
    for row in rows:
        twin = own.get(tuple(row[k] for k in where)) if row["metric"] == "decode_tps" else None
        if twin and abs(row["value"] / twin["value"] - 1) > DIFFERS:
            found.append(
                f"decode speed of {row['case']} ({row['server']}): the client says {row['value']:.1f}, "
                f"the server {twin['value']:.1f} tok/s: more than {DIFFERS:.0%} apart"
            )
    return found


def _drift(records: list[Record]) -> list[str]:
    """A slope of decode speed over the rounds that its interval keeps from nought."""
    found = []
    for workload in sorted({r.workload for r in records}):
        speeds = [
            (r.repeat, s) for r in records if r.workload == workload and (s := metrics.decode_tps(r)) is not None
        ]
        fit = intervals.slope([x for x, _ in speeds], [y for _, y in speeds])
        if fit is not None and (fit.low > 0 or fit.high < 0):
            mean = fmean(y for _, y in speeds)
            found.append(
                f"decode speed of {workload} drifts by {fit.mean / mean:+.1%} a round "
                f"({fit.low / mean:+.1%} to {fit.high / mean:+.1%}): the machine was not steady"
            )
    return found
