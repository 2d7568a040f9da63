"""How far a ladder held: the longest prompt that was answered whole, the shortest that failed and why."""

from collections.abc import Iterator
from typing import NamedTuple

from llmrepro import rows
from llmrepro.client import Record
from llmrepro.jobs import failed as _failed
from llmrepro.recipe import Recipe
from llmrepro.workload import Workload


class Reached(NamedTuple):
    """`verified` and `fails` are prompt tokens as the server counted them, or where it counted none, as planned;
    None where there is no such rung. `ending` says in a few words how the rung at `fails` ended, `reason` in a
    sentence. `beyond`: the cases that were not asked, since a shorter one had failed."""

    verified: int | None
    fails: int | None
    ending: str | None
    reason: str | None
    beyond: list[str]


def failed(record: Record) -> bool:
    return _failed(record.status, record.xids)


def ending(record: Record) -> str:
    """How a request ended, in a word: its status, "xid" for an answer during which the driver reported one, or
    "killed" where somebody else killed the server: that is the end of a ladder, and no failure of the engine."""
    if record.killed:
        return "killed"
    return "xid" if record.status == "ok" and record.xids else record.status


def reason(record: Record) -> str:
    """How a failed request ended, in a sentence's part."""
    return f"{_words(record)}: {record.error or 'no reason told'}"


def _words(record: Record) -> str:
    numbers = [f"Xid {n}" for n in dict.fromkeys(record.xids)]
    word = ending(record).replace("_", " ")
    return ", ".join(numbers if word == "xid" else [word, *numbers])


def of(workload: Workload, records: list[Record]) -> Reached:
    """How far the requests of one server came; `records` without warm-ups."""
    rungs = {case: [r for r in records if r.case == case and r.status != "skipped"] for case in workload.cases}
    bad = next((case for case in workload.cases if any(map(failed, rungs[case]))), None)
    place = len(workload.cases) if bad is None else workload.cases.index(bad)
    held = [case for case in workload.cases[:place] if rungs[case]]
    first = next((r for r in rungs.get(bad, []) if failed(r)), None)
    verified = asked_tokens(workload, held[-1], rungs[held[-1]]) if held else None
    fails = first and asked_tokens(workload, bad, [first])
    if workload.kind == "ladder" and fails is not None and fails <= (verified or 0):
        fails = int(bad)  # a server that refuses a prompt may tell less than it has
    return Reached(
        verified,
        fails,
        first and _words(first),
        first and reason(first),
        [case for case in workload.cases[place + 1 :] if not rungs[case]],
    )


def climbed(recipe: Recipe, records: list[Record]) -> Iterator[tuple[Workload, str, list[Record], Reached]]:
    """Every ladder that a server was asked: the workload, the server, its requests, how far they came."""
    for workload in recipe.workloads:
        for server in workload.on if workload.rises else []:
            mine = [r for r in records if (r.workload, r.server) == (workload.id, server)]
            if any(r.status != "skipped" for r in mine):
                yield workload, server, mine, of(workload, mine)


def sentences(recipe: Recipe, records: list[Record]) -> list[str]:
    """How far each ladder held, a sentence each; `records` without warm-ups."""
    return [
        f"{workload.title or workload.id} ({server}): {verified(reached)}, {fell(reached)}"
        for workload, server, _, reached in climbed(recipe, records)
    ]


def verified(reached: Reached) -> str:
    return "nothing verified" if reached.verified is None else f"verified up to {reached.verified:,} tokens"


def fell(reached: Reached) -> str:
    """Where it failed, and in a few words how."""
    if reached.ending is None:
        return "nothing failed, so that the boundary lies beyond"
    at = "a length that nobody counted" if reached.fails is None else f"{reached.fails:,}"
    return f"failed at {at} ({reached.ending})"


def reached(workload: Workload, records: list[Record], /, **where) -> list[dict]:
    """Rows of how far a ladder held; none where nothing was asked."""
    found = of(workload, records)
    told = {"n": len([r for r in records if r.status != "skipped"]), "boots": len({r.boot for r in records})}
    named = (("verified_tokens", found.verified, None), ("failed_tokens", found.fails, found.reason))
    return [rows.row(m, value, note=note, **told, **where) for m, value, note in named if value is not None]


def asked_tokens(workload: Workload, case: str, records: list[Record]) -> int | None:
    """Fewest prompt tokens of a case's requests as the server counted them; where it counted none, as planned."""
    answered = [r for r in records if not failed(r)] or records if workload.kind == "ladder" else records
    counted = [r.prompt_tokens for r in answered if r.prompt_tokens is not None]
    if counted:
        return min(counted)
    if workload.kind in ("prefill", "ladder"):
        return int(case)
    source = next((p.source for p in workload.prompts if p.id == case), None)
    return source.prompt_tokens if source else None
