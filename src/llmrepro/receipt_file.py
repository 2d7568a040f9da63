"""A file of receipts as it lies there: read safely, CSV or JSON lines, cut into the cells of each request.

What its columns mean is for `receipts`. A fault of a line is told with the line, so that all of them can be.
"""

import csv
import io
import json
import math
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmrepro.run_folder import RunError

MOST_BYTES, LONGEST_LINE, MOST_COLUMNS, MOST_DEPTH, MOST_DIGITS = 256 << 20, 1 << 20, 200, 20, 300
UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")

# Of a line: its cells by column, the names of a CSV file's columns, or what is wrong with it.
Line = dict[str, Any] | tuple[str, ...] | str


def read(path: Path) -> str:
    """The text of a file. Raises RunError when it is no text, not UTF-8, or beyond the limits."""
    content = _content(path)
    if content.startswith(UTF_16_OR_32):
        raise RunError(f"{path} is UTF-16 or UTF-32; save it as UTF-8")
    if b"\0" in content:
        raise RunError(f"{path} is no text; give a CSV file or JSON lines")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RunError(f"{path}, line {line}: not UTF-8 ({error.reason}); save it as UTF-8") from None


def lines(path: Path, text: str) -> Iterator[tuple[int, Line]]:
    """Each line of a file's text that says something, with its number. Raises RunError for one JSON array."""
    first = text.lstrip()[:1]
    if first == "[":
        raise RunError(f"{path} is one JSON array; write one JSON object a line, without the brackets and commas")
    return _json_lines(text) if first == "{" else _csv(text)


def _content(path: Path) -> bytes:
    """The bytes of a file, which must be one: what never ends must not be waited for, nor fill the memory."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise RunError(f"{path} is no ordinary file; save what it gives as one, a CSV file or JSON lines")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(f"{path} cannot be read: {reason}; give a CSV file or JSON lines") from None
    if len(content) > MOST_BYTES:
        raise RunError(f"{path} has more than {MOST_BYTES >> 20} MiB; cut it into several files")
    if len(content) > LONGEST_LINE:
        for number, line in enumerate(re.finditer(rb"[^\r\n]*(\r\n|\r|\n|\Z)", content), 1):
            if line.end() - line.start() > LONGEST_LINE:
                raise RunError(
                    f"{path}, line {number}: longer than {LONGEST_LINE >> 20} MiB; it must be one request"
                )
    return content


def _csv(text: str) -> Iterator[tuple[int, Line]]:
    """Its separator is the one of comma, semicolon and tab that the first line has most of."""
    head = text.lstrip().partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), strict=True)
    names: list[str] | None = None
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield reader.line_num, f"no whole row ({error})"
            return
        if not any(cell.strip() for cell in cells):
            continue
        if names is None:
            if len(cells) > MOST_COLUMNS:
                yield reader.line_num, _too_many(len(cells))
                return
            names = [cell.strip() for cell in cells]
            if len(set(names)) < len(names):
                twice = next(n for n in names if names.count(n) > 1)
                yield reader.line_num, f"two columns are called {twice!r}; give each its own name"
                return
            yield reader.line_num, tuple(names)
        elif len(cells) != len(names):
            yield reader.line_num, f"{len(cells)} cells where the head has {len(names)} columns"
        else:
            yield reader.line_num, dict(zip(names, cells, strict=True))


def _json_lines(text: str) -> Iterator[tuple[int, Line]]:
    columns: set[str] = set()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(
                line, parse_constant=_no_number, parse_float=_float, parse_int=_int, object_pairs_hook=_once
            )
        except (json.JSONDecodeError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            yield number, f"no whole JSON object ({said}); was the line cut?"
            continue
        except ValueError as error:
            yield number, str(error)
            continue
        if not isinstance(found, dict):
            yield number, "no JSON object"
            continue
        columns.update(found)
        if len(columns) > MOST_COLUMNS:
            yield number, _too_many(len(columns))
            return
        yield number, _unfit(line, found) or found


def _too_many(columns: int) -> str:
    return f"{columns:,} columns, and {MOST_COLUMNS} are the most; leave out those that are about no request"


def _unfit(line: str, found: dict) -> str | None:
    """Why an object of a line cannot be kept, or None."""
    if line.count("[") + line.count("{") > MOST_DEPTH and _deep(found, MOST_DEPTH):
        return f"more than {MOST_DEPTH} arrays and objects within each other; leave that column out"
    if "\\u" in line:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "half a character (\\ud800 to \\udfff alone), which is no text; write the whole one or none"
    return None


def _deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_deep(one, most - 1) for one in inner)


def _no_number(word: str):
    raise ValueError(f"{word} is no number in JSON")


def _float(text: str) -> float | str:
    """A number, or its text where it is too large to be one here: what a file states is kept."""
    number = float(text)
    return number if math.isfinite(number) else text


def _int(text: str) -> int | str:
    return int(text) if len(text) <= MOST_DIGITS else text


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two values are called {shown(twice)}; give each its own name")
    return found


def shown(value: Any) -> str:
    """A value as a fault quotes it: cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
