"""Which measured values belong together: the two sides of a comparison, round by round or boot by boot."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, harmonic_mean, median
from typing import Literal, NamedTuple

from llmrepro import intervals, metrics, terms
from llmrepro.claim import Comparison, Side
from llmrepro.client import Record
from llmrepro.notation import plural
from llmrepro.recipe import Recipe

Values = dict[int, dict[int, float]]  # by the server's boot as the recipe counts them, then by round


class NoPairs(ValueError):
    """Why two sides cannot be held against each other, as a sentence's end."""


@dataclass(frozen=True)
class Measured:
    """What a run measured. `records` are those that count: answered, no warm-ups. `name` is the arm's."""

    recipe: Recipe
    boots: dict[int, dict]
    records: list[Record]
    name: str = ""
    absent: str | None = None  # why nothing was measured, where that is so


class Paired(NamedTuple):
    """Pairs (a, b) in order. `of` says what one pair is: a boot's turn, or a round of one boot."""

    pairs: list[tuple[float, float]]
    of: Literal["boot", "round"]
    boots: int

    def counted(self) -> str:
        if self.of == "round":
            return f"{plural(len(self.pairs), 'round')} of one boot"
        return f"{plural(len(self.pairs), 'boot')} each"


def mean_of_means(metric: str, records: list[Record]) -> float:
    """The plain mean over prompts, each the mean over its requests; of one round, over its prompts."""
    return fmean(_of_prompts(metric, records))


def token_weighted(metric: str, records: list[Record]) -> float:
    """Σ tokens / Σ seconds: the speed of all of it, in which a long answer weighs more."""
    speeds = [(metrics.DEFINITIONS[metric](r), r.output_tokens) for r in records]
    return sum(n for _, n in speeds) / sum(n / s for s, n in speeds)


def harmonic(metric: str, records: list[Record]) -> float:
    """The harmonic mean over prompts: the speed if every answer had the same length."""
    return harmonic_mean(_of_prompts(metric, records))


def middle(metric: str, records: list[Record]) -> float:
    """The median over prompts."""
    return median(_of_prompts(metric, records))


def _of_prompts(metric: str, records: list[Record]) -> list[float]:
    by_case: dict[str, list[float]] = defaultdict(list)
    for record in records:
        by_case[record.case].append(metrics.DEFINITIONS[metric](record))
    return [fmean(values) for values in by_case.values()]


def of_suite(metric: str) -> tuple[str, ...]:
    """The statistics that are told of a whole suite: of a speed, those that a publication may have meant by its
    one number; of a time, the mean and the median."""
    if terms.METRICS[metric].unit == "tok/s":
        return ("mean_of_means", "token_weighted", "harmonic", "median")
    return ("mean_of_means", "median")


STATISTICS: dict[str, Callable[[str, list[Record]], float]] = {
    "value": mean_of_means,
    "mean_of_means": mean_of_means,
    "token_weighted": token_weighted,
    "harmonic": harmonic,
    "median": middle,
}


def cases(comparison: Comparison, a: Measured, b: Measured) -> list[str | None]:
    """The cases that a comparison speaks of, [None] for the sides as they are. Raises NoPairs."""
    if not comparison.each_case:
        return [None]
    of_a, of_b = (_cases(side.workload, run) for side, run in ((comparison.a, a), (comparison.b, b)))
    alone = sorted(set(of_a) ^ set(of_b))
    if alone or not of_a:
        raise NoPairs(f"its two workloads do not have the same cases: {', '.join(alone) or 'none'}")
    return list(of_a)


def _cases(workload: str | None, run: Measured) -> list[str]:
    return next((w.cases for w in run.recipe.workloads if w.id == workload), [])


def paired(comparison: Comparison, a: Measured, b: Measured, case: str | None = None) -> Paired:
    """The two sides' values in pairs; `case` takes the place of both sides' own.

    Sides of one server in one run are paired within a boot, round by round; of several boots each then is one
    pair of its means. Sides of two servers or runs are paired by turn: a's i-th boot with b's i-th, each the mean
    over its rounds. Raises NoPairs when a side is not measured, or nothing of it can be paired.
    """
    servers = [_server(side, run) for side, run in ((comparison.a, a), (comparison.b, b))]
    first, second = (
        values(run, comparison.metric, server, side.workload, case or side.case, comparison.statistic)
        for side, run, server in zip((comparison.a, comparison.b), (a, b), servers, strict=True)
    )
    shared = sorted(set(first) & set(second))
    if a is b and servers[0] == servers[1]:
        within = {n: _rounds(first[n], second[n]) for n in shared}
        within = {n: rounds for n, rounds in within.items() if rounds}
        if len(within) == 1:
            return Paired(next(iter(within.values())), "round", 1)
        found = [(fmean(x for x, _ in rounds), fmean(y for _, y in rounds)) for rounds in within.values()]
    else:
        found = [(fmean(first[n].values()), fmean(second[n].values())) for n in shared]
    if not found:
        raise NoPairs("no boot or round has both sides")
    return Paired(found, "boot", len(found))


def _rounds(a: dict[int, float], b: dict[int, float]) -> list[tuple[float, float]]:
    return [(a[n], b[n]) for n in sorted(set(a) & set(b))]


def _server(side: Side, run: Measured) -> str:
    """The server that a side means: the one it names, or the only one that could be meant."""
    if side.server is not None:
        return side.server
    measured = {b["server"] for b in run.boots.values()}
    asked = [
        s.id
        for s in run.recipe.servers
        if s.id in measured
        and (side.workload is None or any(w.id == side.workload and s.id in w.on for w in run.recipe.workloads))
    ]
    if not asked:
        raise NoPairs(f"{run.name or 'this run'} has no boot that was asked it")
    if len(asked) > 1:
        raise NoPairs(f"{run.name or 'this run'} has several servers, {', '.join(asked)}; the claim must name one")
    return asked[0]


def values(
    run: Measured,
    metric: str,
    server: str,
    workload: str | None = None,
    case: str | None = None,
    statistic: str = "value",
) -> Values:
    """What a server gave of a metric, by boot and round; of a whole workload (`case` None) its statistic.

    A boot that was made for one case is a round of that case. Raises NoPairs when there is nothing.
    """
    of = terms.METRICS[metric].of if metric in terms.METRICS else "request"
    if of == "weights":
        raise NoPairs("a fact of the weights is no measurement")
    if of == "boot":
        found = _of_boots(metric, run, server, workload, case)
    else:
        mine = [r for r in run.records if (r.server, r.workload) == (server, workload) and r.boot in run.boots]
        if metric == "prefill_tps.slope":
            found = _slopes(run, mine)
        else:
            wanted = [case] if case is not None else _cases(workload, run)
            found = _of_requests(metric, STATISTICS[statistic], run, mine, wanted)
    if not found:
        where = " · ".join(x for x in (run.name, server, workload, case) if x)
        raise NoPairs(f"no {metric} of {where}: not asked, not answered, or not told by its definition")
    return found


def _of_boots(metric: str, run: Measured, server: str, workload: str | None, case: str | None) -> Values:
    """A boot's own value. Of boots that went on for a dead one the first counts; those made for one case are
    told apart by it."""
    found: Values = defaultdict(dict)
    for boot in run.boots.values():
        value = {**boot.get("startup", {}), **boot.get("metrics", {})}.get(metric)
        made_for = (boot.get("workload"), boot.get("case"))
        if boot["server"] != server or value is None or made_for != ((workload, case) if case else (None, None)):
            continue
        found[boot["replicate"]].setdefault(boot.get("repeat", 0), value)
    return dict(found)


def _of_requests(
    metric: str, over: Callable[[str, list[Record]], float], run: Measured, mine: list[Record], wanted: list[str]
) -> Values:
    """The statistic over each round that lacks none of the wanted cases."""
    if metric not in metrics.DEFINITIONS:
        raise NoPairs(f"this version pairs no {metric}")
    rounds: dict[tuple[int, int], dict[str, Record]] = defaultdict(dict)
    for record in mine:
        if metrics.DEFINITIONS[metric](record) is not None:
            rounds[run.boots[record.boot]["replicate"], record.repeat][record.case] = record
    found: Values = defaultdict(dict)
    for (replicate, repeat), asked in sorted(rounds.items()):
        if wanted and all(c in asked for c in wanted):
            found[replicate][repeat] = over(metric, [asked[c] for c in wanted])
    return dict(found)


def _slopes(run: Measured, mine: list[Record]) -> Values:
    """1 / slope of TTFT over prompt tokens, a boot's from all its rounds."""
    points: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for record in mine:
        time = metrics.ttft_s(record)
        if record.prompt_tokens and time is not None:
            points[run.boots[record.boot]["replicate"]].append((record.prompt_tokens, time))
    fits = {n: intervals.rising([x for x, _ in p], [y for _, y in p]) for n, p in points.items()}
    return {n: {0: 1 / fit.mean} for n, fit in fits.items() if fit is not None}
