"""Time to first token over prompt length: every sample, the fitted line, failures as crosses."""

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

TITLE = "Time to first token by prompt length"
COLUMNS = ["kind", "server", "boot", "case", "round", "prompt_tokens", "ttft_s", "status"]


def ttft_by_length(found: Findings, workload: Workload, name: str) -> Drawing | None:
    """Every request's time to first token, the fitted line, failures at their length; None without any."""
    samples, failures = _requests(found, workload)
    if samples.empty and failures.empty:
        return None
    servers = servers_of(found, [*samples.to_dict("records"), *failures.to_dict("records")])
    figure, axes = canvas(found, 3.7)
    lines = {
        server: line
        for server in servers
        if (line := _line(found, workload, server, samples[samples["server"] == server]))
    }
    for place, server in enumerate(servers):
        _draw(
            axes,
            samples[samples["server"] == server],
            failures[failures["server"] == server],
            lines.get(server),
            place,
            alone=len(servers) == 1,
        )
    times = [*samples["ttft_s"], *(end["ttft_s"] for ends, _ in lines.values() for end in ends)]
    axes.set(
        title=TITLE,
        xlabel="prompt tokens, as the server counts them",
        ylabel="time to first token (s)",
        xlim=(0, 1.08 * max([*samples["prompt_tokens"], *failures["prompt_tokens"]])),
        ylim=(0, 1.18 * max(times, default=1)),
    )
    if len(servers) > 1:
        legend(figure, handles([f"{s}: prefill {lines[s][1]}" if s in lines else s for s in servers]), 1)
    data = [
        *samples.to_dict("records"),
        *failures.to_dict("records"),
        *(e for ends, _ in lines.values() for e in ends),
    ]
    return Drawing(
        name,
        TITLE,
        _caption(samples, failures, bool(lines)),
        _alt(samples, failures, lines, several=len(servers) > 1),
        figure,
        data,
    )


def _requests(found: Findings, workload: Workload) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(answered, failed): a row per request. What failed has no time, and the length that was asked for."""
    samples, failures = [], []
    for r in requests_of(found, workload):
        time = metrics.ttft_s(r)
        if r.status not in ANSWERED:
            failures.append(
                ("failure", r.server, r.boot, r.case, r.repeat + 1, r.prompt_tokens or int(r.case), None, r.status)
            )
        elif r.prompt_tokens and time is not None:
            samples.append(("sample", r.server, r.boot, r.case, r.repeat + 1, r.prompt_tokens, time, r.status))
    return pd.DataFrame(samples, columns=COLUMNS), pd.DataFrame(failures, columns=COLUMNS)


def _line(found: Findings, workload: Workload, server: str, points: pd.DataFrame) -> tuple[list[dict], str] | None:
    """Both ends of each boot's least-squares line, and the speed of the result; None where the result has none."""
    rows = found.rows("prefill_tps.slope", workload=workload.id, server=server)
    if not rows:
        return None
    ends = []
    for boot, of_boot in points.groupby("boot"):
        fit = intervals.rising(list(of_boot["prompt_tokens"]), list(of_boot["ttft_s"]))
        if fit is None:
            continue
        at_zero = of_boot["ttft_s"].mean() - fit.mean * of_boot["prompt_tokens"].mean()
        ends += [
            dict.fromkeys(COLUMNS)
            | {"kind": "line", "server": server, "boot": int(boot)}
            | {"prompt_tokens": int(x), "ttft_s": float(at_zero + fit.mean * x)}
            for x in (of_boot["prompt_tokens"].min(), of_boot["prompt_tokens"].max())
        ]
    value, interval = measured(rows[0]["value"], rows[0]["low"], rows[0]["high"])
    return ends, f"{value} tok/s" + (f" ({interval})" if interval else "")


def _draw(
    axes: Axes,
    samples: pd.DataFrame,
    failures: pd.DataFrame,
    line: tuple[list[dict], str] | None,
    place: int,
    *,
    alone: bool,
) -> None:
    """One server's points, line and crosses; the speed stands at the line's end when no legend has it."""
    colour = look(place)["color"]
    if not samples.empty:
        sns.stripplot(
            samples,
            x="prompt_tokens",
            y="ttft_s",
            native_scale=True,
            jitter=False,
            size=6,
            alpha=0.65,
            ax=axes,
            **look(place),
        )
    if line:
        ends, speed = line
        sns.lineplot(
            pd.DataFrame(ends), x="prompt_tokens", y="ttft_s", units="boot", estimator=None, color=colour, ax=axes
        )
        if alone:
            axes.annotate(
                f"prefill {speed}",
                (ends[1]["prompt_tokens"], ends[1]["ttft_s"]),
                (-8, 10),
                ha="right",
                textcoords="offset points",
                color=colour,
            )
    if not failures.empty:  # near the upper edge: they have a length and no time
        axes.plot(
            failures["prompt_tokens"],
            [0.96] * len(failures),
            transform=axes.get_xaxis_transform(),
            linestyle="",
            marker="X",
            markersize=9,
            markeredgecolor="white",
            color=colour,
            clip_on=False,
        )


def _caption(samples: pd.DataFrame, failures: pd.DataFrame, fitted: bool) -> str:
    said = [
        f"n = {plural(len(samples), 'request')} of {plural(samples['boot'].nunique(), 'boot')}, each shown.",
        "Each boot has its least-squares line; its slope, turned over, is a prefill speed without fixed overhead. "
        f"Given is the mean over the boots with its {intervals.LEVEL:.0%} interval, of one boot the fit's own."
        if fitted
        else "No line: it takes three requests of two lengths, and a slope whose interval lies above nought.",
        "✕: a request that failed, at its length; it has no time and no place in the fit."
        if len(failures)
        else "",
    ]
    return " ".join(s for s in said if s)


def _alt(samples: pd.DataFrame, failures: pd.DataFrame, lines: dict, *, several: bool) -> str:
    told = [
        f"{length:,} tokens{f' on {server}' if several else ''}: {plural(len(times), 'request')}, "
        f"mean {number(fmean(times))} s"
        for (server, length), times in samples.groupby(["server", "prompt_tokens"], sort=False)["ttft_s"]
    ]
    told += [
        f"fitted line{f' of {server}' if several else ''}: prefill {speed}" for server, (_, speed) in lines.items()
    ]
    if len(failures):
        told.append(
            "failed: "
            + ", ".join(
                f"{n:,} tokens ({status})"
                for n, status in zip(failures["prompt_tokens"], failures["status"], strict=True)
            )
        )
    return f"Chart of time to first token in seconds over prompt tokens. {'; '.join(told)}."
