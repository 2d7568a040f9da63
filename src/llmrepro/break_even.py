"""When does the slower start pay: what a restart costs against what every request saves."""

from collections.abc import Sequence
from math import sqrt
from statistics import covariance, fmean
from typing import Literal, NamedTuple

from llmrepro import intervals, ratios
from llmrepro.intervals import Interval

DAY_S = 86_400.0


class BreakEven(NamedTuple):
    """Which of two starts costs less of a day. Seconds, but for `requests`, a number of requests per restart.

    `slow` is the one whose start takes longer: `start_s` by how much, `saved_s` how much shorter its request is
    (below nought: longer); `start_times` and `request_times` are its start and its request as multiples of the
    other's. `found` is `pays` when it makes up for its start after `requests` of them, `never` when its request is
    no shorter either, `open` when the interval of one of the multiples holds 1, or
    there are too few boots for one.
    """

    found: Literal["pays", "never", "open"]
    slow: Literal["a", "b"]
    start_s: Interval
    saved_s: Interval
    start_times: Interval
    request_times: Interval
    requests: Interval | None


def break_even(
    start_a_s: Sequence[float],
    start_b_s: Sequence[float],
    request_a_s: Sequence[float],
    request_b_s: Sequence[float],
) -> BreakEven:
    """When the slower start pays, from seconds to the first token and seconds per request, an entry per boot.

    The i-th boots of a and b are one pair. With S_a > S_b and R_a < R_b, a day of Q requests and K restarts costs
    a less of its time when Q · (R_b − R_a) > K · (S_a − S_b): from (S_a − S_b) / (R_b − R_a) requests per restart
    on. Requests are counted one at a time. The interval is Fieller's for a ratio of two means, paired (Fieller
    1954, JRSS B 16(2):175); none below three pairs, nor where the seconds saved vary so much that it has no end.
    Raises ValueError for no boots or for lists of unequal length.
    """
    if len({len(x) for x in (start_a_s, start_b_s, request_a_s, request_b_s)}) != 1:
        raise ValueError("every boot needs its start and its request on both sides")
    slow: Literal["a", "b"] = "a" if fmean(start_a_s) >= fmean(start_b_s) else "b"
    starts = list(zip(start_a_s, start_b_s, strict=True))
    requests = list(zip(request_a_s, request_b_s, strict=True))
    if slow == "b":
        starts, requests = [(b, a) for a, b in starts], [(b, a) for a, b in requests]
    later, saved = [s - f for s, f in starts], [f - s for s, f in requests]
    start_s, saved_s = intervals.of(later), intervals.of(saved)
    times = ratios.of(starts), ratios.of(requests)
    told = (slow, start_s, saved_s, *times)
    if any(t.low is None or t.low <= 1 <= t.high for t in times):
        return BreakEven("open", *told, None)
    if saved_s.mean <= 0:
        return BreakEven("never", *told, None)
    return BreakEven("pays", *told, _fieller(later, saved))


def _fieller(x: Sequence[float], y: Sequence[float]) -> Interval:
    """mean(x) / mean(y) of pairs: the roots of (ȳ² − g·s_yy)θ² − 2(x̄ȳ − g·s_xy)θ + (x̄² − g·s_xx), g = t²/n.

    They are finite and enclose the ratio where y's own interval does not hold nought.
    """
    n, ratio = len(x), fmean(x) / fmean(y)
    g = intervals.quantile(n - 1) ** 2 / n
    square = fmean(y) ** 2 - g * covariance(y, y)
    linear = fmean(x) * fmean(y) - g * covariance(x, y)
    free = fmean(x) ** 2 - g * covariance(x, x)
    if square <= 0:
        return Interval(ratio, None, None, n)
    root = sqrt(max(0.0, linear**2 - square * free))
    return Interval(ratio, max(0.0, (linear - root) / square), (linear + root) / square, n)
