"""What became of many runs: a row for each, read from its folder; summary.json, summary.csv, an exit code."""

import csv
import io
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from llmrepro import __version__, cell, collection, notation, run_folder, terms
from llmrepro.collection import Collected
from llmrepro.folder_copy import Finding
from llmrepro.matrix import Cell
from llmrepro.run_folder import RunError, read_json_if_there

Did = Literal["measured", "gone on with", "skipped", "refused", "not reached", "there before", "collected"]
OK, LACKING, NOT_REPRODUCED, FAILED = 0, 10, 11, 12
FILES = ("index.html", "summary.json", "summary.csv")
NESTED = ("*/*/*/status.json", "collected/*/*/*/*/status.json")  # below a folder of runs
LAST_WORDS = 300  # characters


@dataclass(frozen=True)
class Row:
    """One run. `outcome` is what its status.json says, "unreadable" where its folder cannot be read, and "" where
    there is no run; `words` counts the claims by their verdict."""

    recipe: str
    did: Did
    outcome: str
    reason: str = ""
    next_step: str = ""
    title: str = ""
    engine: str = ""
    machine: str = ""
    ended: str = ""  # ISO 8601, UTC
    seconds: float | None = None  # that this matrix took for it
    exit_code: int | None = None
    words: dict[str, int] = field(default_factory=dict)
    verdicts: tuple[dict, ...] = ()  # {claim, word, ratio}
    folder: str = ""  # below where the summary lies, or absolute
    report: str = ""  # its page, likewise
    whole: bool | None = None  # of a folder from elsewhere: whether it is what it was
    findings: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.outcome not in ("completed", "lacking", "imported") or self.whole is False


def of_cell(done: Cell, runs_dir: Path) -> Row:
    """The row of a cell that a matrix has come to."""
    if done.folder is None or done.act == "refuse":
        return Row(done.recipe, "refused", "", reason=done.why, folder=_where(done.folder, runs_dir))
    did: Did = {"new": "measured", "go on": "gone on with", "skip": "skipped"}[done.act]
    row = of_folder(done.folder, runs_dir, did)
    if done.end is None:
        return row
    said = "; ".join(s for s in (row.reason, done.end.why, _last_words(done, row)) if s)
    return replace(row, reason=said, seconds=round(done.end.seconds, 1), exit_code=done.end.code)


def not_reached(left: Cell, why: str) -> Row:
    """The row of a cell that a matrix did not come to."""
    return Row(left.recipe, "not reached", "", reason=why)


def _last_words(done: Cell, row: Row) -> str:
    """The sentence with which the process of a run refused to begin: then its status does not tell."""
    said = done.folder / cell.SAID
    if row.outcome not in ("interrupted", "unreadable") or done.end.why or not said.exists():
        return ""
    *_, last = ["", *said.read_text(encoding="utf-8", errors="replace").splitlines()]
    return last.removeprefix("Error: ")[:LAST_WORDS] if last.startswith("Error: ") else ""


def of_collected(found: Collected, runs_dir: Path) -> Row:
    """The row of a folder from elsewhere, or of one that could not be taken."""
    if found.path is not None:
        return of_folder(found.path, runs_dir)
    said = "; ".join(map(_finding, found.findings))
    return Row(found.source.name, "collected", "unreadable", reason=said, whole=False)


def _finding(found: Finding) -> str:
    return f"{found.file or 'the folder'} {found.sentence}"


def of_folder(path: Path, runs_dir: Path, did: Did = "there before") -> Row:
    """The row of a run's or a study's folder; whatever is wrong with it is said in the row."""
    where = _where(path, runs_dir)
    try:
        return _read(path, where, did)
    except RunError as error:
        said = str(error)
    except Exception as error:  # of which a folder that was changed by hand can raise any
        said = (
            f"a file of it is not as the kit writes it ({type(error).__name__}: {error}); restore it, or run again"
        )
    return Row(_place(path), did, "unreadable", reason=said, folder=where)


def _read(path: Path, where: str, did: Did) -> Row:
    status = run_folder.status(path)
    study = read_json_if_there(path / "study.json")
    came = read_json_if_there(path / collection.TOLD)
    recipe = study or read_json_if_there(path / "recipe.json")
    result = read_json_if_there(path / "result.json")
    judged = [_judged(v) for v in [*result.get("verdicts", []), *result.get("comparisons", [])]]
    engine = recipe.get("engine", {})
    ended = status["outcome"] in ("completed", "lacking", "imported")
    page = path / "report.html"
    return Row(
        recipe=_text(recipe.get("id") or _place(path)),
        did="collected" if came else did,
        outcome=status["outcome"],
        reason=_text(status.get("reason", "")),
        next_step=_text(status.get("next_step", "")),
        title=_text(recipe.get("title", "")),
        engine=f"{_text(engine['name'])} {_text(engine['version'])}" if engine else "",
        machine=hardware(read_json_if_there(path / "machine.json")),
        ended=_text(status["at"]),
        words=dict(Counter(v["word"] for v in judged)) if ended else {},
        verdicts=tuple(judged) if ended else (),
        folder=where,
        report=f"{where}/report.html" if page.exists() else "",
        whole=came.get("whole"),
        findings=tuple(_finding(Finding(*one)) for one in came.get("findings", [])),
    )


def _place(path: Path) -> str:
    """What a run folder's place says of its recipe."""
    return f"{path.parent.parent.name}/{path.parent.name}"


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.60} is no text")
    return value


def _judged(verdict: dict) -> dict:
    """A verdict as a row tells it; its ratio is to what was published, or a comparison's own."""
    word, ratio = verdict["word"], verdict.get("here" if "ratios" in verdict else "ratio")
    if word not in get_args(terms.Word) or not (ratio is None or math.isfinite(ratio)):
        raise ValueError(f"{word!r:.60}, {ratio!r:.60} is no verdict")
    return {"claim": _text(verdict["claim"]), "word": word, "ratio": ratio}


def hardware(facts: dict) -> str:
    """A machine in a few words: its GPUs, else its processor; "" where it is not known."""
    gpus = Counter(_text(gpu["name"] or "a GPU") for gpu in facts.get("gpus") or [])
    if gpus:
        return ", ".join(name if count == 1 else f"{count} × {name}" for name, count in gpus.items())
    return _text((facts.get("cpu") or {}).get("model") or "")


def _where(path: Path | None, runs_dir: Path) -> str:
    if path is None:
        return ""
    return path.relative_to(runs_dir).as_posix() if path.is_relative_to(runs_dir) else path.as_posix()


def there(runs_dir: Path, beside: Iterable[Row]) -> list[Row]:
    """The newest run of each recipe and machine below a folder of runs, but for those of rows that are had
    already."""
    had = {row.folder for row in beside if row.folder}
    newest: dict[tuple, Row] = {}
    for path in sorted({status.parent for pattern in NESTED for status in runs_dir.glob(pattern)}):
        if _where(path, runs_dir) not in had:
            row = of_folder(path, runs_dir)
            newest[row.recipe, row.machine, row.did] = row
    taken = {(row.recipe, row.machine) for row in beside}
    return [r for r in newest.values() if r.did == "collected" or (r.recipe, r.machine) not in taken]


def exit_code(rows: Iterable[Row]) -> int:
    """What a scheduler is told of the rows of one matrix: the worst of them decides."""
    rows = list(rows)
    if any(row.failed for row in rows):
        return FAILED
    if any("not_reproduced" in row.words for row in rows):
        return NOT_REPRODUCED
    return LACKING if any(row.outcome == "lacking" for row in rows) else OK


def write(runs_dir: Path, rows: list[Row], code: int, stopped: str = "") -> list[Path]:
    """summary.json and summary.csv of all rows; `code` is the matrix's own. Each file is replaced whole."""
    told = {
        "made": run_folder.now(),
        "llmrepro": __version__,
        "exit_code": code,
        "stopped": stopped,
        "rows": [asdict(row) for row in rows],
    }
    sheet = io.StringIO()
    words = get_args(terms.Word)
    head = ("recipe", "machine", "engine", "did", "outcome", "exit_code", "ended", "seconds")
    writer = csv.writer(sheet, lineterminator="\n")
    writer.writerow([*head, *words, "reason", "next_step", "report"])
    for row in rows:
        said = [getattr(row, name) for name in head] + [row.words.get(word, 0) for word in words]
        writer.writerow([notation.cell(v) for v in (*said, row.reason, row.next_step, row.report)])
    text = json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return [
        _replace(runs_dir / name, made) for name, made in zip(FILES[1:], (text, sheet.getvalue()), strict=True)
    ]


def _replace(target: Path, text: str) -> Path:
    part = target.with_name(f".{target.name}.part")
    part.write_text(text, encoding="utf-8", errors="backslashreplace")  # a folder's name may be no UTF-8
    os.replace(part, target)
    return target
