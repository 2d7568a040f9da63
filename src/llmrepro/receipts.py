"""Receipts: per-request numbers that somebody else measured, read from a CSV file or from JSON lines.

A file is taken whole or not at all: every row that is not what it should be is named with its line.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from llmrepro import receipt_file
from llmrepro.receipt_file import shown
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
    text = receipt_file.read(path)
    if not text.strip():
        raise RunError(f"{path} is empty; it needs a row for each request, with {_needed()}")
    faults: list[str] = []
    rows: list[Receipt] = []
    taken: dict[str, str] = {}
    extra: dict[str, None] = {}
    at: dict[tuple, int] = {}
    places: dict[tuple[str, ...], dict[str, tuple[str, float]]] = {}
    for line, found in receipt_file.lines(path, text):
        if isinstance(found, str):
            faults.append(f"line {line}: {found}")
            continue
        names = tuple(found)
        try:
            if names not in places:
                places[names] = _places(names)
                taken |= {own: name for name, (own, _) in places[names].items()}
                extra |= dict.fromkeys(n for n in names if n not in taken)
            if isinstance(found, dict):
                rows.append(_receipt(found, places[names], line, at))
        except ValueError as error:
            faults.append(f"line {line}: {error}")
            if not places:  # a file without its columns is one fault, not thousands
                break
    if faults:
        more = f"\n  and {len(faults) - MOST_FAULTS:,} more" if len(faults) > MOST_FAULTS else ""
        listed = "".join(f"\n  {fault}" for fault in faults[:MOST_FAULTS])
        raise RunError(f"{path}: nothing was imported. Mend these lines, or take the rows out:{listed}{more}")
    if not rows:
        raise RunError(f"{path} holds no request; it needs a row for each, with {_needed()}")
    return Receipts(rows, taken, list(extra))


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
        yield f"{total} is {shown(cells[total])}, less than {ttft}, {shown(cells[ttft])}"
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
        raise ValueError(f"{own} is {shown(value)}, not a name of 1 to {LONGEST_NAME} characters")
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
        raise ValueError(f"{own} is {shown(value)}, not a whole number from {least} on")
    return int(number)


def _time(cells: dict[str, Any], places: dict[str, tuple[str, float]], name: str) -> float:
    own, factor = places[name]
    number = _number(own, cells[own])
    if number is None:
        raise ValueError(f"{own} is empty")
    # rounded where a factor came in, since 218.9 ms are 0.2189 s and not 0.21890000000000001
    seconds = number if factor == 1 else float(f"{number * factor:.12g}")
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise ValueError(f"{own} is {shown(cells[own])}, no time after the request was sent")
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
        raise ValueError(f"{own} is {shown(value)}, no number")
    return number


READ = {
    **dict.fromkeys(("suite", "case"), _name),
    **dict.fromkeys(("output_tokens", *OPTIONAL_COUNTS), _count),
    **dict.fromkeys(("ttft_s", "total_s"), _time),
}
