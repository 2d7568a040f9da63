"""Start-up of several servers: every boot's time to the first token on one scale, then the engines' phases."""

from collections import defaultdict
from statistics import fmean

from matplotlib.ticker import MaxNLocator

from llmrepro import terms
from llmrepro.charts.drawings import ENGINE, Drawing, grid, look, servers_of
from llmrepro.charts.startup import MARKS, named
from llmrepro.findings import Findings
from llmrepro.notation import measured, plural, seconds

TITLE = "Start-up, side by side"
START = "startup.first_completion_s"


def starts(found: Findings, name: str) -> Drawing | None:
    """Every boot's start on one scale, and below it, each on its own, the phases that an engine tells (means)."""
    boots = [b for b in found.boots.values() if "case" not in b and b.get("startup", {}).get(START) is not None]
    servers = servers_of(found, boots)
    if len(servers) < 2:
        return None
    phases = {s: p for s in servers if (p := _phases([b for b in boots if b["server"] == s]))}
    heights = [0.5 + 0.34 * len(servers), *(0.75 + 0.24 * len(p) for p in phases.values())]
    figure, (top, *below) = grid(found, heights)
    rows = []
    for place, server in enumerate(servers):
        times = [b["startup"][START] for b in boots if b["server"] == server]
        top.plot(times, [place] * len(times), linestyle="", markersize=7, alpha=0.65, **look(place))
        top.plot([fmean(times)] * 2, [place - 0.3, place + 0.3], color=look(place)["color"], linewidth=2.5)
        rows += [
            {
                "clock": "client",
                "server": server,
                "boot": n + 1,
                "what": MARKS[m],
                "start_s": 0.0,
                "end_s": b["startup"][m],
            }
            for n, b in enumerate(b for b in boots if b["server"] == server)
            for m in sorted(MARKS, key=lambda m: b["startup"].get(m) or 0)
            if b["startup"].get(m) is not None
        ]
    top.set(
        title=TITLE,
        xlabel="start to first token (s)",
        yticks=range(len(servers)),
        yticklabels=servers,
        ylim=(len(servers) - 0.5, -0.5),
        xlim=(0, 1.08 * max(r["end_s"] for r in rows)),
    )
    top.grid(visible=False, axis="y")
    for axes, (server, spans) in zip(below, phases.items(), strict=True):
        for y, (what, start, end) in enumerate(spans):
            axes.barh(y, end - start, left=start, height=0.6, color=ENGINE)
            axes.annotate(
                f"{seconds(end - start)} s", (end, y), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
            rows.append(
                {"clock": "engine", "server": server, "boot": None, "what": what, "start_s": start, "end_s": end}
            )
        axes.set(
            xlabel=f"{server}: its own phases, on their own scale (s)",
            yticks=range(len(spans)),
            yticklabels=[what for what, _, _ in spans],
            ylim=(len(spans) - 0.4, -0.6),
            xlim=(0, 1.16 * max(end for _, _, end in spans)),
        )
        axes.grid(visible=False, axis="y")
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    return Drawing(name, TITLE, _caption(found, servers, phases), _alt(found, servers, phases), figure, rows)


def _phases(boots: list[dict]) -> list[tuple[str, float, float]]:
    """(phase, from, to) in seconds by the engine's clock: the means over the boots that tell it."""
    told: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for boot in boots:
        for what, start, end in boot.get("phases", []):
            told[named(what)].append((start, end))
    return [(what, fmean(s for s, _ in spans), fmean(e for _, e in spans)) for what, spans in told.items()]


def _caption(found: Findings, servers: list[str], phases: dict) -> str:
    counted = ", ".join(
        f"{s} {plural(sum(b['server'] == s for b in found.boots.values()), 'boot')}" for s in servers
    )
    said = f"n: {counted}. Above: every boot by the client's clock, the bar its mean."
    if phases:
        said += " Below: the engine's own phases, means over its boots, by its own clock."
    return said


def _alt(found: Findings, servers: list[str], phases: dict) -> str:
    told = []
    for server in servers:
        rows = found.rows(START, server=server)
        if rows:
            value, interval = measured(rows[0]["value"], rows[0]["low"], rows[0]["high"])
            told.append(f"{server}: {value} s to the first token" + (f", interval {interval}" if interval else ""))
        told += [
            f"{server}, phase {what}: {seconds(start)} to {seconds(end)} s"
            for what, start, end in phases.get(server, [])
        ]
    return (
        f"Chart of {terms.METRICS[START].title} of several servers, and their start-up phases. {'; '.join(told)}."
    )
