"""What a page shows of a publication alone: its claims, without a verdict, and what would test them."""

from collections import Counter

from llmrepro import quotations, terms
from llmrepro.claim import Claim
from llmrepro.contrast import form
from llmrepro.findings import Findings
from llmrepro.markup import Html, join, table, tag
from llmrepro.notation import exact, number, published
from llmrepro.report import comparisons
from llmrepro.report.comparisons import EVIDENCE
from llmrepro.report.words import value

TEXT = "What was published. Nothing of it was held against this machine, and no figure below was measured here."
WOULD_RUN = (
    "What a live run executes, in order, as it would be here. `{weights}`, `{draft}`, `{port}` and `{key}` are "
    "known once it runs; `{cache}` is where the kit keeps environments and weights, `{project}` its checkout, "
    "`{venv}` the notebook's own environment."
)
OFTEN = 3  # times that a folder is named before a sign stands for it


def claims(found: Findings) -> Html:
    """Every claim with its metric, what it is the mean of, its own conditions, and where it is stated."""
    several = len(found.recipe.servers) > 1
    folder, where = places([c.locator for c in found.recipe.claims])
    rows = [
        (
            join([claim.title or claim.id, tag("small", terms.METRICS[claim.metric].title)]),
            *((claim.server or "",) if several else ()),
            join(
                [
                    value(published(claim.value, claim.unit), claim.value.published),
                    comparisons.ours(claim),
                    tag("small", f"as printed: {claim.stated}") if claim.stated else None,
                ]
            ),
            _behind(claim, quotations.own_conditions(claim, found.recipe)),
            join([EVIDENCE[claim.evidence], tag("small", place)]),
        )
        for claim, place in zip(found.recipe.claims, where, strict=True)
    ]
    header = ["Claim", *(["Server"] if several else []), "Published", "Samples, conditions", "Stated"]
    shown = table(
        "Claims as published",
        header,
        rows,
        words=range(1, len(header)),
        ids=[f"claim-{c.id}" for c in found.recipe.claims],
    )
    return join([_usual(found.recipe.conditions.deciding), shown, stands_for(folder)])


def _usual(deciding: dict) -> Html | None:
    """The line above the table: the conditions of every claim that states no others."""
    told = ", ".join(_condition(name, at) for name, at in deciding.items() if at is not None)
    return tag("p", f"All in these conditions unless said: {told}.", class_="quiet") if told else None


def _condition(name: str, at: object) -> str:
    """`enforced power limit 180 W`: the unit behind the number."""
    what, _, unit = terms.CONDITIONS[name].removesuffix(")").partition(" (")
    return f"{what} {number(at)} {unit}".rstrip()


def across(found: Findings) -> Html:
    """The claims across two measurements: what was claimed of the one against the other."""
    folder, where = places([c.locator for c in found.recipe.comparisons])
    rows = [
        (
            join([c.title or c.id, tag("small", comparisons.where(c))]),
            join([form(c) + (", in every case" if c.each_case else ""), comparisons.ours(c)]),
            join([EVIDENCE[c.evidence], tag("small", place)]),
        )
        for c, place in zip(found.recipe.comparisons, where, strict=True)
    ]
    shown = table(
        "Claims across two measurements, as published",
        ["Claim", "Claimed of a / b", "Stated"],
        rows,
        words=(1, 2),
        ids=[f"claim-{c.id}" for c in found.recipe.comparisons],
    )
    return join([shown, stands_for(folder)])


def places(locators: list[str]) -> tuple[str, list[str]]:
    """The folder that most locators lie in, "" where none is named often, and each with … in its stead."""
    folders = Counter(one.partition(": ")[0].rpartition("/")[0] for one in locators)
    folder = max((f for f, n in folders.items() if f and n >= OFTEN), key=lambda f: folders[f], default="")
    return folder, [
        f"…{one.removeprefix(folder)}" if folder and one.startswith(f"{folder}/") else one for one in locators
    ]


def stands_for(folder: str) -> Html | None:
    """The sentence below a table whose locators are shortened."""
    return tag("p", "… is ", tag("code", folder), class_="quiet") if folder else None


def _behind(claim: Claim, own: dict) -> Html:
    """How many samples, how far they spread, and in which conditions other than the recipe's."""
    return join(
        [
            f"n = {claim.n:,}" if claim.n else "",
            tag("small", f"{exact(claim.spread[0])} to {exact(claim.spread[1])}") if claim.spread else None,
            *(tag("small", _condition(name, told)) for name, told in own.items()),
        ]
    )
