"""What was published of a study's arms: each case with a marker per arm, and how many times one is the other."""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from llmrepro import quotations, terms
from llmrepro.charts.claims import Frame, aside
from llmrepro.charts.drawings import MARKERS, Drawing, legend, sheet
from llmrepro.charts.sources import PUBLISHED
from llmrepro.notation import number, plural, published
from llmrepro.quotations import Row
from llmrepro.study_findings import StudyFindings

NAME = "published"
COLOUR = PUBLISHED["color"]


def side_by_side(found: StudyFindings) -> Iterator[Drawing]:
    """A chart per group of published numbers: of the cases two arms share, or of all it has."""
    groups: dict[str, list[Row]] = {}
    for row in found.quoted:
        if any(quotations.ends(c) for c in row.claims.values()):
            groups.setdefault(row.group, []).append(row)
    for group, every in groups.items():
        paired = [r for r in every if sum(bool(quotations.ends(c)) for c in r.claims.values()) > 1]
        shown = paired if len(paired) > 1 else every
        if len(shown) > 1:
            yield _drawing(found, group, shown)


def _drawing(found: StudyFindings, group: str, rows: list[Row]) -> Drawing:
    arms = [arm for arm in found.arms if any(arm in r.claims for r in rows)]
    claims = [c for r in rows for c in r.claims.values() if quotations.ends(c)]
    frame = Frame(
        f"{group}, as published",
        f"{group.lower()} ({rows[0].unit})",
        [r.title for r in rows],
        [x for c in claims for x in (*quotations.ends(c), *_spread(c))],
    )
    figure, (axes,) = sheet(f"{found.study.id}, published values", [frame.height_in])
    for place, row in enumerate(rows):
        _row(axes, place, row, list(found.arms))
    frame.put(axes)
    ratios = [_ratio(row, arms) for row in rows]
    if any(ratios):
        aside(axes, [f"{quotations.times(r)}×" if r else "" for r in ratios])
    legend(figure, _entries(rows, list(found.arms)), 3)
    name = f"{NAME}-{group.lower().replace(' ', '-')}"
    title = f"{group}: {' and '.join(arms)} as published"
    return Drawing(
        name, title, _caption(found, rows, arms, any(ratios)), _alt(title, rows, arms), figure, _data(rows, arms)
    )


def _row(axes: Axes, place: int, row: Row, arms: list[str]) -> None:
    told = {arm: quotations.ends(c) for arm, c in row.claims.items() if quotations.ends(c)}
    if len(told) > 1:
        middles = [sum(ends) / 2 for ends in told.values()]
        axes.plot([min(middles), max(middles)], [place, place], color="#c9c9c9", linewidth=1, zorder=1)
    for arm, (low, high) in told.items():
        spread = _spread(row.claims[arm])
        if low != high:
            axes.plot([low, high], [place, place], color=COLOUR, linewidth=5, alpha=0.4, solid_capstyle="butt")
        elif spread:
            axes.plot(spread, [place, place], color=COLOUR, linewidth=1.5)
        axes.plot([(low + high) / 2], [place], markersize=6, **_look(arms.index(arm)))


def _look(place: int) -> dict:
    """An arm's marker: all of them have the colour of what is published, so shape and filling tell them apart."""
    shape = (PUBLISHED["marker"], *(m for m in MARKERS if m != PUBLISHED["marker"]))[place % len(MARKERS)]
    filling = "none" if place % 2 else "full"
    return {"marker": shape, "fillstyle": filling, "color": COLOUR, "markeredgewidth": 1.5, "linestyle": ""}


def _spread(claim) -> tuple[float, ...]:
    return claim.spread or ()


def _ratio(row: Row, arms: list[str]) -> float | None:
    return row.ratio(*arms) if len(arms) == 2 else None


def _entries(rows: list[Row], arms: list[str]) -> list:
    there = [arm for arm in arms if any(arm in r.claims for r in rows)]
    entries = [Line2D([], [], markersize=7, label=f"{arm}, published", **_look(arms.index(arm))) for arm in there]
    if any(e[0] != e[1] for r in rows for c in r.claims.values() if (e := quotations.ends(c))):
        entries.append(Line2D([], [], color=COLOUR, linewidth=5, alpha=0.4, label="published range"))
    return entries


def _caption(found: StudyFindings, rows: list[Row], arms: list[str], ratios: bool) -> str:
    said = [f"{plural(len(rows), 'row')} of what was published; nothing was measured here."]
    if ratios:
        said.append(f"At the right {' / '.join(arms)}, computed from the two published values.")
    if any(_spread(c) for r in rows for c in r.claims.values()):
        said.append("Lines through a point go from the least to the greatest of its published samples.")
    metrics = list(dict.fromkeys(m for r in rows for m in r.metrics))
    if len(metrics) > 1:
        said.append(f"Not one definition: {'; '.join(terms.METRICS[m].title for m in metrics)}.")
    return " ".join([*said, *found.study.differs_in[:1]])


def _alt(title: str, rows: list[Row], arms: list[str]) -> str:
    told = []
    for row in rows:
        each = ", ".join(f"{arm} {published(c.value, c.unit)}" for arm, c in row.claims.items())
        ratio = _ratio(row, arms)
        told.append(f"{row.title}: {each}" + (f", {quotations.times(ratio)} times" if ratio else ""))
    return f"Chart of {title[:1].lower()}{title[1:]}. {'; '.join(told)}."


def _data(rows: list[Row], arms: list[str]) -> list[dict]:
    """A line per published value."""
    return [
        {
            "title": row.title,
            "workload": row.workload,
            "case": row.case,
            "arm": arm,
            "claim": claim.id,
            "metric": claim.metric,
            "unit": claim.unit,
            "published_low": ends[0],
            "published_high": ends[1],
            "spread": " to ".join(number(x) for x in claim.spread) if claim.spread else None,
            "n": claim.n,
            "ratio": _ratio(row, arms),
        }
        for row in rows
        for arm, claim in row.claims.items()
        if (ends := quotations.ends(claim))
    ]
