"""What the charts share: canvas, colours, shapes, legend, and what a chart is before it is a file."""

from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from llmrepro.client import Record
from llmrepro.findings import Findings
from llmrepro.workload import Workload

WIDTH_IN = 5.6
# Told apart by people who see red and green alike, at least 4.5 : 1 against white; shapes say the same again.
COLOURS = ("#0b66a8", "#b34a00", "#0a7355", "#8a3a93", "#5a5a5a", "#a01c44", "#7a5c00", "#2b2b80")
MARKERS = ("o", "s", "^", "D", "v", "P", "h", "<")
CLIENT, ENGINE = COLOURS[0], COLOURS[1]


@dataclass(frozen=True)
class Drawing:
    """A chart before it is a file. `data` are the rows drawn, nothing else."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Figure
    data: list[dict]


def canvas(found: Findings, height_in: float) -> tuple[Figure, Axes]:
    """A figure that is nobody's current one, with where it comes from at its foot."""
    figure, (axes,) = grid(found, [height_in])
    return figure, axes


def grid(found: Findings, heights_in: list[float]) -> tuple[Figure, list[Axes]]:
    """The same with several axes, one below the other."""
    days = sorted({r.started_at[:10] for r in found.records})
    return sheet(f"{found.recipe.id}{f', measured {days[0]}' if days else ''}", heights_in)


def sheet(foot: str, heights_in: list[float]) -> tuple[Figure, list[Axes]]:
    """The same, with what its foot says of where the numbers come from."""
    figure = Figure(figsize=(WIDTH_IN, sum(heights_in)), layout="constrained")
    figure.supxlabel(f"llmrepro · {foot}", x=0.99, ha="right", fontsize=7.5, color="#5a5a5a")
    every = list(figure.subplots(len(heights_in), height_ratios=heights_in, squeeze=False)[:, 0])
    for axes in every:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
    return figure, every


def requests_of(found: Findings, workload: Workload) -> list[Record]:
    """The requests that a workload asked, warm-ups left out, in the order of their boots and rounds."""
    servers = {s.id for s in found.recipe.servers}
    mine = [r for r in found.asked if r.workload == workload.id and r.case in workload.cases]
    return sorted((r for r in mine if r.server in servers), key=lambda r: (r.boot, r.repeat))


def servers_of(found: Findings, rows: list[dict]) -> list[str]:
    """The servers that rows speak of, in the recipe's order."""
    there = {r["server"] for r in rows}
    return [s.id for s in found.recipe.servers if s.id in there]


def look(place: int) -> dict:
    """Colour and shape of the server at a place in the list: both differ, so that either is enough."""
    return {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}


def handles(labels: list[str], **style) -> list[Line2D]:
    """Entries of a legend, one a server; `style` takes precedence over its own."""
    looks = [{"linestyle": "", "markersize": 8, **look(place), **style} for place in range(len(labels))]
    return [Line2D([], [], label=label, **each) for label, each in zip(labels, looks, strict=True)]


def legend(figure: Figure, entries: list, columns: int) -> None:
    """A legend above the axes, where it hides no point."""
    figure.legend(handles=entries, loc="outside upper right", ncols=columns, frameon=False, fontsize=9)
