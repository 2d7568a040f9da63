"""A comparison held against what its two sides measured: one word and its reason."""

from math import inf, nextafter

from pydantic import BaseModel

from llmrepro import intervals, pairing, ratios, terms, tolerance
from llmrepro.claim import Comparison, Side
from llmrepro.conditions import Condition, counted, differing, named
from llmrepro.notation import measured, number, plural, quantity
from llmrepro.pairing import Measured, NoPairs
from llmrepro.recipe import Recipe


class Ratio(BaseModel):
    """a / b of one case, or of the sides as they are (`case` None): the geometric mean over pairs.

    `low` and `high` are None below three pairs; `a` and `b` are plain means over the same pairs. `of` is what a
    pair is: a boot's turn, or a round of one boot; `more` how many more would decide, where some would.
    """

    case: str | None
    word: terms.Word
    reason: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    of: str | None = None
    more: int | None = None
    a: float | None = None
    b: float | None = None


class Compared(BaseModel):
    """What is said of one comparison. `here` is a / b as found where it speaks of one case or one mean."""

    claim: str
    word: terms.Word
    reason: str
    metric: str
    unit: str
    published: str
    here: float | None = None
    low: float | None = None
    high: float | None = None
    ratios: list[Ratio] = []
    conditions: list[dict] = []


def compare(comparison: Comparison, a: Measured, b: Measured, conditions: list[Condition]) -> Compared:
    """The verdict of a comparison from what both its sides measured, and the conditions that it is bound to.

    `reproduced` when the interval of a / b lies wholly where the claim says, `not_reproduced` wholly elsewhere,
    `inconclusive` across a border or without an interval. Of each case: all must hold, one that fails fails it.
    """
    claimed = bounds(comparison, a.recipe)
    said = {
        "claim": comparison.id,
        "metric": comparison.metric,
        "unit": terms.METRICS[comparison.metric].unit,
        "published": form(comparison),
        "conditions": [c._asdict() for c in conditions],
    }
    absent = [f"{run.name}: {run.absent}" if run.name else run.absent for run in (a, b) if run.absent]
    if absent:
        return Compared(word="not_evaluated", reason="; ".join(dict.fromkeys(absent)), **said)
    try:
        found = [_ratio(comparison, a, b, case, claimed) for case in pairing.cases(comparison, a, b)]
    except NoPairs as why:
        return Compared(word="not_evaluated", reason=str(why), **said)
    one = found[0] if not comparison.each_case else None
    said |= {"ratios": found, **({"here": one.ratio, "low": one.low, "high": one.high} if one else {})}
    word, reason = (one.word, one.reason) if one else _of_all(found)
    barred = differing(conditions)
    if barred and word != "not_evaluated":
        shown = one.reason.partition(";")[0] if one else ", ".join(f"{r.case} {_times(r)}" for r in found if r.n)
        return Compared(word="not_comparable", reason=f"{named(barred)}; {shown}", **said)
    if word in ("reproduced", "not_reproduced"):
        reason += counted(conditions)
    return Compared(word=word, reason=reason, **said)


def form(comparison: Comparison) -> str:
    """What is claimed of a / b, in words."""
    if comparison.order is not None:
        return f"a {comparison.order} b"
    if comparison.ratio is not None:
        found = comparison.ratio.published
        if comparison.ratio.form == "range":
            return f"{number(found[0])} to {number(found[1])} times"
        return f"{'about ' if comparison.ratio.form == 'about' else ''}{number(found)} times"
    return (
        f"at least {number(comparison.at_least)} times"
        if comparison.at_least is not None
        else f"at most {number(comparison.at_most)} times"
    )


def bounds(comparison: Comparison, recipe: Recipe) -> tuple[float, float] | None:
    """Between which ratios a claim holds, ends included; None for a ratio that has no tolerance to be held to."""
    if comparison.order is not None:
        return (nextafter(1, inf), inf) if comparison.order == "above" else (-inf, nextafter(1, 0))
    if comparison.at_least is not None:
        return comparison.at_least, inf
    if comparison.at_most is not None:
        return -inf, comparison.at_most
    published = comparison.ratio.published
    low, high = published if comparison.ratio.form == "range" else (published, published)
    workload = next((w for w in recipe.workloads if w.id == comparison.a.workload), None)
    usual = tolerance.default(comparison.metric, workload)
    share = tolerance.ABOUT if comparison.ratio.form == "about" else usual and usual.relative
    share = comparison.tolerance.relative if comparison.tolerance else share
    return None if share is None else (low * (1 - share), high * (1 + share))


def _ratio(
    comparison: Comparison, a: Measured, b: Measured, case: str | None, claimed: tuple[float, float] | None
) -> Ratio:
    try:
        paired = pairing.paired(comparison, a, b, case)
        found = ratios.of(paired.pairs)
    except ValueError as why:  # NoPairs among them
        return Ratio(case=case, word="not_evaluated", reason=str(why))
    means = [intervals.of([pair[i] for pair in paired.pairs]).mean for i in (0, 1)]
    unit = terms.METRICS[comparison.metric].unit
    names = side_names(comparison.a, comparison.b)
    here = Ratio(
        case=case,
        word="inconclusive",
        reason="",
        ratio=found.mean,
        low=found.low,
        high=found.high,
        n=found.n,
        of=paired.of,
        a=means[0],
        b=means[1],
    )
    told = (
        f"{names[0]} {quantity(means[0], unit)}, {names[1]} {quantity(means[1], unit)}: "
        f"{_times(here)}, {paired.counted()}"
    )
    word, why = _word(found, claimed)
    more = ratios.more_pairs(paired.pairs, *claimed) if word == "inconclusive" else None
    if word == "inconclusive" and found.n >= intervals.FEWEST:
        why = _more(more, paired.of)
    return here.model_copy(update={"word": word, "reason": f"{told}{why}", "more": more})


def _word(found: intervals.Interval, claimed: tuple[float, float] | None) -> tuple[terms.Word, str]:
    if claimed is None:
        return "not_evaluated", "; this metric has no tolerance of its own, and the claim must state one"
    place = ratios.place(found, *claimed)
    if place is None:
        return "inconclusive", f"; {intervals.FEWEST} are needed"
    if place == "inside":
        return "reproduced", ""
    if place == "outside":
        return "not_reproduced", f"; that is {'lower' if found.high < claimed[0] else 'higher'} than claimed"
    return "inconclusive", ""


def _more(more: int | None, of: str) -> str:
    if more is None:
        return f"; too near the border for more {of}s to decide"
    return f"; about {plural(more, f'more {of}')} would decide"


def _of_all(found: list[Ratio]) -> tuple[terms.Word, str]:
    """One word for all cases, and which of them are how."""
    said = [
        f"{what} {', '.join(f'{r.case} ({_times(r) if r.n else r.reason})' for r in found if r.word == word)}"
        for word, what in (
            ("reproduced", "holds for"),
            ("not_reproduced", "fails for"),
            ("inconclusive", "open for"),
            ("not_evaluated", "not judged for"),
        )
        if any(r.word == word for r in found)
    ]
    words = {r.word for r in found}
    word = next(w for w in ("not_reproduced", "not_evaluated", "inconclusive", "reproduced") if w in words)
    fewest = min((r for r in found if r.n), key=lambda r: r.n, default=None)
    if fewest is None:
        return word, "; ".join(said)
    counted = f"{plural(fewest.n, fewest.of)}{' each' if fewest.of == 'boot' else ''}"
    needed = f"; {intervals.FEWEST} are needed" if fewest.n < intervals.FEWEST else ""
    if word == "inconclusive" and not needed:
        wanted = [r.more for r in found if r.word == word]
        needed = _more(None if None in wanted else max(wanted), fewest.of)
    return word, f"{'; '.join(said)}; {counted}{needed}"


def _times(found: Ratio) -> str:
    value, interval = measured(found.ratio, found.low, found.high)
    return f"{value} times" + (f" ({interval})" if interval else "")


def side_names(a: Side, b: Side) -> tuple[str, str]:
    """What tells two sides apart: arm, server, workload or case, those of them that differ."""
    pairs = [(x, y) for x, y in zip(a.model_dump().values(), b.model_dump().values(), strict=True) if x != y]
    return (
        " · ".join(x for x, _ in pairs if x is not None) or "a",
        " · ".join(y for _, y in pairs if y is not None) or "b",
    )
