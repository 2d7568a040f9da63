"""Where two files that should be equal are not, in words: results, tables of charts, pages."""

import csv
import io
import re
from collections.abc import Iterator
from itertools import islice, zip_longest
from math import isclose
from typing import Any

# The same records give numbers that are equal to the last digits but one on another processor or another build of
# the libraries.
RELATIVE = 1e-9
MOST, SHOWN, WORDS = 10_000, 3, 8  # deviations that are looked for and told, words of a page
IDENTIFYING = (*("arm", "name", "metric", "server", "workload", "case", "statistic"), *("condition", "a", "b"))
PICTURE = re.compile(r"data:image/[a-z+]+;base64,[A-Za-z0-9+/=]*")
NO_WORDS = re.compile(r"<style[^<>]*>[^<]*</style>|<[^<>]*>")


def of_results(there: Any, made: Any) -> str:
    """What of a result.json differs from the one that was made of the same records; "" where nothing does.

    What is said otherwise comes before what is not said, which may only be of another version.
    """
    found = list(islice(_between(there, made, ()), MOST))
    told = [
        *(said for otherwise, said in found if otherwise),
        *(said for otherwise, said in found if not otherwise),
    ]
    more = f", and {len(told) - SHOWN:,} more" if len(told) > SHOWN else ""
    return "; ".join(told[:SHOWN]) + more


def _between(there: Any, made: Any, where: tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    """(whether something is said otherwise, rather than not said, and what) of each difference."""
    if isinstance(there, dict) and isinstance(made, dict):
        for key in dict.fromkeys([*made, *there]):
            yield from _one_of(there, made, key, (*where, str(key)))
    elif isinstance(there, list) and isinstance(made, list):
        rows, others = _by_identity(there), _by_identity(made)
        if rows is not None and others is not None:
            for key in dict.fromkeys([*others, *rows]):
                yield from _one_of(rows, others, key, (*where, key))
        else:
            for place, (one, other) in enumerate(zip_longest(there, made, fillvalue=_ABSENT), 1):
                yield from _compared(one, other, (*where, f"{place}"))
    elif not _equal(there, made):
        yield True, f"{_path(where)} is {_shown(there)} there and {_shown(made)} by the records"


_ABSENT = object()


def _one_of(there: dict, made: dict, key: Any, where: tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    yield from _compared(there.get(key, _ABSENT), made.get(key, _ABSENT), where)


def _compared(there: Any, made: Any, where: tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    if there is _ABSENT:
        yield False, f"{_path(where)} is missing there"
    elif made is _ABSENT:
        yield False, f"{_path(where)} is there and not by the records"
    else:
        yield from _between(there, made, where)


def _by_identity(rows: list) -> dict[str, Any] | None:
    """Rows by what they are about, where each is about something of its own."""
    if not all(isinstance(row, dict) for row in rows):
        return None
    named = {_about(row): row for row in rows}
    return named if len(named) == len(rows) and "" not in named else None


def _about(row: dict) -> str:
    """What a row is about: a verdict its claim, a value its metric and where it was measured."""
    keys = ("claim",) if isinstance(row.get("claim"), str) else IDENTIFYING
    return " ".join(row[k][:80] for k in keys if isinstance(row.get(k), str))


def _equal(there: Any, made: Any) -> bool:
    numbers = [isinstance(v, (int, float)) and not isinstance(v, bool) for v in (there, made)]
    if all(numbers):
        return there == made or isclose(there, made, rel_tol=RELATIVE)
    return type(there) is type(made) and there == made


def _path(where: tuple[str, ...]) -> str:
    return " › ".join(part[:120] for part in where) or "it"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def of_tables(there: str, made: str) -> str:
    """Where a CSV file differs from the one that the records give; "" where it does not."""
    rows, others = (csv.reader(io.StringIO(text, newline="")) for text in (there, made))
    for line, (cells, wanted) in enumerate(zip_longest(rows, others), 1):
        if cells is None or wanted is None:
            return f"line {line} is {'missing' if cells is None else 'one too many'}"
        if len(cells) != len(wanted):
            return f"line {line} has {len(cells)} cells, and the records give {len(wanted)}"
        for cell, other in zip(cells, wanted, strict=True):
            if cell != other and not _equal(_number(cell), _number(other)):
                return f"line {line} says {_shown(cell)}, and the records {_shown(other)}"
    return ""


def _number(cell: str) -> float | str:
    try:
        return float(cell)
    except ValueError:
        return cell


def of_pages(there: str, made: str) -> str:
    """Where a page differs from the one that the records give: its words, else its pictures, else its HTML; ""
    where it does not."""
    if there == made:
        return ""
    words, others = (NO_WORDS.sub(" ", text).split() for text in (there, made))
    for place, (word, other) in enumerate(zip_longest(words, others)):
        if word != other:
            said, wanted = (" ".join(w[max(0, place - 2) : place + WORDS - 2])[:120] for w in (words, others))
            return f"it says {said!r} where the records give {wanted!r}"
    if PICTURE.sub("", there) == PICTURE.sub("", made):
        return "its words are those of the records, and its pictures are not"
    return "its words are those of the records, and its HTML is not"
