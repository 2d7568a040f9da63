"""A copy of what a run folder holds, made without trusting it: ordinary files of known names, none too large.

Whoever reads a folder of somebody else's reads such a copy. A link could lead anywhere, a pipe never ends, and a
file can be larger than the memory: each is a finding, and none of it is opened.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Literal

from llmrepro import credentials, imported
from llmrepro.comparison import KEPT

Kind = Literal["run", "study", "imported"]

RECORDED: dict[Kind, tuple[str, ...]] = {  # what a folder is computed from, by what tells its kind
    "study": (
        *("status.json", "study.json", "parameters.json", "machine.json", credentials.FILE),
        *(f"arms/*/{name}" for name in KEPT),
    ),
    "imported": ("status.json", *imported.INPUTS),
    "run": KEPT,
}
MADE = ("result.json", "report.html", *(f"figures/*.{kind}" for kind in ("csv", "txt", "svg")))
MIB = 1 << 20
GROWING = ("records.jsonl", "telemetry.csv", imported.ROWS, "*.guard.jsonl")  # what a long run makes long
MOST_GROWN, MOST_BYTES, MOST_IN_ALL = 128 * MIB, 64 * MIB, 512 * MIB
MOST_ENTRIES = 5_000  # of one folder
A_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}", re.ASCII)


@dataclass(frozen=True)
class Finding:
    """What is to be said of a file (a path below its folder, or "" for the whole), as a sentence that begins after
    its name. What is only worth knowing leaves a folder whole."""

    file: str
    sentence: str
    only_told: bool = False


def kind(path: Path) -> Kind | None:
    """What a folder holds by the file that only such a one has, which must be no link; None: no run."""
    marks: dict[Kind, str] = {"study": "study.json", "imported": imported.TOLD, "run": "recipe.json"}
    return next((kind for kind, name in marks.items() if is_file(path / name)), None)


def is_file(path: Path) -> bool:
    """Whether an ordinary file is there, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except (OSError, ValueError):
        return False


def made_in(of: Kind) -> tuple[str, ...]:
    """The files that the kit makes in a folder of a kind from those that are recorded."""
    return (*MADE, *(f"arms/*/{name}" for name in MADE)) if of == "study" else MADE


@dataclass
class _Copying:
    target: Path
    findings: list[Finding] = field(default_factory=list)
    left_bytes: int = MOST_IN_ALL


def copy(source: Path, target: Path, patterns: Sequence[str]) -> list[Finding]:
    """Copy the files of `source` whose paths below it fit `patterns` into the folder `target`, which may be new.

    Returns a finding for each that fits and is not copied. Nothing in `source` is written, no link is followed.
    """
    done = _Copying(target)
    target.mkdir(parents=True, exist_ok=True)
    try:
        top = os.open(source, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return [Finding("", f"cannot be read: {error.strerror}")]
    try:
        _copy_below(top, "", [p.split("/") for p in patterns], done)
    finally:
        os.close(top)
    return done.findings


def _copy_below(folder: int, where: str, patterns: list[list[str]], done: _Copying) -> None:
    for name, mode in _entries(folder, where, done):
        fits = [parts for parts in patterns if fnmatchcase(name, parts[0]) and A_NAME.fullmatch(name)]
        deeper = [parts[1:] for parts in fits if len(parts) > 1]
        path = where + name
        if deeper and stat.S_ISDIR(mode):
            try:
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:
                done.findings.append(Finding(path, f"cannot be read: {error.strerror}"))
                continue
            try:
                _copy_below(below, f"{path}/", deeper, done)
            finally:
                os.close(below)
        elif deeper and stat.S_ISLNK(mode):
            done.findings.append(Finding(path, "is a link, which is not followed"))
        elif fits and not deeper and (why := _copy_file(folder, name, mode, path, done)):
            done.findings.append(Finding(path, why))


def _entries(folder: int, where: str, done: _Copying) -> Iterator[tuple[str, int]]:
    """(name, mode) of what lies in a folder, in the order of names."""
    with os.scandir(folder) as found:
        names = [entry.name for entry in islice(found, MOST_ENTRIES + 1)]
    if len(names) > MOST_ENTRIES:
        done.findings.append(Finding(where.rstrip("/"), f"holds more than {MOST_ENTRIES:,} files: not read"))
        return
    for name in sorted(names):
        try:
            yield name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except OSError:
            continue  # gone meanwhile


def _copy_file(folder: int, name: str, mode: int, path: str, done: _Copying) -> str | None:
    """Copy a file; why it was not copied, or None."""
    if stat.S_ISLNK(mode):
        return "is a link, which is not followed"
    if not stat.S_ISREG(mode):  # asked before it is opened: opening alone does something to some devices
        return "is no ordinary file, so it is not opened"
    most = MOST_GROWN if any(fnmatchcase(name, pattern) for pattern in GROWING) else MOST_BYTES
    most = min(most, done.left_bytes)
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        return (
            "is a link, which is not followed"
            if error.errno == errno.ELOOP
            else f"cannot be read: {error.strerror}"
        )
    target = done.target / path
    with os.fdopen(fd, "rb") as file:
        told = os.fstat(fd)
        if not stat.S_ISREG(told.st_mode):
            return "is no ordinary file, so it is not read"
        if told.st_size > most:
            return f"has {told.st_size / MIB:,.1f} MiB, more than the {most / MIB:,.1f} that are read"
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            content = file.read(most + 1)
        except OSError as error:
            return f"cannot be read: {error.strerror}"
    if len(content) > most:
        return f"grew beyond {most / MIB:,.1f} MiB while it was read"
    target.write_bytes(content)
    done.left_bytes -= len(content)
    return None
