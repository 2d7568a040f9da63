"""What was published, claim by claim, and what was found here beside it: a row per claim, a chart per metric."""

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from string import ascii_lowercase

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from llmrepro import quotations, terms
from llmrepro.charts.drawings import Drawing, canvas, legend
from llmrepro.charts.sources import ELSEWHERE, HERE, PUBLISHED
from llmrepro.findings import Findings
from llmrepro.notation import measured, plural
from llmrepro.quotations import SUBJECTS

NAME = "claims"
SPEEDS = ("decode_tps", "prefill_tps")
MOST_ROWS = 24  # of one chart; above that every server has its own
ROW_IN, MARGIN_IN = 0.25, 1.25
LONGEST = 36  # characters of a line of a label
BAR = 0.28  # of a row: how high the bar of a published range is
BAR_PUBLISHED = {"color": PUBLISHED["color"], "alpha": 0.55, "linewidth": 0}
BAR_ELSEWHERE = {"fill": False, "edgecolor": PUBLISHED["color"], "linewidth": 1.5}
POINT = {"linestyle": "", "markersize": 6, "fillstyle": "none", "markeredgewidth": 1.5}
FAR_APART = 20  # times: beyond it small values lie on top of each other, and the scale is a logarithm's
FAMILIES = {
    "decode_tps": "Decode speed",
    "prefill_tps": "Prefill speed",
    "ttft_s": "Time to the first token",
    "startup": "Start-up",
    "memory": "Memory",
    "log_window": "Averages of the engine's log",
    "power": "Power",
    "temperature": "Temperature",
}


def published(found: Findings) -> Iterator[Drawing]:
    """A chart per family of metrics, of all servers or of each; of one number only where it is a speed."""
    groups: dict[tuple[str, str], list[dict]] = defaultdict(list)
    for told in found.result["verdicts"]:
        family = told["metric"].partition(".")[0]
        ends = (told["published_low"], told["published_high"])
        if family in FAMILIES and ends != (None, None) and terms.METRICS[told["metric"]].unit:
            groups[family, told["unit"]].append(told)
    for (family, _), rows in groups.items():
        servers = list(dict.fromkeys(r["server"] for r in rows))
        if len(rows) <= MOST_ROWS or len(servers) == 1:
            parts = [(f"{NAME}-{family}", rows)]
        else:
            parts = [(f"{NAME}-{family}-{s}", [r for r in rows if r["server"] == s]) for s in servers]
        yield from (
            _drawing(found, name, family, part) for name, part in parts if len(part) > 1 or family in SPEEDS
        )


def _drawing(found: Findings, name: str, family: str, rows: list[dict]) -> Drawing:
    titles = {c.id: c.title or c.id for c in found.recipe.claims}
    own = {c.id for c in found.recipe.claims if quotations.own_conditions(c, found.recipe)}
    marks = definitions(r["metric"] for r in rows)
    several = len({r["server"] for r in rows}) > 1
    labels = [
        marked(_label(titles[r["claim"]], r["server"] if several else None), marks.get(r["metric"])) for r in rows
    ]
    one_server = next((r["server"] for r in rows if r["server"] and not several), None)
    title = FAMILIES[family] + (f", server {one_server}" if one_server and len(found.recipe.servers) > 1 else "")
    here = any(r["here"] is not None for r in rows)
    frame = Frame(
        title if here else f"{title}, as published",
        f"{FAMILIES[family].lower()} ({rows[0]['unit']})",
        labels,
        [x for r in rows for x in (*_ends(r), r["here"], r["here_low"], r["here_high"], *(r["spread"] or ()))],
    )
    figure, axes = canvas(found, frame.height_in)
    for place, row in enumerate(rows):
        _tolerance(axes, place, row)
        _published(axes, place, row, row["claim"] in own)
        _here(axes, place, row)
    frame.put(axes)
    aside(axes, [_digits(r) for r in rows])
    legend(figure, _entries(rows, here, own), 3)
    caption = " ".join([_caption(rows, here), *told_apart(marks)])
    return Drawing(name, title, caption, _alt(title, labels, rows, own), figure, _data(labels, rows, own))


def definitions(metrics: Iterable[str]) -> dict[str, str]:
    """A letter per metric, where a chart holds more than one: they are not one definition."""
    told = list(dict.fromkeys(metrics))
    return dict(zip(told, ascii_lowercase, strict=False)) if len(told) > 1 else {}


def marked(label: str, mark: str | None) -> str:
    return f"[{mark}] {label}" if mark else label


def told_apart(marks: dict[str, str]) -> list[str]:
    """The sentence of a caption that says what the letters of `definitions` stand for; none without any."""
    each = "; ".join(f"[{mark}] {terms.METRICS[metric].title}" for metric, mark in marks.items())
    return [f"Not one definition: {each}."] if marks else []


class Frame:
    """Title, scale and a label per row, the first on top: long ones in two lines, for which there is room."""

    def __init__(self, title: str, quantity: str, labels: list[str], values: list[float | None]):
        known = [v for v in values if v is not None]
        self.least, self.greatest = min(known), max(known)
        self.far = self.least > 0 and self.greatest / self.least > FAR_APART
        self.labels = [
            "\n".join(textwrap.wrap(label, LONGEST, max_lines=2, placeholder="…", break_on_hyphens=False))
            for label in labels
        ]
        longest = max(len(line) for label in self.labels for line in label.split("\n"))
        self.title = textwrap.fill(title, 64 - 3 * longest // 4)
        self.quantity = quantity + ("\nlogarithmic scale" if self.far else "")

    @property
    def height_in(self) -> float:
        row = ROW_IN * (1.25 if any("\n" in label for label in self.labels) else 1)
        return MARGIN_IN + row * len(self.labels) + 0.2 * (self.title.count("\n") + self.far)

    def put(self, axes: Axes) -> None:
        axes.set(title=self.title, xlabel=self.quantity, ylim=(len(self.labels) - 0.4, -0.6))
        axes.set_yticks(range(len(self.labels)), self.labels, fontsize=8, linespacing=0.95)
        axes.grid(axis="y", visible=False)
        if self.far:
            axes.set_xscale("log")
            axes.set_xlim(self.least / 1.3, self.greatest * 1.3)
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_minor_formatter(NullFormatter())
        else:
            axes.set_xlim(-0.02 * self.greatest, 1.06 * self.greatest)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.12g}"))


def aside(axes: Axes, texts: list[str]) -> None:
    """A text at the right of every row, in small type."""
    for place, text in enumerate(texts):
        axes.annotate(
            text,
            (1, place),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=PUBLISHED["color"],
        )


def _digits(row: dict) -> str:
    """The published figure without its unit, which the axis has."""
    return row["text"].removesuffix(f" {row['unit']}").replace(" to ", "–").replace("about ", "≈ ")


def _label(title: str, server: str | None) -> str:
    """A claim's title without the words that the chart's own says, and its server where there are several."""
    first, _, rest = title.partition(", ")
    shown = rest if first in SUBJECTS and " " in rest else title
    return f"{shown[:1].upper()}{shown[1:]}" + (f" · {server}" if server else "")


def _published(axes: Axes, place: int, row: dict, elsewhere: bool) -> None:
    """A point or, of a range, a bar; hollow squares and bars are of other conditions than the recipe's."""
    low, high = _ends(row)
    spread = row["spread"]
    if low != high:
        axes.barh(place, high - low, left=low, height=BAR, **(BAR_ELSEWHERE if elsewhere else BAR_PUBLISHED))
        return
    if spread:
        axes.plot(spread, [place, place], color=PUBLISHED["color"], linewidth=1.5)
    axes.plot([low], [place], **POINT, **(ELSEWHERE if elsewhere else PUBLISHED))


def _here(axes: Axes, place: int, row: dict) -> None:
    if row["here"] is None:
        return
    below = place + 0.22
    if row["here_low"] is not None:
        axes.plot([row["here_low"], row["here_high"]], [below, below], color=HERE["color"], linewidth=1.5)
    axes.plot([row["here"]], [below], linestyle="", markersize=5.5, **HERE)


def _tolerance(axes: Axes, place: int, row: dict) -> None:
    """The stretch in which a measured value is called equal, in the metric's unit."""
    if not row["tolerance"] or row["form"] == "peak":
        return
    low, high = _ends(row)
    middle = (low + high) / 2
    from_, to = row["tolerance"]
    if from_ is not None and to is not None:
        axes.barh(
            place + 0.05, (to - from_) * middle, left=from_ * middle, height=0.7, color="#e9e2d6", zorder=0.5
        )


def _ends(row: dict) -> tuple[float, float]:
    low, high = row["published_low"], row["published_high"]
    return (high if low is None else low), (low if high is None else high)


def _entries(rows: list[dict], here: bool, own: set[str]) -> list:
    """What is drawn, and nothing else."""
    kinds = {(_ends(r)[0] != _ends(r)[1], r["claim"] in own) for r in rows}
    looks = {
        (False, False): Line2D([], [], label="published", **POINT, **PUBLISHED),
        (True, False): Patch(label="published range", **BAR_PUBLISHED),
        (False, True): Line2D([], [], label="published, in other conditions", **POINT, **ELSEWHERE),
        (True, True): Patch(label="published range, in other conditions", **BAR_ELSEWHERE),
    }
    entries: list = [entry for kind, entry in looks.items() if kind in kinds]
    if here:
        entries.append(Line2D([], [], linestyle="", markersize=5.5, label="measured here", **HERE))
    if any(r["tolerance"] and None not in r["tolerance"] for r in rows):
        entries.append(Patch(color="#e9e2d6", label="called equal"))
    return entries


def _caption(rows: list[dict], here: bool) -> str:
    said = [f"{plural(len(rows), 'claim')} as published, the figures at the right."]
    if any(r["spread"] for r in rows):
        said.append("Lines through a point go from the least to the greatest of its published samples.")
    if here:
        said.append(
            "Below each the value measured here, with its 95 % interval where there are enough boots or rounds."
        )
    else:
        said.append("Nothing was measured here: every point is published.")
    return " ".join([*said, "Where each is stated is said in the table of claims."])


def _alt(title: str, labels: list[str], rows: list[dict], own: set[str]) -> str:
    told = []
    for label, row in zip(labels, rows, strict=True):
        here = ""
        if row["here"] is not None:
            value, interval = measured(row["here"], row["here_low"], row["here_high"])
            here = f", here {value}{f' ({interval})' if interval else ''}: {row['word'].replace('_', ' ')}"
        where = " in other conditions" if row["claim"] in own else ""
        told.append(f"{label}: published {row['text']}{where}{here}")
    both = any(row["here"] is not None for row in rows)
    return f"Chart of {title.lower()}, published{' and measured' if both else ''}. {'; '.join(told)}."


def _data(labels: list[str], rows: list[dict], own: set[str]) -> list[dict]:
    return [
        {
            "claim": row["claim"],
            "title": label,
            "metric": row["metric"],
            "other_conditions": row["claim"] in own,
            "unit": row["unit"],
            "published_low": row["published_low"],
            "published_high": row["published_high"],
            "spread_low": row["spread"][0] if row["spread"] else None,
            "spread_high": row["spread"][1] if row["spread"] else None,
            "here": row["here"],
            "here_low": row["here_low"],
            "here_high": row["here_high"],
            "word": row["word"],
        }
        for label, row in zip(labels, rows, strict=True)
    ]
