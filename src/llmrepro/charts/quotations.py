"""What was published of a study's arms: each case with a marker per arm, and how many times one is the other."""

from collections.abc import Iterator

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from llmrepro import quotations
from llmrepro.charts.claims import BAR, Frame, aside, definitions, marked, told_apart
from llmrepro.charts.drawings import MARKERS, Drawing, legend, sheet
from llmrepro.charts.sources import PUBLISHED
from llmrepro.notation import plural, published
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
    marks = definitions(c.metric for c in claims)
    frame = Frame(
        f"{group}, as published",
        f"{group.lower()} ({rows[0].unit})",
        [marked(r.title, "".join(marks[m] for m in r.metrics) if marks else None) for r in rows],
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
    caption = " ".join([_caption(rows, arms, any(ratios)), *told_apart(marks), *found.study.differs_in[:1]])
    return Drawing(name, title, caption, _alt(title, rows, arms), figure, _data(rows, arms))


def _row(axes: Axes, place: int, row: Row, arms: list[str]) -> None:
    told = {arm: quotations.ends(c) for arm, c in row.claims.items() if quotations.ends(c)}
    if len(told) > 1:  # from one published figure to the other, whatever lies within a range
        gap = [min(high for _, high in told.values()), max(low for low, _ in told.values())]
        if gap[0] < gap[1]:
            axes.plot(gap, [place, place], color="#c9c9c9", linewidth=1, zorder=1)
    for arm, (low, high) in told.items():
        spread = _spread(row.claims[arm])
        if low != high:  # where in it the value lies was not published
            axes.barh(place, high - low, left=low, height=BAR, **_bar(arms.index(arm)))
            continue
        if spread:
            axes.plot(spread, [place, place], color=COLOUR, linewidth=1.5)
        axes.plot([low], [place], markersize=6, **_look(arms.index(arm)))


def _look(place: int) -> dict:
    """An arm's marker: all of them have the colour of what is published, so shape and filling tell them apart."""
    shape = (PUBLISHED["marker"], *(m for m in MARKERS if m != PUBLISHED["marker"]))[place % len(MARKERS)]
    filling = "none" if place % 2 else "full"
    return {"marker": shape, "fillstyle": filling, "color": COLOUR, "markeredgewidth": 1.5, "linestyle": ""}


def _bar(place: int) -> dict:
    """An arm's bar of a range, filled where its marker is, and hatched where there are more than two arms."""
    look = {"fill": place % 2 == 0, "edgecolor": COLOUR, "linewidth": 1.5, "hatch": "////" if place > 1 else None}
    return look | ({"facecolor": f"{COLOUR}66"} if place % 2 == 0 else {})


def _spread(claim) -> tuple[float, ...]:
    return claim.spread or ()


def _ratio(row: Row, arms: list[str]) -> float | None:
    return row.ratio(*arms) if len(arms) == 2 else None


def _entries(rows: list[Row], arms: list[str]) -> list:
    """What is drawn, and nothing else: of each arm its marker, its bar, or both."""
    entries: list = []
    for place, arm in enumerate(arms):
        told = [ends for r in rows if arm in r.claims and (ends := quotations.ends(r.claims[arm]))]
        if any(low == high for low, high in told):
            entries.append(Line2D([], [], markersize=7, label=f"{arm}, published", **_look(place)))
        if any(low != high for low, high in told):
            entries.append(Patch(label=f"{arm}, published range", **_bar(place)))
    return entries


def _caption(rows: list[Row], arms: list[str], ratios: bool) -> str:
    said = [f"{plural(len(rows), 'row')} of what was published; nothing was measured here."]
    if ratios:
        said.append(f"At the right {' / '.join(arms)}, computed from the two published values.")
    if any(_spread(c) for r in rows for c in r.claims.values()):
        said.append("Lines through a point go from the least to the greatest of its published samples.")
    return " ".join(said)


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
            "spread_low": claim.spread[0] if claim.spread else None,
            "spread_high": claim.spread[1] if claim.spread else None,
            "n": claim.n,
            "ratio": _ratio(row, arms),
        }
        for row in rows
        for arm, claim in row.claims.items()
        if (ends := quotations.ends(claim))
    ]
