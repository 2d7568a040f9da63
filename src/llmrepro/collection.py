"""Run folders copied from other machines, brought below a folder of runs: copied safely, verified, computed anew.

Nothing of what was made elsewhere is shown here: the result and the page are made from the records by this kit,
which escapes everything, and the result that came is only held against them.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path

from llmrepro import confinement, credentials, facts, folder_copy, imported, report, run_folder, verification
from llmrepro import run as runs
from llmrepro.comparison import load_study
from llmrepro.folder_copy import RECORDED, Finding, Kind
from llmrepro.run_folder import RunError, read_json, read_json_if_there

COLLECTED, TOLD = "collected", "collected.json"
MOST_DEPTH, MOST_LOOKED_AT = 12, 200_000  # folders within each other, and entries below a given one
AT_REST_S = 600.0  # without a write for as long, a run whose lock cannot be seen has ended
RESULTS = ("result.json", "arms/*/result.json")
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\dZ(-\d{1,3})?", re.ASCII)


@dataclass(frozen=True)
class Collected:
    """A run folder from elsewhere: found at `source`, its copy at `path`, which is None where it was not taken.

    `whole` is one whose records are those that its result was computed from, and whose result they give.
    """

    path: Path | None
    source: Path
    whole: bool
    findings: tuple[Finding, ...]


def collect(folders: list[Path], runs_dir: Path) -> list[Collected]:
    """Every run folder at or below `folders`, copied to `<runs_dir>/collected/<hardware>/<recipe id>/<time>/`.

    The same folder is copied once however often it is given; of two that differ none replaces the other. What is
    still being written is left, what cannot be read is told, and the others go on. Raises RunError when nothing
    can be written below `runs_dir`.
    """
    root = runs_dir.expanduser().resolve() / COLLECTED
    try:
        root.mkdir(parents=True, exist_ok=True)
        return [
            _collected(found, root) if isinstance(found, Path) else found
            for folder in folders
            for found in _below(folder.expanduser(), root)
        ]
    except OSError as error:
        raise RunError(f"cannot collect into {root}: {error}; make room, or choose another folder") from None


def _below(folder: Path, root: Path) -> Iterator[Path | Collected]:
    """The run folders at or below a folder, and what is to be said of places that could not be looked at."""
    if not folder.is_dir():
        yield _left(folder, "is no folder")
        return
    todo, looked_at, some = [(folder.resolve(), 0)], 0, False
    while todo:
        here, depth = todo.pop(0)
        if here == root:
            continue
        if folder_copy.kind(here) is not None:
            some = True
            yield here
            continue
        try:
            with os.scandir(here) as entries:
                inner = []
                for entry in entries:
                    looked_at += 1
                    if looked_at > MOST_LOOKED_AT:
                        yield _left(folder, f"holds more than {MOST_LOOKED_AT:,} files; give folders further down")
                        return
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                        inner.append(entry.name)
        except OSError as error:
            yield _left(here, f"cannot be read: {error.strerror}")
            continue
        if depth < MOST_DEPTH:
            todo += [(here / name, depth + 1) for name in sorted(inner)]
    if not some:
        yield _left(folder, "holds no run folder: none has a recipe.json, study.json or imported.json")


def _left(source: Path, why: str) -> Collected:
    return Collected(None, source, False, (Finding("", why),))


def _collected(source: Path, root: Path) -> Collected:
    if folder_copy.is_file(source / ".lock") and run_folder.held(source):
        return _left(source, "is still being written; collect it when its run has ended")
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=root) as place:
        recorded, made = Path(place, "recorded"), Path(place, "made")

        def told(found: list[Finding]) -> list[Finding]:
            return verification.of_copy(found, recorded, source)

        of = folder_copy.kind(source)
        if unread := folder_copy.copy(source, recorded, RECORDED[of]):
            return Collected(None, source, False, tuple(told(unread)))
        found = folder_copy.copy(source, made, RESULTS)
        files = _hashes(recorded, made)
        try:
            if why := _unfinished(recorded, source):
                return _left(source, why)
            if (there := _with(_digest(files), root)) is not None:
                return _as_before(there, source)
            _clear(_digest(files), root)
            taken = confinement.call(take, str(recorded), str(made), of, str(root), source.name)
        except RunError as error:
            _clear(_digest(files), root)
            return Collected(None, source, False, tuple(told([*found, Finding("", str(error))])))
        unread = {one.file for one in found}
        found += [one for one in (Finding(*f) for f in taken["findings"]) if one.file not in unread]
        if taken["path"] is None:
            return Collected(None, source, False, tuple(told(found)))
        done = Collected(Path(taken["path"]), source, all(one.only_told for one in found), tuple(told(found)))
        _tell(done.path, files, done)
        return done


def _as_before(there: Path, source: Path) -> Collected:
    told = read_json(there / TOLD)
    return Collected(there, source, told["whole"], tuple(Finding(*one) for one in told["findings"]))


def _unfinished(recorded: Path, source: Path) -> str | None:
    """Why a folder whose status is `running` is left: the lock of another machine cannot be seen from here."""
    file = recorded / "status.json"
    told = read_json_if_there(file) if file.exists() and file.stat().st_size < folder_copy.MIB else {}
    if not isinstance(told, dict) or told.get("outcome") != "running":
        return None
    age_s = time.time() - _last_write(source)
    if age_s > AT_REST_S:
        return None
    return (
        f"says that it is running, and was written {max(0, age_s):.0f} s ago: collect it when its run has ended, "
        f"or {AT_REST_S / 60:.0f} minutes after its last write"
    )


def _last_write(folder: Path, depth: int = 3) -> float:
    """When something in a folder was written last, seconds since the epoch."""
    latest = 0.0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in islice(entries, folder_copy.MOST_ENTRIES):
            with contextlib.suppress(OSError):
                told = entry.stat(follow_symlinks=False)
                latest = max(latest, told.st_mtime)
                if depth and stat.S_ISDIR(told.st_mode):
                    latest = max(latest, _last_write(folder / entry.name, depth - 1))
    return latest


def _hashes(*folders: Path) -> dict[str, str]:
    """sha256 of every file below folders by its path there."""
    there = [(path, folder) for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): run_folder.sha256_of(path) for path, folder in there}


def _digest(files: dict[str, str]) -> str:
    """What two folders share that are the same: names and hashes of all that was recorded, and of the results."""
    return hashlib.sha256(json.dumps(sorted(files.items())).encode()).hexdigest()


def _of(digest: str, root: Path) -> Iterator[tuple[Path, dict]]:
    """The copies of a folder that were made before, with what is told of each."""
    for file in root.glob(f"*/*/*/*/{TOLD}"):
        with contextlib.suppress(RunError):
            told = read_json(file)
            if told["digest"] == digest:
                yield file.parent, told


def _with(digest: str, root: Path) -> Path | None:
    """The whole copy of a folder that was made before, or None."""
    return next((folder for folder, told in _of(digest, root) if "whole" in told), None)


def _clear(digest: str, root: Path) -> None:
    """Take away a copy that is half made: the process that made it was ended."""
    for folder, told in list(_of(digest, root)):
        if "whole" not in told:
            shutil.rmtree(folder)


def _tell(path: Path, files: dict[str, str], done: Collected | None = None) -> None:
    """Write collected.json: what came, where from, and once it is known what was found."""
    told = {"digest": _digest(files), "files": files, "at": run_folder.now()}
    if done is not None:
        told |= {"source": str(done.source), "whole": done.whole, "findings": _as_told(done.findings)}
    part = path / f".{TOLD}.part"
    part.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    part.replace(path / TOLD)


def take(recorded: str, made: str, of: Kind, root: str, name: str) -> dict:
    """Verify a copied folder, put it in its place below `root` and make its page; {path, findings} of it, where
    `path` is None of one that cannot be computed. `name` is what the folder was called.
    """
    folder = Path(recorded)
    files = _hashes(folder, Path(made))
    found = list(verification.of_results(folder, Path(made), of))
    if any(one.file == "" and not one.only_told for one in found):
        return {"path": None, "findings": _as_told(found)}
    place, others = _placed(folder, of, Path(root), name, files)
    if others:
        found.append(Finding("", _otherwise(others, files), True))
    try:
        if credentials.blank(place):
            verification.renew(place)
        report.write(place)
    except BaseException:
        shutil.rmtree(place)
        raise
    return {"path": str(place), "findings": _as_told(found)}


def _as_told(found: Iterable[Finding]) -> list[tuple[str, str, bool]]:
    return [(one.file, one.sentence, one.only_told) for one in found]


def _placed(folder: Path, of: Kind, root: Path, name: str, files: dict[str, str]) -> tuple[Path, list[Path]]:
    """Move a folder to its place, and which other folders of its machine, recipe and time there are already."""
    _tell(folder, files)
    base = root / _machine(folder, of) / _id(folder, of)
    when, others = name if STAMP.fullmatch(name) else _time(folder, of), []
    base.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        place = base / (when if number == 1 else f"{when}-{number}")
        try:
            folder.rename(place)  # which never replaces a folder that holds something
            return place, others
        except OSError:
            if not place.is_dir():
                raise
            others.append(place)


def _otherwise(others: list[Path], files: dict[str, str]) -> str:
    before = read_json(others[-1] / TOLD)["files"]
    differ = sorted(n for n in {*before, *files} if before.get(n) != files.get(n))
    return (
        f"is of the same machine, recipe and time as {others[-1].name}, collected before, and differs in "
        f"{', '.join(differ[:5])}{'…' if len(differ) > 5 else ''}: one of them was changed or gone on with; "
        "both are kept"
    )


def _id(folder: Path, of: Kind) -> str:
    """model/engine--machine of a run, model/study of a study, imported/file of an import."""
    if of == "run":
        return runs.load_recipe(folder).id
    if of == "study":
        return load_study(folder).id
    return f"{imported.LABEL}/{_slug(Path(read_json(folder / imported.TOLD)['file']).stem)}"


def _machine(folder: Path, of: Kind) -> str:
    """What the machine of a run is called here: by its GPUs or its processor, never by its host's name."""
    arms = sorted(folder.glob("arms/*/machine.json"))
    told = read_json_if_there(folder / "machine.json") or (read_json(arms[0]) if arms else {})
    here = facts.of_machine(told)
    gpus, cores = here["gpu_count"], here["cpu_cores"]
    if gpus:
        return _slug(f"{gpus}x {here['gpu_name'] or 'GPU'}" if gpus != 1 else here["gpu_name"] or "GPU")
    if here["cpu_model"]:
        return _slug(f"{here['cpu_model']} {f'{cores} cores' if cores else ''}")
    return "unknown-machine"


def _slug(text: str) -> str:
    words = re.sub(r"\((r|tm|c)\)|\b(cpu|processor)\b|@.*", " ", text.lower())
    return re.sub(r"[^a-z0-9._]+", "-", words, flags=re.ASCII).strip("-._")[:60].strip("-._") or "unnamed"


def _time(folder: Path, of: Kind) -> str:
    """When a run was made, as a folder's name: its first request, else its status."""
    first = [r["started_at"] for r in run_folder.read_lines(folder / "records.jsonl")[:1]]
    told = read_json(folder / imported.TOLD)["imported_at"] if of == "imported" else None
    moment = next(iter(first), None) or told or read_json(folder / "status.json")["at"]
    return datetime.fromisoformat(moment).astimezone(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
