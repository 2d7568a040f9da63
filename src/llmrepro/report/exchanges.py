"""Every request and every answer of a run, folded."""

from collections import defaultdict
from collections.abc import Iterable

from llmrepro import metrics
from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.markup import Html, folded, join, table, tag
from llmrepro.notation import number, plural

# Beyond these the page points at records.jsonl.
MOST_ROWS, MOST_CHARACTERS, MOST_OF_ONE = 3000, 300_000, 20_000


def requests(found: Findings) -> Html:
    """A folded table, a row per line of records.jsonl."""
    warmups = plural(sum(r.warmup for r in found.records), "warm-up")
    records = found.records[:MOST_ROWS]
    rows = [
        (
            tag("a", f"{n}", href=f"#request-{n}"),
            r.server,
            f"{r.boot}",
            r.workload,
            r.case,
            "warm-up" if r.warmup else f"{r.repeat + 1}",
            _status(r),
            number(r.prompt_tokens),
            number(r.cached_tokens),
            number(r.output_tokens),
            number(metrics.ttft_s(r)),
            number(metrics.decode_tps(r)),
            r.finish_reason or "–",
            tag("span", "; ".join([*([r.error] if r.error else []), *r.notes]), class_="wide")
            if r.error or r.notes
            else "–",
        )
        for n, r in enumerate(records, 1)
    ]
    left = len(found.records) - len(records)
    return folded(
        f"{plural(len(found.records), 'request')}, {warmups} among them",
        table(
            "Requests in the order in which they were sent; “unknown” is a dash",
            [
                "Request",
                "Server",
                "Boot",
                "Workload",
                "Case",
                "Round",
                "Status",
                "Prompt tokens",
                "Cached",
                "Output tokens",
                "TTFT, s",
                "Decode, tok/s",
                "Finish",
                "Error and notes",
            ],
            rows,
            words=(1, 3, 4, 6, 12, 13),
            ids=[f"request-{n}" for n in range(1, len(records) + 1)],
        ),
        tag("p", f"{left:,} more are in records.jsonl.") if left else None,
    )


def _status(record: Record) -> Html:
    sign, look = {"ok": ("✓", "good"), "early_stop": ("!", "open"), "skipped": ("–", "none")}.get(
        record.status, ("✗", "bad")
    )
    words = record.status.replace("_", " ")
    return tag("span", tag("span", f"{sign} ", aria_hidden="true"), words, class_=f"word {look}")


def answers(found: Findings) -> Html:
    """The distinct answers to each case: greedy ones should not differ between rounds; here it is seen."""
    groups: dict[tuple, dict[tuple, list[int]]] = defaultdict(lambda: defaultdict(list))
    prompts: dict[tuple, set[str]] = defaultdict(set)
    for n, r in enumerate(found.records, 1):
        if not r.warmup and (r.text or r.reasoning):
            groups[r.server, r.workload, r.case][r.reasoning, r.text].append(n)
            prompts[r.server, r.workload, r.case].add(r.prompt_sha256)
    several = len({by for by, _, _ in groups}) > 1
    room, parts = MOST_CHARACTERS, []
    for key, given in groups.items():
        by, workload, case = key
        texts = [found.prompts[h] for h in prompts[key] if h in found.prompts]
        shown = [join([tag("h4", "Asked"), _text(texts[0])])] if len(prompts[key]) == 1 and texts else []
        without = found.texts.get(f"{workload}/{case}")
        if len(prompts[key]) > 1 and without is not None:
            shown = [
                join(
                    [tag("h4", "Asked, behind a line of its own each time"), _text(_clipped(without, MOST_OF_ONE))]
                )
            ]
        for (reasoning, text), numbers in given.items():
            taken = _clipped(text, min(room, MOST_OF_ONE))
            room = max(0, room - len(taken))
            shown.append(
                join(
                    [
                        tag("h4", "Answered in ", _numbers(numbers)),
                        folded("reasoning", _text(_clipped(reasoning, MOST_OF_ONE))) if reasoning else None,
                        _text(taken),
                    ]
                )
            )
        asked = sum(map(len, given.values()))
        parts.append(
            folded(
                join(
                    [
                        f"{workload} · {case}",
                        f" · {by}" if several else "",
                        f": {plural(len(given), 'distinct answer')} to {plural(asked, 'request')}",
                    ]
                ),
                *shown,
            )
        )
    return join([tag("h3", "Prompts and answers"), *parts]) if parts else Html()


def _numbers(numbers: Iterable[int]) -> Html:
    return join([tag("a", f"{n}", href=f"#request-{n}") for n in numbers], ", ")


def _text(text: str) -> Html:
    return tag("pre", tag("code", text), class_="wrap", tabindex="0")


def _clipped(text: str, most: int) -> str:
    return (
        text
        if len(text) <= most
        else f"{text[:most]}\n[{len(text) - most:,} more characters are in records.jsonl]"
    )
