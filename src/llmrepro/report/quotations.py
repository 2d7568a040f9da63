"""A study's page where nothing was measured: what was published of its arms, side by side, and what would run."""

from collections.abc import Iterator

from llmrepro import quotations, terms
from llmrepro.claim import Comparison
from llmrepro.contrast import form
from llmrepro.markup import Html, code, folded, join, table, tag
from llmrepro.notation import NOTHING, exact, plural, published
from llmrepro.quotations import Row
from llmrepro.report import published as of_recipe
from llmrepro.report.comparisons import EVIDENCE, ours
from llmrepro.report.sections import Section
from llmrepro.study_findings import StudyFindings

PAGE = "arms/{}/report.html"  # of an arm, from the study's page
TEXT = "As published: no figure below was measured here. What is computed from them says so."


def caveats(found: StudyFindings) -> Section | None:
    """What the study's author says that the arms differ in, and how little a figure rests on."""
    if not found.study.differs_in:
        return None
    said = tag("ul", *(tag("li", text) for text in found.study.differs_in), class_="flags")
    return Section("caveats", "Before you compare them", "", said)


def claims(found: StudyFindings) -> Html:
    """What was claimed of one arm against another, and what the published values make of it."""
    folder, where = of_recipe.places([c.locator for c in found.study.comparisons])
    rows = [
        (
            join([c.title or c.id, tag("small", terms.METRICS[c.metric].title)]),
            join([_claimed(c), ours(c)]),
            _computed(c, found.quoted),
            join([EVIDENCE[c.evidence], tag("small", place)]),
        )
        for c, place in zip(found.study.comparisons, where, strict=True)
    ]
    shown = table(
        "Claims across the arms, as published",
        ["Claim", "Claimed", "Computed from the published values", "Stated"],
        rows,
        words=(1, 2, 3),
        ids=[f"claim-{c.id}" for c in found.study.comparisons],
    )
    return join([shown, of_recipe.stands_for(folder)])


def _claimed(claim: Comparison) -> str:
    sides = f"{claim.a.arm} / {claim.b.arm}"
    if claim.order is not None:
        return f"{claim.a.arm} {claim.order} {claim.b.arm}" + (", in every case" if claim.each_case else "")
    return f"{sides}: {form(claim)}" + (", in every case" if claim.each_case else "")


def _computed(claim: Comparison, told: list[Row]) -> Html | str:
    found = [(row, ratio) for row, ratio in quotations.behind(claim, told)]
    if not found:
        return NOTHING
    least, greatest = (quotations.times(pick(ratio for _, ratio in found)) for pick in (min, max))
    if len(found) > 1:
        return join([f"{least} to {greatest} times", tag("small", plural(len(found), "case"))])
    row = found[0][0]
    values = " / ".join(exact(quotations.number(row.claims[side.arm])) for side in (claim.a, claim.b))
    return join([f"{least} times", tag("small", f"{values} {row.unit}")])


def side_by_side(found: StudyFindings) -> Iterator[Html]:
    """A table per group: a row per case, a column per arm, every value a link to its claim."""
    arms = list(found.arms)
    for group in dict.fromkeys(row.group for row in found.quoted):
        rows = [row for row in found.quoted if row.group == group]
        unit = rows[0].unit
        several = len({m for row in rows for m in row.metrics}) > 1
        ratio = [" / ".join(arms)] if len(arms) == 2 and any(row.ratio(*arms) for row in rows) else []
        yield table(
            f"{group}{f' ({unit})' if unit else ''}, as published"
            + (f"; {ratio[0]} is computed" if ratio else ""),
            ["Quantity", *arms, *ratio],
            [
                (
                    join([row.title, tag("small", terms.METRICS[row.metrics[0]].title)])
                    if several and len(row.metrics) == 1
                    else row.title,
                    *(_cell(row, arm) for arm in arms),
                    *([_times(row.ratio(*arms))] if ratio else []),
                )
                for row in rows
            ],
            words=range(1, len(arms) + 1) if any(_said(row) for row in rows) else (),
        )
    left = quotations.elsewhere(found.study, found.recipes)
    if left:
        told = ", ".join(f"{n:,} of {arm}" for arm, n in left.items())
        text = f"Left out here, since they were made in other conditions: {told}. They are on the arms' own pages."
        yield tag("p", text, class_="quiet")


def _said(row: Row) -> bool:
    return any(claim.value.form == "words" for claim in row.claims.values())


def _times(ratio: float | None) -> str:
    return NOTHING if ratio is None else f"{quotations.times(ratio)} times"


def _cell(row: Row, arm: str) -> Html | str:
    claim = row.claims.get(arm)
    if claim is None:
        return NOTHING
    shown = published(claim.value, "" if claim.unit == row.unit else claim.unit)
    parts = [
        f"n = {claim.n:,}" if claim.n else "",
        f"{exact(claim.spread[0])} to {exact(claim.spread[1])}" if claim.spread else "",
    ]
    small = ", ".join(p for p in parts if p)
    return join(
        [
            tag("a", shown, href=f"{PAGE.format(arm)}#claim-{claim.id}"),
            tag("small", small) if small else None,
            tag("small", terms.METRICS[claim.metric].title) if len(row.metrics) > 1 else None,
        ]
    )


def commands(found: StudyFindings) -> Html | None:
    """What a live run executes of each arm, folded."""
    told = [
        folded(f"The commands of {arm}", code(one.commands.rstrip("\n")))
        for arm, one in found.arms.items()
        if one.commands
    ]
    return join(told) if told else None
