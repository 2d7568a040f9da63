"""Numbers as people read them: as many digits as the measurement carries, thousands apart, units beside."""

import re
from math import floor, isfinite, log10

from llmrepro.claim import Value

NOTHING = "–"
DIGITS = 4  # significant ones, where no interval says how many are known


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
    """(mean, "low to high"), to the decimals that two digits of the interval's half-width need: more would
    show noise as knowledge. Three to five digits of the mean are kept. Without an interval the second is "".
    """
    if low is None or high is None:
        return number(value), ""
    half = (high - low) / 2
    fewest, most = DIGITS - 2 - _magnitude(value), DIGITS - _magnitude(value)
    decimals = min(most, max(fewest, 1 - _magnitude(half))) if half > 0 else most
    return _rounded(value, decimals), f"{_rounded(low, decimals)} to {_rounded(high, decimals)}"


def seconds(value: float | None) -> str:
    """A time to the millisecond, from ten seconds on to four digits: start-up is not known more finely."""
    return NOTHING if value is None else f"{value:.3f}" if abs(value) < 10 else number(float(value))


def exact(value: object) -> str:
    """A published figure as it was published: no digit is rounded away."""
    return f"{value:,.12g}" if isinstance(value, float) else number(value)


def published(value: Value, unit: str = "") -> str:
    """A published value in the words of its form: about, up to, at least, a range."""
    found, form = value.published, value.form
    if form == "words":
        return str(found)
    if form == "range":
        text = f"{exact(found[0])} to {exact(found[1])}"
    else:
        word = {
            "about": "about ",
            "peak": "peak of ",
            "at_least": "at least ",
            "completed_to": "completes to ",
            "failed_at": "fails at ",
        }.get(form, "")
        text = word + exact(found)
    return f"{text} {unit}".rstrip()


def beside(values: list[float]) -> list[str]:
    """Values that stand beside each other, with the decimals that the smallest needs for five digits: what is held
    apart should not be rounded together."""
    decimals = max(0, DIGITS - _magnitude(min(values, key=abs, default=0)))
    return [_rounded(value, decimals) for value in values]


def cell(value: object) -> object:
    """A value for a CSV file that a spreadsheet may open: what it would take for a formula begins with a '."""
    return f"'{value}" if isinstance(value, str) and re.match(r"[=+\-@\t\r＝＋－＠]", value) else value


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _magnitude(value: float) -> int:
    """The power of ten of the first digit: 2 for 125, -1 for 0.27; of nought and what is no number 0."""
    return floor(log10(abs(value))) if value and isfinite(value) else 0


def _rounded(value: float, decimals: int) -> str:
    """Rounded to that many decimals; fewer than none round to tens and hundreds."""
    return f"{round(value, decimals):,.{max(0, decimals)}f}"
