"""Two measurements held against each other: the ratio of their pairs, its interval, how many more would decide.

A pair is two values that shared what a run cannot hold still: a boot's turn, or a round of one boot. Ratios are
averaged as logarithms, so that a/b and b/a say the same thing.
"""

from collections.abc import Sequence
from math import exp, inf, log, sqrt
from statistics import fmean, stdev
from typing import Literal

from llmrepro import intervals
from llmrepro.intervals import FEWEST, Interval

MOST = 100  # pairs beyond which no one waits for a decision
Side = Literal["inside", "outside", "across"]


def of(pairs: Sequence[tuple[float, float]]) -> Interval:
    """The geometric mean of a / b with the 95 % interval of its logarithm, Student's t over the pairs.

    exp of mean ± t(0.975, n - 1) · s / √n of the ln(a/b). Why ratios are averaged geometrically: Fleming & Wallace
    1986, CACM 29(3); the interval of a difference of logarithms, turned back, is one of the ratio: Bland & Altman
    1996, BMJ 312:1153. No interval below three pairs. Where an `a` is nought, which has no logarithm, the plain
    ratios are averaged. Raises ValueError for no pairs, or where a `b` is nought or a value below it.
    """
    if any(b <= 0 or a < 0 for a, b in pairs):
        raise ValueError("a value of nought or below has no ratio")
    if any(a == 0 for a, _ in pairs):
        return intervals.of([a / b for a, b in pairs])
    found = intervals.of([log(a / b) for a, b in pairs])
    low, high = (None, None) if found.low is None else (exp(found.low), exp(found.high))
    return Interval(exp(found.mean), low, high, found.n)


def place(found: Interval, low: float, high: float) -> Side | None:
    """Where an interval lies: wholly within [low, high], wholly outside, or across a border; None without one."""
    if found.low is None:
        return None
    if low <= found.low and found.high <= high:
        return "inside"
    return "outside" if found.high < low or found.low > high else "across"


def more_pairs(pairs: Sequence[tuple[float, float]], low: float, high: float) -> int | None:
    """How many more pairs would bring the interval wholly to one side of [low, high], if mean and spread stay.

    None when a hundred pairs in all would not: the ratio is too near the border. At least three pairs.
    """
    logs = [log(a / b) for a, b in pairs if a > 0 and b > 0]
    if len(logs) < FEWEST:
        return None
    mean, spread = fmean(logs), stdev(logs)
    borders = [log(x) for x in (low, high) if 0 < x < inf]
    room = min((abs(mean - border) for border in borders), default=inf)
    for n in range(len(logs) + 1, MOST + 1):
        if intervals.quantile(n - 1) * spread / sqrt(n) < room:
            return n - len(logs)
    return None
