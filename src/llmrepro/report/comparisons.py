"""Claims across two measurements, as a table: in a recipe's page below its own claims, in a study's alone."""

from collections.abc import Iterable

from llmrepro import terms
from llmrepro.claim import Claim, Comparison, Side
from llmrepro.contrast import side_names
from llmrepro.markup import Html, folded, join, table, tag
from llmrepro.notation import NOTHING, measured, plural, quantity
from llmrepro.report.words import word

EVIDENCE = {
    "measured": "measured by its authors",
    "community": "reported by the community",
    "stated": "stated",
    "computed": "computed from what is published",
}

OUR_READING = "this kit's reading"  # what such a claim's locator says


def claims(caption: str, comparisons: Iterable[Comparison], judged: Iterable[dict]) -> Html:
    """A row per comparison, and below the table, folded, each case of those that speak of every case."""
    verdicts = {v["claim"]: v for v in judged}
    comparisons = list(comparisons)
    rows = [
        (
            join([c.title or c.id, tag("small", where(c))]),
            word(verdicts[c.id]["word"]),
            join([verdicts[c.id]["published"], ours(c), tag("small", f"{EVIDENCE[c.evidence]}: {c.locator}")]),
            _ratio(verdicts[c.id]["here"], verdicts[c.id]["low"], verdicts[c.id]["high"]),
            verdicts[c.id]["reason"],
        )
        for c in comparisons
    ]
    shown = table(
        caption,
        ["Claim", "Verdict", "Claimed of a / b", "a / b here", "Why"],
        rows,
        words=(1, 2, 4),
        ids=[f"claim-{c.id}" for c in comparisons],
    )
    return join([shown, *(_cases(c, verdicts[c.id]) for c in comparisons if c.each_case)])


def ours(claim: Claim | Comparison) -> Html | None:
    """Beside a number that the publication did not print: this kit reads it from its words."""
    return tag("small", "(threshold ours)") if OUR_READING in claim.locator else None


def where(comparison: Comparison) -> str:
    """The metric and what its two sides are."""
    a, b = (_side(side) for side in (comparison.a, comparison.b))
    return f"{terms.METRICS[comparison.metric].title} · a: {a} · b: {b}"


def _side(side: Side) -> str:
    return ", ".join(str(x) for x in (side.arm, side.server, side.workload, side.case) if x) or "the run"


def _ratio(value: float | None, low: float | None, high: float | None) -> Html:
    if value is None:
        return tag("span", NOTHING)
    shown, interval = measured(value, low, high)
    return join([tag("span", shown, class_="whole"), tag("small", interval) if interval else None])


def _cases(comparison: Comparison, judged: dict) -> Html | None:
    """Every case of one comparison, with both sides' means."""
    if not judged["ratios"]:
        return None
    names = side_names(comparison.a, comparison.b)
    rows = [
        (
            r["case"],
            quantity(r["a"], judged["unit"]),
            quantity(r["b"], judged["unit"]),
            _ratio(r["ratio"], r["low"], r["high"]),
            plural(r["n"], r["of"]) if r["n"] else NOTHING,
            word(r["word"]),
        )
        for r in judged["ratios"]
    ]
    return folded(
        f"{comparison.title or comparison.id}: every case",
        table(
            f"{comparison.title or comparison.id}: {terms.METRICS[comparison.metric].title} of each case",
            ["Case", f"a: {names[0]}", f"b: {names[1]}", "a / b", "Pairs", "Verdict"],
            rows,
            words=(5,),
        ),
    )
