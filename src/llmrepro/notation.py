"""Numbers as people read them: as many digits as the measurement carries, thousands apart, units beside."""

from math import floor, log10

from llmrepro.recipe import Value

NOTHING = "–"
DIGITS = 4                                           # significant ones, where no interval says how many are known


def number(value: object) -> str:
    """A value as text: whole numbers in full, others to four significant digits, None as a dash."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return _rounded(value, DIGITS - 1 - _magnitude(value)) if abs(value) >= 1000 else f"{value:.{DIGITS}g}"
    return str(value)


def quantity(value: object, unit: str = "") -> str:
    """`number` with its unit."""
    return f"{number(value)} {unit}".rstrip() if value is not None else NOTHING


def measured(value: float, low: float | None, high: float | None) -> tuple[str, str]:
    """(mean, "low to high"), all to the decimals that two digits of the interval's half-width need.

    Without an interval the second is empty. Digits beyond the interval would be noise shown as knowledge.
    """
    if low is None or high is None:
        return number(value), ""
    half = (high - low) / 2
    decimals = DIGITS - _magnitude(value)            # one digit more than without an interval, never more
    if half > 0:
        decimals = min(decimals, 1 - _magnitude(half))
    return _rounded(value, decimals), f"{_rounded(low, decimals)} to {_rounded(high, decimals)}"


def with_interval(row: dict) -> str:
    """A row of result.json in a sentence: `125.2 tok/s (95 % interval 117.1 to 133.3)`."""
    mean, interval = measured(row["value"], row["low"], row["high"])
    return f"{mean} {row['unit']}" + (f" (95 % interval {interval})" if interval else "")


def published(value: Value, unit: str = "") -> str:
    """A published value in the words of its form: about, up to, at least, a range."""
    found, form = value.published, value.form
    if form == "range":
        text = f"{number(found[0])} to {number(found[1])}"
    else:
        word = {"about": "about ", "peak": "peak of ", "at_least": "at least ", "completed_to": "completes to ",
                "failed_at": "fails at "}.get(form, "")
        text = word + number(found)
    return f"{text} {unit}".rstrip()


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _magnitude(value: float) -> int:
    """The power of ten of the first digit: 2 for 125, -1 for 0.27."""
    return floor(log10(abs(value))) if value else 0


def _rounded(value: float, decimals: int) -> str:
    """Rounded to that many decimals; fewer than none round to tens and hundreds."""
    return f"{round(value, decimals):,.{max(0, decimals)}f}"
