"""Decode speed per prompt: every sample, the mean and its interval."""

from statistics import fmean

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from llmrepro import intervals, metrics
from llmrepro.charts.drawings import Drawing, canvas, handles, legend, look, requests_of, servers_of
from llmrepro.findings import Findings
from llmrepro.metrics import ANSWERED
from llmrepro.notation import measured, number, plural
from llmrepro.workload import Workload

TITLE = "Decode speed per prompt"
LEAST_SPAN = 0.2  # of the mean: noise of a thousandth then looks small
ALL = "all prompts"


def decode_per_prompt(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """Every request's decode speed, a band per prompt, the mean and its interval; None without a speed."""
    samples, means = _samples(found, workload), _means(found, workload)
    if samples.empty:
        return None
    servers = servers_of(found, samples.to_dict("records"))
    cases = [c for c in (*workload.cases, ALL) if c in set(means["case"])]
    figure, axes = canvas(found, 1.3 + 0.42 * len(cases) * max(1, 0.75 * len(servers)))
    for place, server in enumerate(servers):
        _draw(
            axes,
            samples[samples["server"] == server],
            means[means["server"] == server],
            cases,
            place,
            len(servers),
        )
    _bands(axes, cases, several=len(servers) > 1)
    nought = _span(axes, [*samples["decode_tps"], *means["low"].dropna(), *means["high"].dropna()])
    if len(servers) > 1:
        legend(figure, handles(servers), min(3, len(servers)))
    data = [*samples.to_dict("records"), *means.to_dict("records")]
    return Drawing(
        name,
        TITLE,
        _caption(found, workload, samples, ALL in cases, nought),
        _alt(samples, means, several=len(servers) > 1),
        figure,
        data,
    )


def _samples(found: Findings, workload: Workload) -> pd.DataFrame:
    """A row per request with a speed."""
    rows = [
        ("sample", r.server, r.case, r.boot, r.repeat + 1, metrics.decode_tps(r), None, None, None)
        for r in requests_of(found, workload)
        if r.status in ANSWERED
    ]
    return _frame([row for row in rows if row[5] is not None])


def _means(found: Findings, workload: Workload) -> pd.DataFrame:
    """The means as result.json has them: a row per prompt and server, and one for all prompts."""
    rows = [r for case in workload.cases for r in found.rows("decode_tps", workload=workload.id, case=case)]
    rows += found.rows("decode_tps", workload=workload.id, case=None, statistic="mean_of_means")
    return _frame(
        [
            ("mean", r["server"], r["case"] or ALL, None, None, r["value"], r["low"], r["high"], r["n"])
            for r in rows
        ]
    )


def _frame(rows: list[tuple]) -> pd.DataFrame:
    # Objects, so that whole numbers stay whole beside absent ones.
    return pd.DataFrame(
        rows, dtype=object, columns=["kind", "server", "case", "boot", "round", "decode_tps", "low", "high", "n"]
    )


def _draw(axes: Axes, samples: pd.DataFrame, means: pd.DataFrame, cases: list[str], place: int, of: int) -> None:
    """One server: its points round below round in the band of their prompt, so that a drift is seen."""
    middle = {case: n + 0.86 * ((place + 0.5) / of - 0.5) for n, case in enumerate(cases)}
    by_case = samples.groupby("case", sort=False)["case"]
    step = 0.42 * (by_case.cumcount() / (by_case.transform("size") - 1).clip(lower=1) - 0.5)
    points = pd.DataFrame(
        {
            "x": samples["decode_tps"].astype(float),
            "y": samples["case"].map(middle).astype(float) + (step - 0.13) / of,
        }
    )
    sns.stripplot(
        points,
        x="x",
        y="y",
        orient="y",
        native_scale=True,
        jitter=False,
        size=5,
        alpha=0.6,
        ax=axes,
        legend=False,
        **look(place),
    )
    for mean in means.to_dict("records"):
        y = middle[mean["case"]] + (0 if mean["case"] == ALL else 0.25 / of)
        ends = [mean["low"], mean["high"]] if mean["low"] is not None else [mean["decode_tps"]] * 2
        axes.plot(ends, [y, y], color=look(place)["color"], linewidth=2.5, solid_capstyle="butt", zorder=3)
        axes.plot(
            mean["decode_tps"], y, markersize=9, markeredgecolor="white", zorder=4, linestyle="", **look(place)
        )


def _bands(axes: Axes, cases: list[str], *, several: bool) -> None:
    axes.set(
        title=TITLE,
        xlabel="decode speed (tok/s)",
        ylabel="",
        yticks=range(len(cases)),
        yticklabels=cases,
        ylim=(len(cases) - 0.4, -0.6),
    )
    axes.grid(visible=False, axis="y")
    for place, case in enumerate(cases[1:], 1):
        if case == ALL or several:
            axes.axhline(place - 0.5, color="#8a8a8a" if case == ALL else "#e3e3e3", linewidth=0.8)


def _span(axes: Axes, values: list[float]) -> bool:
    """Set the axis around the values; whether it begins at nought."""
    low, high = min(values), max(values)
    room = max(0.08 * (high - low), (LEAST_SPAN * fmean(values) - (high - low)) / 2)
    start = 0 if low - room < 0.35 * high else low - room
    axes.set_xlim(start, high + room)
    return start == 0


def _caption(found: Findings, workload: Workload, samples: pd.DataFrame, overall: bool, nought: bool) -> str:
    rounds, boots = len(samples[["boot", "round"]].drop_duplicates()), samples["boot"].nunique()
    failed = sum(r.status not in ANSWERED for r in requests_of(found, workload))
    said = [
        f"n = {plural(len(samples), 'request')} in {plural(rounds, 'round')} of {plural(boots, 'boot')}.",
        "Small: each request, the first round on top; large: the mean, its bar the "
        f"{intervals.LEVEL:.0%} interval where there are three samples or more.",
        "All prompts: the mean of the prompts' means; its interval is over rounds, or over boots where there "
        "are several."
        if overall
        else "",
        "" if nought else "The axis does not start at zero.",
        f"{plural(failed, 'request')} failed and {'has' if failed == 1 else 'have'} no speed." if failed else "",
    ]
    return " ".join(s for s in said if s)


def _alt(samples: pd.DataFrame, means: pd.DataFrame, *, several: bool) -> str:
    told = []
    for mean in means.to_dict("records"):
        value, interval = measured(mean["decode_tps"], mean["low"], mean["high"])
        own = samples[(samples["case"] == mean["case"]) & (samples["server"] == mean["server"])]["decode_tps"]
        told.append(
            f"{mean['case']}{' on ' + mean['server'] if several else ''}: mean {value}"
            + (f", {intervals.LEVEL:.0%} interval {interval}" if interval else "")
            + (
                f", {plural(len(own), 'request')} from {number(own.min())} to {number(own.max())}"
                if len(own)
                else ""
            )
        )
    return f"Chart of decode speed in tokens per second, per prompt. {'; '.join(told)}."
