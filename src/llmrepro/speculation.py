"""What speculative decoding did: drafts by the engine's counters, held against its answers; with it and without.

Shares are made of token counts, never of other shares: a short draft counts as little as it is. Counters are the
engine's own, read before and after each workload of a boot.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from math import inf
from statistics import fmean
from typing import NamedTuple

from llmrepro import metrics
from llmrepro.client import Record
from llmrepro.metrics import ANSWERED
from llmrepro.rows import row
from llmrepro.workload import Workload

METRICS = ("acceptance", "acceptance_length", "tokens_per_step")
APART = 0.005  # of the drafted tokens: counters against the sum over requests, beyond which it is told
BY_COUNTERS = "by the engine's counters, the warm-up included"
BY_ANSWERS = "by the answers: the engine counts no drafts"


class Sums(NamedTuple):
    """Counts over some requests; None where one is not told of all of them. `by_position` counts how often the
    first, second, … token of a draft was accepted, () where that is not told."""

    accepted: float | None = None
    drafted: float | None = None
    checks: float | None = None  # steps that checked a draft
    tokens: float | None = None
    steps: float | None = None  # of the engine
    by_position: tuple[float, ...] = ()

    def values(self) -> dict[str, float]:
        """The metrics that these counts tell."""
        found = {}
        if self.drafted and self.accepted is not None:
            found["acceptance"] = self.accepted / self.drafted
        if self.checks and self.accepted is not None:
            found["acceptance_length"] = 1 + self.accepted / self.checks
        if self.steps and self.tokens is not None:
            found["tokens_per_step"] = self.tokens / self.steps
        return found

    @property
    def shares(self) -> list[float]:
        """Of the drafts the share in which the token at each position was accepted."""
        return [count / self.checks for count in self.by_position]


COUNTERS = {
    "accepted": "spec_accepted_tokens",
    "drafted": "spec_draft_tokens",
    "checks": "spec_drafts",
    "tokens": "generation_tokens",
    "steps": "engine_steps",
}
PLACE = re.compile(r"spec_accepted_by_position\.(\d{1,3})")


def counted(boots: Iterable[dict], workload: str) -> Sums:
    """What the counters of a server's boots grew by over a workload, its warm-ups included. A boot that died
    before its second reading counts nothing, nor one whose counters fell or say what cannot be."""
    return together(sums for boot in boots if (sums := _grown(boot, workload)) is not None)


def _grown(boot: dict, workload: str) -> Sums | None:
    read = (boot.get("counters") or {}).get(workload, {})
    before, after = read.get("before"), read.get("after")
    if not before or not after:
        return None
    if any(after[name] < before[name] for name in after.keys() & before.keys()):
        return None  # counted anew meanwhile: another server answers there
    grown = {field: after[n] - before[n] for field, n in COUNTERS.items() if n in before and n in after}
    if grown.get("accepted", 0) > grown.get("drafted", inf):
        return None
    positions = {
        int(found[1]): value - before.get(name, 0)  # llama.cpp has none before its first draft
        for name, value in after.items()
        if (found := PLACE.fullmatch(name))
    }
    return Sums(**grown, by_position=tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)))


def together(told: Iterable[Sums]) -> Sums:
    """The counts of all of them; a position that some drafts did not reach was accepted in none of those."""
    told = list(told)
    if not told:
        return Sums()
    totals = [None if None in counts else sum(counts) for counts in zip(*(s[:-1] for s in told), strict=True)]
    if any(s.accepted and not s.by_position for s in told):
        return Sums(*totals)
    by_position = zip_longest(*(s.by_position for s in told), fillvalue=0)
    return Sums(*totals, tuple(map(sum, by_position)))


def by_boot(started: Mapping[int, dict]) -> dict[tuple[str, str], dict[int, Sums]]:
    """By the counters, of every (workload, server) in which there were drafts, each boot."""
    found: dict[tuple[str, str], dict[int, Sums]] = {}
    for n, boot in started.items():
        for workload in boot.get("counters") or {}:
            sums = counted([boot], workload)
            if sums.checks and sums.accepted is not None:
                found.setdefault((workload, boot["server"]), {})[n] = sums
    return found


def of_requests(records: Iterable[Record]) -> Sums:
    """The same of requests, over those that tell of their drafts."""
    told = [(r, *metrics.drafts(r)) for r in records]
    told = [(r, drafted, accepted) for r, drafted, accepted in told if drafted and accepted is not None]
    if not told:
        return Sums()
    checks = [metrics.draft_checks(r) for r, _, _ in told]
    steps = [(r.output_tokens, per) for r, _, _ in told if (per := metrics.tokens_per_step(r)) is not None]
    whole = len(steps) == len(told)
    return Sums(
        accepted=sum(accepted for _, _, accepted in told),
        drafted=sum(drafted for _, drafted, _ in told),
        checks=None if None in checks else sum(checks),
        tokens=sum(n for n, _ in steps) if whole else None,
        steps=sum(n / per for n, per in steps) if whole else None,
    )


def rows(workload: Workload, records: list[Record], started: Mapping[int, dict]) -> list[dict]:
    """Metric rows of a workload in which a server drafted, of every server that it was asked of: of each case by
    its answers, of the whole by the engine's counters. `records` are the answered ones, no warm-ups."""
    asked = [r for r in records if r.workload == workload.id]
    boots = {s: [b for b in started.values() if b["server"] == s] for s in workload.on}
    if not any(metrics.drafts(r)[0] for r in asked) and not any(
        counted(b, workload.id).drafted for b in boots.values()
    ):
        return []
    found = []
    for server in workload.on:
        mine = [r for r in asked if r.server == server]
        where = {"server": server, "workload": workload.id, "statistic": "pooled"}
        for case in workload.cases:
            found += _rows([r for r in mine if r.case == case], case=case, **where)
        found += _whole(workload.kind, mine, boots[server], **where)
    return found


def _rows(records: list[Record], **where) -> list[dict]:
    """A row per metric that the answers tell, with what each boot gave."""
    by_boot = [
        of_requests([r for r in records if r.boot == n]).values() for n in sorted({r.boot for r in records})
    ]
    n = sum(bool(metrics.drafts(r)[0]) for r in records)
    return [
        _row(metric, value, [b[metric] for b in by_boot if metric in b], n=n, **where)
        for metric, value in of_requests(records).values().items()
    ]


def _whole(kind: str, mine: list[Record], boots: list[dict], *, workload: str, **where) -> list[dict]:
    where = {"workload": workload, **where}
    each = [counted([b], workload).values() for b in boots]
    whole = counted(boots, workload)
    if whole.drafted is None:  # an engine without counters of drafts
        return _rows(mine, note=BY_ANSWERS, **where)
    return [
        _row(metric, value, [b[metric] for b in each if metric in b], n=len(mine), note=BY_COUNTERS, **where)
        for metric, value in whole.values().items()
        # of several requests at once a step gives a token each, drafts or not
        if metric != "tokens_per_step" or kind != "concurrency"
    ]


def _row(metric: str, value: float, by_boot: list[float], **more) -> dict:
    spread = {"by_boot": by_boot, "least": min(by_boot), "greatest": max(by_boot)} if by_boot else {}
    return row(metric, value, boots=len(by_boot), **spread, **more)


def flags(started: Mapping[int, dict], records: list[Record]) -> list[str]:
    """Where the counters of a boot and its answers disagree about drafts. `records` with the boots that asked
    them, warm-ups included. Where no answer tells of drafts, or one was not whole, there is nothing to hold
    against the counters."""
    found = []
    for n, boot in started.items():
        for workload in boot.get("counters", {}):
            mine = [r for r in records if (r.boot, r.workload) == (n, workload) and r.status != "skipped"]
            engine, answers = counted([boot], workload), of_requests(mine)
            if None in (engine.drafted, engine.accepted, answers.drafted) or any(
                r.status not in ANSWERED for r in mine
            ):
                continue
            room = APART * max(engine.drafted, answers.drafted)
            if max(abs(engine.drafted - answers.drafted), abs(engine.accepted - answers.accepted)) > room:
                found.append(
                    f"boot {n}: of the drafts of {workload} the engine counted {engine.accepted:,.0f} of "
                    f"{engine.drafted:,.0f} tokens as accepted, its answers {answers.accepted:,.0f} of "
                    f"{answers.drafted:,.0f}"
                )
    return found


def with_and_without(
    workload: Workload, speculation: Mapping[str, str | None], records: list[Record]
) -> list[dict]:
    """Each server that speculates against the first that does not, asked the same workload: {workload, without,
    with, speculation, cases}. `speculation` tells of each server what it does, "none" or how; one of which it is
    not known is left out. `records` are the answered ones, no warm-ups.

    A case is {case, without_tps, with_tps, ratio, same, answers} and the metrics that its answers tell: `same` of
    `answers` have the very text of one without speculation, None where answers are sampled.
    """
    asked = [r for r in records if r.workload == workload.id]
    there = [s for s in workload.on if any(r.server == s for r in asked)]
    plain = next((s for s in there if speculation.get(s) == "none"), None)
    return [
        {
            "workload": workload.id,
            "without": plain,
            "with": server,
            "speculation": speculation[server],
            "cases": [_case(workload, case, plain, server, asked) for case in workload.cases],
        }
        for server in there
        if plain is not None and speculation.get(server) not in (None, "none")
    ]


def _case(workload: Workload, case: str, plain: str, server: str, asked: list[Record]) -> dict:
    without, mine = ([r for r in asked if (r.server, r.case) == (s, case)] for s in (plain, server))
    slow, fast = (_mean(map(metrics.decode_tps, records)) for records in (without, mine))
    texts = {(r.text_sha256, r.reasoning) for r in without}
    greedy = workload.sampling.temperature == 0
    return {
        "case": case,
        "without_tps": slow,
        "with_tps": fast,
        "ratio": fast / slow if fast and slow else None,
        **{metric: of_requests(mine).values().get(metric) for metric in METRICS},
        "same": sum((r.text_sha256, r.reasoning) in texts for r in mine) if greedy and texts else None,
        "answers": len(mine),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fmean(known) if known else None
