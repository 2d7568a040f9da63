"""Start-up as a timeline: the marks that the client saw, and the engine's own phases."""

import textwrap
from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from llmrepro import terms
from llmrepro.charts.drawings import CLIENT, ENGINE, Drawing, canvas, handles, legend, look, servers_of
from llmrepro.findings import Findings
from llmrepro.markup import showable
from llmrepro.notation import plural, seconds

TITLE = "Start-up"
MARKS = {
    "startup.port_s": "port open",
    "startup.models_s": "/v1/models answers",
    "startup.health_s": "health path says ready",
    "startup.first_completion_s": "first token",
}
MOST_CHARACTERS = 32  # of a phase's name
MOST_LABELLED = 3  # boots: with more, the times would hide each other


def startup(found: Findings) -> Drawing | None:
    """When each boot reached each mark by the client's clock, the engine's phases below; None without any.

    Boots that a workload made for a case of its own are in that workload's chart.
    """
    bars = [
        {"clock": clock, "server": boot["server"], "boot": n, "what": what, "start_s": start, "end_s": end}
        for n, boot in found.boots.items()
        if "case" not in boot
        for clock, what, start, end in _spans(boot)
    ]
    if not bars:
        return None
    bars.sort(key=lambda b: b["clock"] != "client")
    lines = list(dict.fromkeys((b["clock"], b["what"]) for b in bars))
    boots, servers = sorted({b["boot"] for b in bars}), servers_of(found, bars)
    figure, axes = canvas(found, 1.3 + len(lines) * (0.2 + min(0.12 * len(boots), 0.5)))
    height = 0.62 / len(boots)
    for bar in bars:
        y = lines.index((bar["clock"], bar["what"])) + (boots.index(bar["boot"]) - (len(boots) - 1) / 2) * height
        _draw(axes, bar, y, height, servers.index(bar["server"]), labelled=len(boots) <= MOST_LABELLED)
    axes.set(
        title=TITLE,
        xlabel="time (s)",
        xlim=(0, 1.16 * max(b["end_s"] for b in bars)),
        ylim=(len(lines) - 0.4, -0.6),
        yticks=range(len(lines)),
        yticklabels=[what for _, what in lines],
    )
    axes.grid(visible=False, axis="y")
    marks = sum(clock == "client" for clock, _ in lines)
    phases = marks < len(lines)
    if 0 < marks < len(lines):
        axes.axhline(marks - 0.5, color="#8a8a8a", linewidth=0.8)
    legend(
        figure,
        [
            Patch(color=CLIENT, label="seen by the client"),
            *([Patch(color=ENGINE, label="the engine's own phases")] if phases else []),
            *(handles(servers, color=CLIENT) if len(servers) > 1 else []),
        ],
        2,
    )
    return Drawing(
        "startup", TITLE, _caption(len(boots), phases), _alt(found, bars, several=len(servers) > 1), figure, bars
    )


def _spans(boot: dict) -> Iterator[tuple[str, str, float, float]]:
    """(clock, what, start_s, end_s), the client's marks in the order in which they came."""
    marks = {m: s for m, s in boot.get("startup", {}).items() if s is not None and m in terms.METRICS}
    for metric, reached_s in sorted(marks.items(), key=lambda m: m[1]):
        yield "client", MARKS.get(metric, terms.METRICS[metric].title), 0.0, reached_s
    for name, start, end in boot.get("phases", []):
        yield "engine", named(name), start, end


def named(phase: object) -> str:
    """A phase's name, short enough for an axis."""
    return textwrap.shorten(showable(phase), MOST_CHARACTERS, placeholder="…")


def _draw(axes: Axes, bar: dict, y: float, height: float, place: int, *, labelled: bool) -> None:
    """A bar that ends in a marker is the client's; a plain, higher one is the engine's."""
    client = bar["clock"] == "client"
    colour = CLIENT if client else ENGINE
    length_s = bar["end_s"] - bar["start_s"]
    axes.barh(
        y,
        length_s,
        left=bar["start_s"],
        height=height * (0.35 if client else 0.75),
        color=colour,
        edgecolor=colour,
        linewidth=1,
    )
    if client:
        axes.plot(bar["end_s"], y, markeredgecolor="white", markersize=7, **(look(place) | {"color": CLIENT}))
    if labelled:
        axes.annotate(
            f"{seconds(length_s)} s",
            (bar["end_s"], y),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )


def _caption(boots: int, phases: bool) -> str:
    said = f"n = {plural(boots, 'boot')}. Marked: from the process's start until the client saw it."
    if phases:
        said += (
            " Plain: the engine's own phases by its own clock, which starts when its process first logs, so "
            "they stand a little too far left beside the client's marks."
        )
    return said


def _alt(found: Findings, bars: list[dict], *, several: bool) -> str:
    told = []
    for n in sorted({b["boot"] for b in bars}):
        spans = [
            f"{b['what']} {seconds(b['end_s'])} s"
            if b["clock"] == "client"
            else f"engine phase {b['what']} {seconds(b['start_s'])} to {seconds(b['end_s'])} s"
            for b in bars
            if b["boot"] == n
        ]
        told.append(f"boot {n}{' (' + found.boots[n]['server'] + ')' if several else ''}: {', '.join(spans)}")
    return f"Timeline of start-up. {'; '.join(told)}."
