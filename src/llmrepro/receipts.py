"""Receipts: per-request numbers that somebody else measured, read from a CSV file or from JSON lines.

A file is taken whole or not at all: every row that is not what it should be is named with its line.
"""

import csv
import io
import json
import math
import re
import stat
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
MOST_BYTES, LONGEST_LINE, MOST_COLUMNS, MOST_DEPTH, MOST_DIGITS = 256 << 20, 1 << 20, 200, 20, 300
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
        raise RunError(f"{path}: nothing was imported. Mend these lines, or take the rows out:{shown}{more}")
    if not rows:
        raise RunError(f"{path} holds no request; it needs a row for each, with {_needed()}")
    return Receipts(rows, taken, list(extra))


def _text(path: Path) -> str:
    content = _content(path)
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
            if len(cells) > MOST_COLUMNS:
                yield reader.line_num, _too_many(len(cells))
                return
            names = [cell.strip() for cell in cells]
            if len(set(names)) < len(names):
                twice = next(n for n in names if names.count(n) > 1)
                yield reader.line_num, f"two columns are called {twice!r}; give each its own name"
                return
            try:
                _places(tuple(names))
            except ValueError as error:
                yield reader.line_num, str(error)
                return
        elif len(cells) != len(names):
            yield reader.line_num, f"{len(cells)} cells where the head has {len(names)} columns"
        else:
            yield reader.line_num, dict(zip(names, cells, strict=True))


def _json_lines(text: str) -> Iterator[tuple[int, dict | str]]:
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
        raise ValueError(f"two values are called {_shown(twice)}; give each its own name")
    return found


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
        taken = ", ".join(f"{own} as {name}" for name, (own, _) in found.items()) or "none"
        needed = "; ".join(" or ".join(COLUMNS[name]) for name in missing)
        raise ValueError(
            f"no column for {', '.join(missing)}. Found: {there}. Taken of these: {taken}. "
            f"Needed besides: {needed}. Name them so, times with their unit"
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
    """One row. `at` has the lines of those before it. Raises ValueError with all that is wrong with it."""
    told: dict[str, Any] = {}
    faults: list[str] = []
    for name, read_ in READ.items():
        try:
            told[name] = read_(cells, places, name) if name in places else None
        except ValueError as error:
            faults.append(str(error))
    faults += _contradictions(cells, places, told)
    if faults:
        raise ValueError("; ".join(faults))
    suite, case, repeat = (told.pop(name) for name in ("suite", "case", "repeat"))
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
        line=line,
        extra=_extra(cells, places) if len(cells) > len(places) else {},
        **told,
    )


def _contradictions(cells: dict[str, Any], places: dict[str, tuple[str, float]], told: dict) -> Iterator[str]:
    """What cannot be true of one request, of those of its cells that could be read."""
    own = {name: place for name, (place, _) in places.items()}
    ttft_s, total_s, output, prompt, cached, most = (
        told.get(n) for n in ("ttft_s", "total_s", "output_tokens", "prompt_tokens", "cached_tokens", "max_tokens")
    )
    if None not in (ttft_s, total_s) and total_s < ttft_s:
        total, ttft = own["total_s"], own["ttft_s"]
        yield f"{total} is {_shown(cells[total])}, less than {ttft}, {_shown(cells[ttft])}"
    if prompt == 0:
        yield f"{own['prompt_tokens']} is 0; leave it empty where it is not known"
    elif None not in (cached, prompt) and cached > prompt:
        yield f"{cached} cached tokens of a prompt of {prompt}"
    if None not in (output, most) and output > most + 1:  # an end token may count
        yield f"{output} output tokens, more than {own['max_tokens']}, {most}"


def _extra(cells: dict[str, Any], places: dict[str, tuple[str, float]]) -> dict[str, Any]:
    used = {own for own, _ in places.values()}
    return {own: value for own, value in cells.items() if own not in used}


def _name(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> str:
    own = places[name][0]
    value = cells[own]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_NAME:
        raise ValueError(f"{own} is {_shown(value)}, not a name of 1 to {LONGEST_NAME} characters")
    return value.strip()


def _count(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> int | None:
    own, needed = places[name][0], name in NEEDED
    value = cells[own]
    number = _number(own, value)
    if number is None and needed:
        raise ValueError(f"{own} is empty")
    if number is None:
        return None
    least = 1 if needed else 0
    if number != int(number) or not least <= number <= LARGEST_COUNT:
        raise ValueError(f"{own} is {_shown(value)}, not a whole number from {least} on")
    return int(number)


def _time(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> float:
    own, factor = places[name]
    number = _number(own, cells[own])
    if number is None:
        raise ValueError(f"{own} is empty")
    # rounded where a factor came in, since 218.9 ms are 0.2189 s and not 0.21890000000000001
    seconds = number if factor == 1 else float(f"{number * factor:.12g}")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ValueError(f"{own} is {_shown(cells[own])}, no time after the request was sent")
    return seconds


def _number(own: str, value: Any) -> float | None:
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
        raise ValueError(f"{own} is {_shown(value)}, no number")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


READ = {
    **dict.fromkeys(("suite", "case"), _name),
    **dict.fromkeys(("output_tokens", *OPTIONAL_COUNTS), _count),
    **dict.fromkeys(("ttft_s", "total_s"), _time),
}
