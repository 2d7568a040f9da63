"""Measured over published, claim by claim: a row each with its interval and the stretch that is called equal."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llmrepro.charts.drawings import COLOURS, Drawing, canvas, legend
from llmrepro.findings import Findings
from llmrepro.notation import measured, plural

NAME = "ratios"
ROW_IN, MARGIN_IN, LONGEST = 0.3, 1.3, 40
FAR_APART = 3  # times
EQUAL = "#e9e2d6"
# By the word both colour and shape differ, so that either is enough.
LOOKS = {
    "reproduced": {"color": COLOURS[2], "marker": "o"},
    "not_reproduced": {"color": COLOURS[5], "marker": "X"},
    "inconclusive": {"color": COLOURS[6], "marker": "s"},
    "not_comparable": {"color": COLOURS[3], "marker": "D"},
    "not_evaluated": {"color": COLOURS[4], "marker": "v"},
}


def ratios(found: Findings) -> Drawing | None:
    """Every claim that a ratio was found of, in the recipe's order; None where there is none."""
    titles = {c.id: c.title or c.id for c in found.recipe.claims}
    rows = [v for v in found.result["verdicts"] if v["ratio"] is not None]
    if not rows:
        return None
    several = len({r["server"] for r in rows}) > 1
    labels = [titles[r["claim"]] + (f" · {r['server']}" if several and r["server"] else "") for r in rows]
    figure, axes = canvas(found, MARGIN_IN + ROW_IN * len(rows))
    for place, row in enumerate(rows):
        _equal(axes, place, row["tolerance"])
        look = LOOKS[row["word"]]
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], color=look["color"], linewidth=1.8)
        axes.plot([row["ratio"]], [place], linestyle="", markersize=7, **look)
    axes.axvline(1, color=".35", linewidth=1, zorder=0.8)
    short = [textwrap.shorten(label, LONGEST, placeholder="…") for label in labels]
    axes.set_yticks(range(len(rows)), short, fontsize=8)
    axes.set(title="Measured here over published", xlabel="ratio, 1 is equal", ylim=(len(rows) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    _scale(axes, [x for row in rows for x in (row["ratio"], row["low"], row["high"], 1.0) if x is not None])
    words = list(dict.fromkeys(r["word"] for r in rows))
    entries = [Line2D([], [], linestyle="", markersize=7, label=w.replace("_", " "), **LOOKS[w]) for w in words]
    bounded = any(_ends(r["tolerance"]) for r in rows)
    legend(figure, [*entries, *([Patch(color=EQUAL, label="called equal")] if bounded else [])], 3)
    return Drawing(NAME, "Measured here over published", _caption(rows), _alt(labels, rows), figure, _data(rows))


def _scale(axes: Axes, values: list[float]) -> None:
    """Half as fast lies as far from equal as twice as fast, where that makes a difference that can be seen."""
    if min(values) > 0 and max(values) / min(values) > FAR_APART:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("ratio, 1 is equal; logarithmic scale")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.12g}"))


def _ends(tolerance: list | tuple | None) -> tuple[float, float] | None:
    """Both ends of what is called equal, where it has two."""
    return tuple(tolerance) if tolerance and None not in tolerance else None


def _equal(axes: Axes, place: int, tolerance: list | tuple | None) -> None:
    ends = _ends(tolerance)
    if ends:
        axes.barh(place, ends[1] - ends[0], left=ends[0], height=0.7, color=EQUAL, zorder=0.5)


def _caption(rows: list[dict]) -> str:
    return (
        f"{plural(len(rows), 'claim')} of which there is a ratio. Lines are 95 % intervals: of the rounds, and of "
        "how far one start lies from another. A claim is reproduced when its whole line lies within what is "
        "called equal, and every condition that decides is equal. Where each is stated the table of claims says."
    )


def _alt(labels: list[str], rows: list[dict]) -> str:
    told = []
    for label, row in zip(labels, rows, strict=True):
        mean, interval = measured(row["ratio"], row["low"], row["high"])
        told.append(f"{label}: {mean}{f' ({interval})' if interval else ''}, {row['word'].replace('_', ' ')}")
    return f"Chart of measured over published, claim by claim. {'; '.join(told)}."


def _data(rows: list[dict]) -> list[dict]:
    kept = ("claim", "metric", "unit", "server", "ratio", "low", "high", "word")
    ends = [_ends(row["tolerance"]) or (None, None) for row in rows]
    return [
        {**{name: row[name] for name in kept}, "equal_from": low, "equal_to": high}
        for row, (low, high) in zip(rows, ends, strict=True)
    ]
