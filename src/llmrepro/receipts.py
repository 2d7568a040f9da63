"""Receipts: per-request numbers that somebody else measured, read from a CSV file or from JSON lines.

A file is taken whole or not at all: every row that is not what it should be is named with its line.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from llmrepro.run_folder import RunError

# The names under which a column is taken, the kit's own first, and what its numbers are multiplied with.
# A time without its unit in the name is not taken: 1.5 may be seconds or a part of a millisecond.
COLUMNS: dict[str, dict[str, float]] = {
    "suite": dict.fromkeys(("suite", "workload", "benchmark"), 1),
    "case": dict.fromkeys(("case", "prompt_id", "prompt_name"), 1),
    "repeat": dict.fromkeys(("repeat", "rep", "round", "iteration", "trial"), 1),
    "prompt_tokens": dict.fromkeys(("prompt_tokens", "input_tokens", "prompt_n"), 1),
    "cached_tokens": dict.fromkeys(("cached_tokens", "cached_prompt_tokens", "cache_n"), 1),
    "output_tokens": dict.fromkeys(("output_tokens", "completion_tokens", "generated_tokens", "predicted_n"), 1),
    "ttft_s": {"ttft_s": 1, "time_to_first_token_s": 1, "ttft_ms": 1e-3, "time_to_first_token_ms": 1e-3},
    "total_s": {
        **dict.fromkeys(("total_s", "total_time_s", "e2e_s", "latency_s", "request_latency_s"), 1),
        **dict.fromkeys(("total_ms", "total_time_ms", "e2e_ms", "latency_ms", "request_latency_ms"), 1e-3),
    },
    "max_tokens": dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), 1),
}
PLAIN = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
NEEDED = ("suite", "case", "output_tokens", "ttft_s", "total_s")
OPTIONAL_COUNTS = ("repeat", "prompt_tokens", "cached_tokens", "max_tokens")
MOST_FAULTS, LONGEST_NAME = 20, 200
LARGEST_COUNT, SHORTEST_S, LONGEST_S = 2**53, 1e-6, 1e7
UTF_16_OR_32 = (b"\xff\xfe", b"\xfe\xff", b"\x00\x00\xfe\xff")


class Receipt(BaseModel):
    """One request as a file states it: times in seconds after it was sent, `total_s` to the end of its stream.

    What the file does not state is None. `extra` are its other columns as they stand there, `line` is where.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: str
    case: str
    repeat: int
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    ttft_s: float
    total_s: float
    max_tokens: int | None
    line: int
    extra: dict[str, Any] = {}


class Receipts(NamedTuple):
    """What a file holds. `columns` are the kit's names by the file's own, for those that were taken."""

    rows: list[Receipt]
    columns: dict[str, str]
    extra: list[str]


def read(path: Path) -> Receipts:
    """The rows of a file. Raises RunError naming every fault with its line, or the columns found and needed."""
    text = _text(path)
    first = text.lstrip()[:1]
    if first == "[":
        raise RunError(f"{path} is one JSON array; write one JSON object a line, without the brackets and commas")
    lines = _json_lines(text) if first == "{" else _csv(text)
    faults: list[str] = []
    rows: list[Receipt] = []
    taken: dict[str, str] = {}
    extra: dict[str, None] = {}
    at: dict[tuple, int] = {}
    places: dict[tuple[str, ...], dict[str, tuple[str, float]]] = {}
    for line, found in lines:
        if isinstance(found, str):
            faults.append(f"line {line}: {found}")
            continue
        names = tuple(found)
        try:
            if names not in places:
                places[names] = _places(names)
                taken |= {own: name for name, (own, _) in places[names].items()}
                extra |= dict.fromkeys(n for n in names if n not in taken)
            rows.append(_receipt(found, places[names], line, at))
        except ValueError as error:
            faults.append(f"line {line}: {error}")
            if not places:  # a file without its columns is one fault, not thousands
                break
    if faults:
        more = f"\n  and {len(faults) - MOST_FAULTS:,} more" if len(faults) > MOST_FAULTS else ""
        shown = "".join(f"\n  {fault}" for fault in faults[:MOST_FAULTS])
        raise RunError(f"{path}: nothing was imported. Mend these rows, or take them out:{shown}{more}")
    if not rows:
        raise RunError(f"{path} holds no request; it needs a row for each, with {_needed()}")
    return Receipts(rows, taken, list(extra))


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; give a CSV file or JSON lines") from None
    if content.startswith(UTF_16_OR_32):
        raise RunError(f"{path} is UTF-16 or UTF-32; save it as UTF-8")
    if b"\0" in content:
        raise RunError(f"{path} is no text; give a CSV file or JSON lines")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RunError(f"{path}, line {line}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    if not text.strip():
        raise RunError(f"{path} is empty; it needs a row for each request, with {_needed()}")
    return text


def _csv(text: str) -> Iterator[tuple[int, dict | str]]:
    """(line, cells by column) of each row, or (line, what is wrong with it). Its separator is the one of comma,
    semicolon and tab that the first line has most of."""
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
            names = [cell.strip() for cell in cells]
            if len(set(names)) < len(names):
                twice = next(n for n in names if names.count(n) > 1)
                yield reader.line_num, f"two columns are called {twice!r}; give each its own name"
                return
        elif len(cells) != len(names):
            yield reader.line_num, f"{len(cells)} cells where the head has {len(names)} columns"
        else:
            yield reader.line_num, dict(zip(names, cells, strict=True))


def _json_lines(text: str) -> Iterator[tuple[int, dict | str]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            said = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            yield number, f"no whole JSON object ({said}); was the line cut?"
            continue
        yield number, found if isinstance(found, dict) else "no JSON object"


def _no_number(word: str):
    raise ValueError(f"{word} is no number in JSON")


def _places(names: tuple[str, ...]) -> dict[str, tuple[str, float]]:
    """(the file's name of it, factor) of each known column that a row has. Raises ValueError."""
    found: dict[str, tuple[str, float]] = {}
    for own in names:
        plain = re.sub(r"[\s-]+", "_", own.strip().lower())
        for name, known in COLUMNS.items():
            if plain not in known:
                continue
            if name in found:
                raise ValueError(
                    f"the columns {found[name][0]!r} and {own!r} both say {name}; leave one of them out"
                )
            found[name] = (own, known[plain])
    missing = [name for name in NEEDED if name not in found]
    if missing:
        there = ", ".join(names[:40]) or "none"
        raise ValueError(
            f"no column for {', '.join(missing)}. Found: {there}. Needed: {_needed()}. Name them so, times with "
            "their unit"
        )
    return found


def _needed() -> str:
    """The columns that are needed and those that may stand beside them, with their other names."""
    return "; ".join(
        [
            ", ".join(" or ".join(COLUMNS[name]) for name in NEEDED),
            f"and where known {', '.join(' or '.join(COLUMNS[name]) for name in OPTIONAL_COUNTS)}",
        ]
    )


def _receipt(
    cells: dict[str, Any], places: dict[str, tuple[str, float]], line: int, at: dict[tuple, int]
) -> Receipt:
    """One row. `at` has the lines of those before it. Raises ValueError with what is wrong."""
    suite, case = (_name(cells, places, name) for name in ("suite", "case"))
    output_tokens = _count(cells, places, "output_tokens", least=1)
    counts = {name: _count(cells, places, name) if name in places else None for name in OPTIONAL_COUNTS}
    ttft_s, total_s = (_time(cells, places, name) for name in ("ttft_s", "total_s"))
    if output_tokens is None:
        raise ValueError(f"{places['output_tokens'][0]} is empty")
    if total_s < ttft_s:
        raise ValueError(f"total_s is {total_s:g}, less than ttft_s, {ttft_s:g}")
    if counts["prompt_tokens"] == 0:
        raise ValueError("prompt_tokens is 0; leave it empty where it is not known")
    if None not in (c := (counts["cached_tokens"], counts["prompt_tokens"])) and c[0] > c[1]:
        raise ValueError(f"{c[0]} cached tokens of a prompt of {c[1]}")
    if counts["max_tokens"] is not None and output_tokens > counts["max_tokens"] + 1:  # an end token may count
        raise ValueError(f"{output_tokens} output tokens, more than max_tokens, {counts['max_tokens']}")
    repeat = counts.pop("repeat")
    if repeat is None:  # in the order of the file
        repeat = at.get((suite, case), 0)
        at[suite, case] = repeat + 1
    before = at.setdefault((suite, case, repeat), line)
    if before != line:
        raise ValueError(f"repeat {repeat} of {suite} · {case} stands in line {before} already")
    return Receipt.model_construct(
        suite=suite,
        case=case,
        repeat=repeat,
        output_tokens=output_tokens,
        ttft_s=ttft_s,
        total_s=total_s,
        line=line,
        extra=_extra(cells, places) if len(cells) > len(places) else {},
        **counts,
    )


def _extra(cells: dict[str, Any], places: dict[str, tuple[str, float]]) -> dict[str, Any]:
    used = {own for own, _ in places.values()}
    return {own: value for own, value in cells.items() if own not in used}


def _name(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> str:
    value = cells[places[name][0]]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_NAME:
        raise ValueError(f"{name} is {_shown(value)}, not a name of 1 to {LONGEST_NAME} characters")
    return value.strip()


def _count(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str, least: int = 0) -> int | None:
    value = cells[places[name][0]]
    number = _number(value)
    if number is None:
        return None
    if number != int(number) or not least <= number <= LARGEST_COUNT:
        raise ValueError(f"{name} is {_shown(value)}, not a whole number from {least} on")
    return int(number)


def _time(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> float:
    own, factor = places[name]
    number = _number(cells[own])
    if number is None:
        raise ValueError(f"{own} is empty")
    # rounded where a factor came in, since 218.9 ms are 0.2189 s and not 0.21890000000000001
    seconds = number if factor == 1 else float(f"{number * factor:.12g}")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ValueError(f"{own} is {_shown(cells[own])}, no time after the request was sent")
    return seconds


def _number(value: Any) -> float | None:
    """A number, or None for an empty cell. Raises ValueError for anything else."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        # Python reads 1_000 and other scripts' digits too, which no publication means
        plain = PLAIN.fullmatch(value) if isinstance(value, str) else not isinstance(value, bool)
        number = float(value) if plain else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{_shown(value)} is no number")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
