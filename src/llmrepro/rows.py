"""Metric rows: what a run measured, each value with the spread of its samples; and those that boots tell.

A row is {metric, server, workload, case, statistic, value, unit, low, high, n, boots, note}: `low` and `high` are
the 95 % interval, `n` the samples of which the value is the mean (boots where there are several). What a verdict
takes besides: `rounds` (all samples), `by_boot` (the boots' means, in order), `within` (the pooled relative
standard deviation of rounds within boots), `least`, `greatest`, `output_tokens` (mean of the answers),
`prompt_tokens` (fewest asked) and `gate`, why no verdict is given of it. What a row has not is None or [].
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from llmrepro import cache_use, intervals, terms
from llmrepro.recipe import Recipe
from llmrepro.workload import Workload


def row(
    metric: str,
    value,
    *,
    server=None,
    workload=None,
    case=None,
    statistic="value",
    low=None,
    high=None,
    n=1,
    boots=0,
    note=None,
    **more,
) -> dict:
    """A row; `more` are the fields that a verdict takes besides."""
    return {
        "metric": metric,
        "server": server,
        "workload": workload,
        "case": case,
        "statistic": statistic,
        "value": value,
        "unit": terms.METRICS[metric].unit,
        "low": low,
        "high": high,
        "n": n,
        "boots": boots,
        "note": note,
        **{"rounds": n, "by_boot": [], "within": None, "least": None, "greatest": None},
        **{"output_tokens": None, "prompt_tokens": None, "gate": None},
        **more,
    }


def sampled(metric: str, by_boot: Mapping[int, Sequence[float]], **where) -> dict:
    """The row of samples by boot: their mean over rounds, then boots, with its interval and what it is made of."""
    found = intervals.over_boots(by_boot)
    groups = [list(values) for values in by_boot.values() if values]
    every = [value for group in groups for value in group]
    return row(
        metric,
        found.mean,
        low=found.low,
        high=found.high,
        n=found.n,
        boots=len(groups),
        rounds=len(every),
        by_boot=[fmean(group) for group in groups],
        within=intervals.within(groups),
        least=min(every),
        greatest=max(every),
        **where,
    )


def of_boots(recipe: Recipe, started: dict[int, dict], claimed: set[str]) -> list[dict]:
    """Start-up times (the mean over a server's boots) and what the engine told of itself. Boots that were made
    for a case of a workload start in a state of its own: their times are that case's. Of what a log averages the
    metrics that are `claimed`."""
    rows = []
    for server in recipe.servers:
        facts: dict[str, list] = defaultdict(list)
        times: dict[tuple, list] = defaultdict(list)
        for boot in (b for b in started.values() if b["server"] == server.id):
            for metric, value in {**boot.get("startup", {}), **boot.get("metrics", {})}.items():
                if value is not None and terms.METRICS[metric].better is None:
                    facts[metric].append(value)
                elif value is not None:
                    times[metric, boot.get("workload"), boot.get("case")].append(value)
        for metric, values in facts.items():
            rows.append(_fact(metric, values, server=server.id))
        for (metric, workload, case), values in times.items():
            where = {"server": server.id, "workload": workload, "case": case}
            rows.append(sampled(metric, {n: [v] for n, v in enumerate(values)}, statistic="mean", **where))
    return rows + _window_rows(recipe, started, claimed)


def _fact(metric: str, values: list, **where) -> dict:
    """What an engine tells at every boot: one value, or where it measures (GiB, W) the mean of what it told."""
    if len(set(values)) > 1 and all(isinstance(v, float) for v in values):
        return sampled(metric, {n: [v] for n, v in enumerate(values)}, **where)
    return constant(metric, values, boots=len(values), **where)


def _window_rows(recipe: Recipe, started: dict[int, dict], claimed: set[str]) -> list[dict]:
    """Averages that an engine's log prints every few seconds, where they are claimed: of windows it worked in.

    They know nothing of where a request began: they are held against published log windows and nothing else.
    """
    wanted = [m for m in terms.METRICS if m.startswith("log_window.") and m in claimed]
    rows = []
    for server in recipe.servers if wanted else []:
        windows = {n: b.get("log_window", []) for n, b in started.items() if b["server"] == server.id}
        for metric in wanted:
            name = metric.removeprefix("log_window.")
            idle = () if name == "prefix_hit_rate" else (0.0,)
            seen = {n: [w[name] for w in told if w.get(name) not in (None, *idle)] for n, told in windows.items()}
            if any(seen.values()):
                rows.append(sampled(metric, seen, server=server.id, statistic="log_window"))
    return rows


def hit_rate(workload: Workload, server: str, started: dict[int, dict]) -> list[dict]:
    """The hit rate of a workload by the engine's own counters."""
    rate, boots = cache_use.hit_rate(started, server, workload.id)
    note = "by the engine's counters" if boots else "the engine counts no prompt tokens"
    where = {"server": server, "workload": workload.id, "boots": boots, "n": boots, "note": note}
    return [row("prefix_hit_rate", rate, **where)] if any(b["server"] == server for b in started.values()) else []


def constant(metric: str, values: list, **where) -> dict:
    """A fact that must not vary: its value when it did not, else none and why."""
    known = [v for v in values if v is not None]
    if len(set(known)) == 1 and len(known) == len(values):
        return row(metric, known[0], n=len(values), **where)
    note = f"it varied: {sorted(set(known))}" if known else "not told by the server"
    return row(metric, None, n=len(values), note=note, **where)
