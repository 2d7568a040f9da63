"""How long it holds: the rungs of each ladder, up to where it was verified and where it failed."""

from statistics import fmean

from llmrepro import ladder, metrics
from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.ladder import Reached
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import NOTHING, number
from llmrepro.workload import Workload


def of(found: Findings) -> Html:
    """A sentence and a table for every ladder that a server was asked; empty where none was."""
    several = len(found.servers) > 1
    parts = [
        join([tag("p", *_said(workload, server if several else None, reached)), _rungs(workload, server, records)])
        for workload, server, records, reached in ladder.climbed(found.recipe, found.asked)
    ]
    return join(parts) if parts else Html()


def _said(workload: Workload, server: str | None, reached: Reached) -> list[Html | str]:
    named = f"{workload.title or workload.id}{f' · {server}' if server else ''}: "
    said = [named, tag("strong", ladder.verified(reached)), ", ", ladder.fell(reached), "."]
    if reached.ending is not None:
        beyond = (
            f", {', '.join(f'{int(c):,}' for c in reached.beyond)} of them not asked" if _numbers(reached) else ""
        )
        said.append(f" Longer prompts lie outside the verified range{beyond}.")
    return said


def _numbers(reached: Reached) -> bool:
    return bool(reached.beyond) and all(case.isdecimal() for case in reached.beyond)


def _rungs(workload: Workload, server: str, records: list[Record]) -> Html:
    memory = any(r.memory for r in records)
    device = any("device" in (r.memory or {}) for r in records)
    body = []
    for case in workload.cases:
        mine = [r for r in records if r.case == case and r.status != "skipped"]
        if not mine:
            continue
        bad = [r for r in mine if ladder.failed(r)]
        body.append(
            (
                tag("span", f"{int(case):,} tokens" if case.isdecimal() else case, class_="whole"),
                _sign(bad),
                _counted(mine),
                *(_mean([d(r) for r in mine if r not in bad]) for d in DEFINITIONS.values()),
                *([_mean([(r.memory or {}).get("server") for r in mine])] if memory else []),
                *([_mean([(r.memory or {}).get("device") for r in mine])] if device else []),
                f"{len(mine):,}",
            )
        )
    header = ["Rung", "How it ended", "prompt tokens", *DEFINITIONS]
    header += [*(["server, GiB"] if memory else []), *(["GPU, GiB"] if device else []), "n"]
    return table("Rungs in the order asked; times and speeds by the client's clock", header, body, words=(1,))


DEFINITIONS = {
    "TTFT, s": metrics.ttft_s,
    "prefill, tok/s": metrics.prefill_tps,
    "decode, tok/s": metrics.decode_tps,
}


def _sign(bad: list[Record]) -> Html:
    if not bad:
        return tag("span", tag("span", "✓ ", aria_hidden="true"), "ok", class_="word good")
    word = tag(
        "span", tag("span", "✗ ", aria_hidden="true"), ladder.ending(bad[0]).replace("_", " "), class_="word bad"
    )
    return join([word, tag("small", bad[0].error) if bad[0].error else None])


def _counted(records: list[Record]) -> str:
    counts = sorted({r.prompt_tokens for r in records if r.prompt_tokens is not None})
    return " to ".join(f"{n:,}" for n in dict.fromkeys((counts[0], counts[-1]))) if counts else NOTHING


def _mean(values: list[float | None]) -> str:
    known = [v for v in values if v is not None]
    return number(fmean(known)) if known else NOTHING
