"""How a measured number agrees with a published one: the interval of their ratio against a tolerance."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from llmrepro import intervals, noise, terms, tolerance
from llmrepro.claim import Between, Claim
from llmrepro.noise import Noise
from llmrepro.notation import measured, number, plural, published, quantity
from llmrepro.tolerance import Tolerance
from llmrepro.workload import Workload


class Agreement(NamedTuple):
    """`line` says what was found beside what was published, `why` what follows from that; `numbers` are fields of
    a verdict.Verdict. `word` is `not_evaluated` where the claim would have to state a tolerance."""

    word: terms.Word
    line: str
    why: list[str]
    numbers: dict


class _Held(NamedTuple):
    """A value against the published one, both in the metric's unit. `accepted` is where the claim holds."""

    here: float
    low: float
    high: float
    accepted: tuple[float, float]
    reference: float  # what ratios are taken of


def of(claim: Claim, row: dict, workload: Workload | None, declared: Sequence[Between] = ()) -> Agreement:
    """How a row (see rows.py) agrees with a claim; `declared` is what its recipe says of the noise between boots.

    Wholly within the tolerance `reproduced`, wholly beyond it `not_reproduced`, else `inconclusive`. A range is
    widened by the tolerance on both sides; a peak is held against the greatest sample.
    """
    allowed = tolerance.of_claim(claim, workload, row["output_tokens"])
    spread = _noise(claim, row, workload, declared)
    held = _held(claim, row, allowed.relative if allowed else 0.0, spread)
    numbers = _numbers(claim, held, allowed, spread)
    line = _line(claim, held, allowed is not None)
    if allowed is None:
        return Agreement("not_evaluated", line, [_stateless(claim)], numbers)
    word = _peak(claim, row, held) if claim.value.form == "peak" else _word(held)
    why = []
    if word == "not_reproduced":
        why.append(_direction(claim, held))
    elif word == "inconclusive" and claim.value.form == "peak":
        why.append(_not_reached(claim, row))
    elif word == "inconclusive" and spread is None:
        why.append("its own spread crosses the border")
    elif word == "inconclusive":
        numbers["more_boots"] = _more_boots(held, spread)
        why.append(_undecided(spread, numbers["more_boots"]))
    told = ", ".join(numbers["notes"])
    return Agreement(word, line, [*why, *([spread.told()] if spread else []), *([told] if told else [])], numbers)


def _noise(claim: Claim, row: dict, workload: Workload | None, declared: Sequence[Between]) -> Noise | None:
    """The noise of a speed or a time; a fact (GiB, tokens, a share) and a peak have none but their own spread."""
    metric = terms.METRICS[claim.metric]
    if metric.better is None or metric.unit not in ("tok/s", "s") or claim.value.form == "peak":
        return None
    return noise.of_row(claim, row, workload, declared)


def _held(claim: Claim, row: dict, share: float, spread: Noise | None) -> _Held:
    value, (low, high) = row["value"], ends(claim)
    here = row["greatest"] if claim.value.form == "peak" and row["greatest"] is not None else value
    if claim.value.form == "peak":
        interval = (here, here)
    elif spread is None:
        interval = (value, value) if row["low"] is None else (row["low"], row["high"])
    else:
        half = spread.half_width()
        interval = (-inf, inf) if half is None else (value * (1 - half), value * (1 + half))
    accepted = (-inf if low is None else low * (1 - share), inf if high is None else high * (1 + share))
    given = [end for end in (low, high) if end is not None]
    return _Held(here, *interval, accepted, sum(given) / len(given))


def ends(claim: Claim) -> tuple[float | None, float | None]:
    """Between which values the published one lies, as published; None for an open end, or no number."""
    value, form = claim.value.published, claim.value.form
    if form == "range":
        return value
    if form not in ("point", "about", "peak", "at_least", "at_most"):
        return None, None
    return None if form == "at_most" else value, None if form in ("at_least", "peak") else value


def _numbers(claim: Claim, held: _Held, allowed: Tolerance | None, spread: Noise | None) -> dict:
    """The numbers of a verdict. There is no ratio to a published nought."""

    def ratio(value: float) -> float | None:
        return value / held.reference if held.reference and abs(value) < inf else None

    exact = held.low == held.high
    return {
        "here": held.here,
        "here_low": None if exact or abs(held.low) == inf else held.low,
        "here_high": None if exact or abs(held.high) == inf else held.high,
        "ratio": ratio(held.here),
        "low": None if exact else ratio(held.low),
        "high": None if exact else ratio(held.high),
        "tolerance": (ratio(held.accepted[0]), ratio(held.accepted[1])) if allowed else None,
        "tolerance_reason": allowed.reason if allowed else "",
        "noise": spread._asdict() if spread else None,
        "notes": notes(claim, held.here),
    }


def _line(claim: Claim, held: _Held, limited: bool) -> str:
    """What was found beside what was published, and where that would hold."""
    here = quantity(held.here, claim.unit)
    if claim.value.form == "peak":
        return f"the highest here is {here}, published {published(claim.value, claim.unit)}"
    if not held.reference:
        return f"{here} here, published {published(claim.value, claim.unit)}"
    exact = held.low == held.high or abs(held.low) == inf
    factor, interval = measured(
        held.here / held.reference,
        None if exact else held.low / held.reference,
        None if exact else held.high / held.reference,
    )
    of = "the middle of the published range" if claim.value.form == "range" else "the published"
    told = f"{here} here, {factor} times {of}" + (f" ({interval})" if interval else "")
    low, high = (number(round(end / held.reference, 4)) if abs(end) < inf else None for end in held.accepted)
    if not limited or low == high:
        return told
    place = f"up to {high}" if low is None else f"from {low} on" if high is None else f"from {low} to {high}"
    return f"{told}, which holds {place}"


def _word(held: _Held) -> terms.Word:
    low, high = held.accepted
    if held.low == -inf:
        return "inconclusive"
    if low <= held.low and held.high <= high:
        return "reproduced"
    return "not_reproduced" if held.high < low or held.low > high else "inconclusive"


def _peak(claim: Claim, row: dict, held: _Held) -> terms.Word:
    """A peak is reached or not; that it was not says something once as much was watched as by the publication."""
    if held.here >= held.accepted[0]:
        return "reproduced"
    return "not_reproduced" if claim.n is not None and row["rounds"] >= claim.n else "inconclusive"


def _not_reached(claim: Claim, row: dict) -> str:
    there = "does not say how many it watched" if claim.n is None else f"watched {claim.n:,}"
    return f"not reached in {plural(row['rounds'], 'sample')}; the publication {there}"


def _direction(claim: Claim, held: _Held) -> str:
    lower = held.high < held.accepted[0]
    better = terms.METRICS[claim.metric].better
    judged = {None: "", "higher" if lower else "lower": ": worse"}.get(better, ": better")
    return f"{'lower' if lower else 'higher'} than published{judged}"


def _more_boots(held: _Held, spread: Noise) -> int | None:
    """How many more boots would bring the interval wholly to one side of the border, if value and noise stay."""
    low, high = held.accepted
    for boots in range(spread.boots + 1, noise.MOST_BOOTS + 1):
        half = spread.half_width(boots)
        if half is None:
            return None
        ends = held.here * (1 - half), held.here * (1 + half)
        if (low <= ends[0] and ends[1] <= high) or ends[1] < low or ends[0] > high:
            return boots - spread.boots
    return None


def _undecided(spread: Noise, more: int | None) -> str:
    if spread.within is None:
        return "one round in a boot does not tell its noise; ask at least two (repeats)"
    if more is not None:
        return f"about {plural(more, 'more boot')} would decide"
    where = "of this card " if spread.of == "card" else ""
    return f"too near the tolerance for the noise between {spread.of}s: no number of boots {where}will decide"


def notes(claim: Claim, here: float) -> list[str]:
    """How a value lies among the published samples, where they were published.

    A further sample of n falls below all of them, or above, in 1 / (n + 1) of repeats each. The prediction
    interval is told from three samples on (Hahn & Meeker 1991, Statistical Intervals, section 4.7).
    """
    found, samples = [], claim.samples
    if len(samples) > 1 and not min(samples) <= here <= max(samples):
        side = "below" if here < min(samples) else "above"
        found.append(f"{side} every published sample (expected of 2/{len(samples) + 1} of repeats)")
    if len(samples) >= intervals.FEWEST:
        low, high = intervals.prediction(samples)
        found.append(f"{'inside' if low <= here <= high else 'outside'} the 95 % prediction interval")
    if not samples and claim.spread and not claim.spread[0] <= here <= claim.spread[1]:
        ends = " to ".join(number(float(end)) for end in claim.spread)
        found.append(f"outside the published min–max ({ends})")
    return found


def _stateless(claim: Claim) -> str:
    if claim.metric.startswith("startup."):
        return "a start-up time hangs on disks and caches, and the claim must state a tolerance"
    return "this metric has no tolerance of its own, and the claim must state one"
