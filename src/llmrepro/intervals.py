"""Samples → a mean with its interval: over rounds, then over boots, which are the unit of replication."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

LEVEL = 0.95
FEWEST = 3  # with two samples t is 12.7: the interval of a speed reaches below nought


class Interval(NamedTuple):
    """A mean and its two-sided 95 % Student t interval; low and high are None below three samples, where it
    would be wider than anything worth saying."""

    mean: float
    low: float | None
    high: float | None
    n: int


def of(samples: Sequence[float]) -> Interval:
    """mean ± t(0.975, n - 1) · s / √n. Raises ValueError for no samples."""
    if not samples:
        raise ValueError("no samples: nothing can be said of a mean")
    mean = fmean(samples)
    if len(samples) < FEWEST:
        return Interval(mean, None, None, len(samples))
    half = quantile(len(samples) - 1) * stdev(samples) / sqrt(len(samples))
    return Interval(mean, mean - half, mean + half, len(samples))


def positive(samples: Sequence[float]) -> Interval:
    """`of` for a quantity that is never below nought, a time or a speed: no interval where it would reach nought,
    since that says only that the samples are too scattered for one."""
    found = of(samples)
    return found if found.low is None or found.low > 0 else found._replace(low=None, high=None)


def over_boots(by_boot: dict[int, Sequence[float]]) -> Interval:
    """One boot: the interval over its rounds. Several: over the boots' means, since what a start decides
    (memory layout, clocks, neighbours) is drawn once per boot."""
    groups = [list(v) for v in by_boot.values() if v]
    return positive(groups[0]) if len(groups) == 1 else positive([fmean(g) for g in groups])


def within(by_boot: Iterable[Sequence[float]]) -> float | None:
    """The pooled relative standard deviation of rounds within their boots, a share of each boot's mean.

    √(Σ (x / mean of its boot - 1)² / (n - boots)); None where no boot has two rounds, or a mean is nought.
    """
    groups = [list(group) for group in by_boot if group]
    free = sum(len(group) - 1 for group in groups)
    if free < 1 or any(fmean(group) == 0 for group in groups):
        return None
    return sqrt(sum((x / fmean(group) - 1) ** 2 for group in groups for x in group) / free)


def prediction(samples: Sequence[float]) -> tuple[float, float]:
    """Where one more sample falls with 95 %: mean ± t(n - 1) · s · √(1 + 1 / n). Raises ValueError below two."""
    n = len(samples)
    if n < 2:
        raise ValueError("one sample says nothing of the next")
    half = quantile(n - 1) * stdev(samples) * sqrt(1 + 1 / n)
    return fmean(samples) - half, fmean(samples) + half


@lru_cache(maxsize=4096)
def quantile(free: int) -> float:
    """Student's t at 95 %, two-sided, for that many degrees of freedom; of nought of them the normal's 1.96."""
    from scipy import special  # half a second to import, which a page without measurements does not wait for

    return float(special.stdtrit(free, (1 + LEVEL) / 2) if free else special.ndtri((1 + LEVEL) / 2))


def slope(x: Sequence[float], y: Sequence[float]) -> Interval | None:
    """Least-squares slope of y over x with its 95 % interval; None below three points or two different x."""
    if len(x) < 3 or len(set(x)) < 2:
        return None
    from scipy import stats  # a second and more to import

    fit = stats.linregress(x, y)
    half = quantile(len(x) - 2) * fit.stderr
    return Interval(float(fit.slope), float(fit.slope - half), float(fit.slope + half), len(x))


def rising(x: Sequence[float], y: Sequence[float]) -> Interval | None:
    """`slope` where its whole interval lies above nought, else None: one that may be nought says nothing of a
    speed, which is 1 / slope."""
    found = slope(x, y)
    return found if found is not None and found.low > 0 else None
