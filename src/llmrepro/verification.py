"""Whether a run folder is what it was: each number on its page made again from its records.

result.json holds the sha256 of the files that it was computed from. The result, the charts and the page are made
once more of a copy and held against those that are there. That finds what was changed in one place and not in all:
who changes the records and makes everything else anew leaves a folder that is whole. It says nothing of who made
it.
"""

import contextlib
import hashlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrepro import (
    __version__,
    confinement,
    deviations,
    folder_copy,
    imported,
    report,
    results,
    run_folder,
    study_results,
)
from llmrepro.folder_copy import RECORDED, Finding, Kind
from llmrepro.markup import showable
from llmrepro.run_folder import RunError, read_json, read_json_if_there, sha256_of

COMPUTES: dict[Kind, Callable[[Path], dict]] = {
    "run": results.compute,
    "study": study_results.compute,
    "imported": imported.compute,
}
MOST_FINDINGS = 50
ENDED = ("completed", "lacking", "imported")
RENDERED_BY = re.compile(r"Rendered by llmrepro ([0-9][\w.+]{0,40})")
GO_ON = re.compile(
    r"--resume [^`<]*`|resume=[^)<]*\)"
)  # the place of a folder, which an interrupted run's page tells


@dataclass(frozen=True)
class Verified:
    """A folder with what was found; `whole` is one of which everything there is could be made again the same."""

    path: Path
    findings: tuple[Finding, ...]

    @property
    def whole(self) -> bool:
        return all(found.only_told for found in self.findings)


def verify(path: Path) -> Verified:
    """Hold a run's, a study's or an import's folder against its own records. Nothing in it is written.

    Whatever is wrong with the folder is a finding.
    """
    return Verified(path, tuple(_findings(path)))


def _findings(path: Path) -> list[Finding]:
    of = folder_copy.kind(path)
    if of is None:
        return [Finding("", "is no run folder: it has no recipe.json, study.json or imported.json; give one")]
    if folder_copy.is_file(path / ".lock") and run_folder.held(path):
        return [Finding("", "is still being written; verify it when its run has ended")]
    with tempfile.TemporaryDirectory(prefix="llmrepro-verify-") as place:
        recorded, made = Path(place, "recorded"), Path(place, "made")
        unread = folder_copy.copy(path, recorded, RECORDED[of])
        if unread:  # nothing could be made of the rest that would say anything
            return unread
        unread = folder_copy.copy(path, made, folder_copy.made_in(of))
        try:
            found = [Finding(*one) for one in confinement.call(findings, str(recorded), str(made), of)]
        except RunError as error:
            found = [Finding("", str(error))]
        left_out = {one.file for one in unread}
        return of_copy(unread + [one for one in found if one.file not in left_out], recorded, path)


def of_copy(found: list[Finding], copied: Path, path: Path) -> list[Finding]:
    """Findings of a copy, told of the folder `path` that was copied, as text that a terminal can show."""
    return [
        Finding(showable(one.file), showable(one.sentence.replace(str(copied), str(path))), one.only_told)
        for one in found
    ]


def renew(folder: Path) -> None:
    """Compute each result.json of a folder anew that is there: of files that the kit itself has changed."""
    for place in (*sorted(p.parent for p in folder.glob("arms/*/result.json")), folder):
        of = folder_copy.kind(place)
        if of is not None and (place / "result.json").exists():
            with contextlib.closing(run_folder.Folder(place)) as run:
                run.write_json("result.json", COMPUTES[of](place))


def findings(recorded: str, made: str, of: Kind) -> list[tuple[str, str, bool]]:
    """The findings of a copied folder: `recorded` holds what it is computed from, where all that is made of it is
    made again, and `made` what was made of it before."""
    folder, there = Path(recorded), Path(made)
    found = list(of_results(folder, there, of))
    broken = any(one.file == "" and not one.only_told for one in found)
    found += [] if broken else _of_pages(folder, there, of)
    found = list(dict.fromkeys(found))  # a study tells of an arm's file, and so does the arm
    if len(found) > MOST_FINDINGS:
        found[MOST_FINDINGS:] = [Finding("", f"has {len(found) - MOST_FINDINGS:,} findings more")]
    return [(one.file, one.sentence, one.only_told) for one in found]


def of_results(folder: Path, there: Path, of: Kind) -> Iterator[Finding]:
    """Hold the result.json files below `there` against the recorded files in `folder`, and write those anew that
    these give. What cannot be computed is a finding of no file."""
    inner = sorted(p.name for p in (folder / "arms").glob("*")) if of == "study" else []
    for below, compute in [*((f"arms/{arm}/", results.compute) for arm in inner), ("", COMPUTES[of])]:
        yield from _of_result(folder, there, below, compute)


def _of_result(folder: Path, there: Path, below: str, compute: Callable[[Path], dict]) -> Iterator[Finding]:
    place = folder / below
    yield from _of_texts(place, below)
    earlier = _result(there / f"{below}result.json")
    name = f"{below}result.json"
    changed = list(_changed(folder, below, earlier)) if isinstance(earlier, dict) else []
    yield from changed
    try:
        told, status = _as_json(compute(place)), run_folder.status(place, page=False)
    except Exception as error:  # of which a folder that was changed by hand can raise any
        yield Finding("", confinement.sentence(error))
        return
    (place / "result.json").write_text(_text(told), encoding="utf-8")
    if status["outcome"] == "interrupted":
        yield Finding(f"{below}status.json", "says running, and nobody runs it: it was interrupted", True)
    if earlier is None and below:  # runs that were compared as they are have none
        return
    if earlier is None and status["outcome"] in ENDED:
        yield Finding(name, f"is missing, though the run is {status['outcome']}")
    elif earlier is None:
        yield Finding(name, f"is not there: the run is {status['outcome']} and may not have got so far", True)
    elif isinstance(earlier, str):
        yield Finding(name, earlier)
    else:
        new = sorted(set(told["inputs"]) - set(earlier.get("inputs") or {})) if not changed else []
        yield from (Finding(f"{below}{one}", "is new: result.json was computed without it") for one in new)
        yield from _deviating(place, below, earlier, told, status, compute, bool(changed or new))


def _deviating(
    place: Path, below: str, earlier: dict, told: dict, status: dict, compute: Callable, changed: bool
) -> Iterator[Finding]:
    name = f"{below}result.json"
    differs = _differs(earlier, told)
    if not differs:
        return
    if status["outcome"] not in ENDED and not _differs(earlier, _before_the_end(place, compute)):
        yield Finding(name, f"was computed before the run ended as {status['outcome']}", True)
        return
    ran = read_json_if_there(place / "machine.json").get("llmrepro")
    if changed:
        yield Finding(name, f"is not of the files as they are now: {differs}")
    elif isinstance(ran, str) and ran != __version__:
        yield Finding(
            name,
            f"is computed otherwise by this version, llmrepro {__version__}, than by {ran[:40]}, which made the "
            f"run: {differs}",
        )
    else:
        yield Finding(
            name,
            f"is not what its records give, which are as they were: {differs}. It was changed itself, or a file "
            "that it holds no sha256 of was (status.json, environment.json, engine-freeze.txt), or other code "
            f"than this llmrepro {__version__} computed it",
        )


def _before_the_end(place: Path, compute: Callable[[Path], dict]) -> dict:
    """The result of a folder as it is computed in the stage `results`, when nobody knows how the run will end."""
    file = place / "status.json"
    kept = file.read_bytes()
    try:
        file.write_text(_text({**json.loads(kept), "outcome": "completed"}), encoding="utf-8")
        return _as_json(compute(place))
    finally:
        file.write_bytes(kept)


def _differs(earlier: dict, told: dict) -> str:
    return deviations.of_results(*({k: v for k, v in one.items() if k != "inputs"} for one in (earlier, told)))


def _result(path: Path) -> dict | str | None:
    """A result.json; why it is none, or None where it is not there."""
    if not path.exists():
        return None
    try:
        found = read_json(path)
    except RunError as error:
        return f"is broken: {str(error).partition('is broken: ')[2]}"
    inputs = found.get("inputs") if isinstance(found, dict) else None
    if not isinstance(inputs, dict):
        return "is not as the kit writes it: it does not tell what it was computed from"
    return found


def _changed(folder: Path, below: str, earlier: dict) -> Iterator[Finding]:
    """The files that are not as they were when a result was computed from them."""
    there = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    for name, digest in earlier["inputs"].items():
        path = f"{below}{name}"
        if path not in there:
            yield Finding(path[:200], "is missing, and result.json was computed from it")
        elif (now := sha256_of(there[path])) != digest:
            yield Finding(
                path,
                f"was changed after result.json was computed from it: its sha256 is {now[:12]}…, and was "
                f"{str(digest)[:12]}…",
            )


def _of_texts(place: Path, below: str) -> Iterator[Finding]:
    """Prompts are kept by the sha256 of their text."""
    try:
        kept = read_json_if_there(place / "prompts.json")
        wrong = [
            sha256 for sha256, text in kept.items() if hashlib.sha256(str(text).encode()).hexdigest() != sha256
        ]
    except (RunError, AttributeError, UnicodeEncodeError):
        yield Finding(f"{below}prompts.json", "is broken; restore it")
        return
    if wrong:
        yield Finding(f"{below}prompts.json", f"was changed: a text has not the sha256 {str(wrong[0])[:12]}…")


def _of_pages(folder: Path, there: Path, of: Kind) -> Iterator[Finding]:
    """Hold the pages and charts below `there` against those that are made in `folder` now."""
    try:
        report.write(folder)
    except Exception as error:  # as above
        yield Finding("", confinement.sentence(error))
        return
    for page in sorted(folder.rglob("report.html")):
        below = page.parent.relative_to(folder).as_posix()
        below = "" if below == "." else f"{below}/"
        if not (there / below / "report.html").exists():
            yield Finding(f"{below}report.html", "is not there; `llmrepro report` makes it", True)
        else:
            yield from _of_page(page, there, below)
        if (there / below / "figures").exists():
            yield from _of_charts(page.parent / "figures", there / below / "figures", f"{below}figures/")


def _of_page(page: Path, there: Path, below: str) -> Iterator[Finding]:
    name = f"{below}report.html"
    text, wanted = (p.read_text(encoding="utf-8", errors="replace") for p in (there / name, page))
    if read_json(page.parent / "status.json")["outcome"] == "running":
        text, wanted = (GO_ON.sub("", one) for one in (text, wanted))
    differs = deviations.of_pages(text, wanted)
    if not differs:
        return
    by = RENDERED_BY.search(text)
    if by and by[1].rstrip(".") != __version__:
        yield Finding(
            name,
            f"is rendered otherwise by this version, llmrepro {__version__}, than by {by[1].rstrip('.')}; "
            "`llmrepro report` makes it anew",
        )
    else:
        yield Finding(
            name,
            f"is not the page of this folder: {differs}. It was changed after it was made, or made by other code "
            f"than this llmrepro {__version__} and its libraries; `llmrepro report` makes it anew",
        )


def _of_charts(drawn: Path, there: Path, below: str) -> Iterator[Finding]:
    names = {p.name for p in drawn.glob("*") if p.suffix in (".csv", ".txt", ".svg")}
    for name in sorted(names):
        if not (there / name).exists():
            yield Finding(f"{below}{name}", "is not there; `llmrepro report` draws it", True)
        elif (there / name).read_bytes() != (drawn / name).read_bytes():
            text, wanted = ((p / name).read_text(encoding="utf-8", errors="replace") for p in (there, drawn))
            differs = deviations.of_tables(text, wanted) if name.endswith(".csv") else _OTHERWISE[name[-3:]]
            if differs:
                yield Finding(f"{below}{name}", f"is not what the records give: {differs}")
    for name in sorted({p.name for p in there.glob("*")} - names):
        yield Finding(f"{below}{name}", "is no chart that the records give")


_OTHERWISE = {
    "svg": "it is drawn otherwise, by hand or by another Matplotlib than this machine's",
    "txt": "its words are others",
}


def _as_json(value: dict) -> dict:
    return json.loads(json.dumps(value))


def _text(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
