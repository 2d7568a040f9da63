"""A run folder: its lock, its status, its files. The only writer of it; `run` and `comparison` say what is in it.

`status.json` is the only truth about how a run ended. The runner holds a lock on the folder; a status of
`running` whose lock is free belongs to a runner that died, and reads as `interrupted`.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from llmrepro import credentials, terms
from llmrepro.lines import drop_torn
from llmrepro.markup import showable

if TYPE_CHECKING:  # the sampler, which starts beside every boot, does without
    from pydantic import BaseModel


class RunError(RuntimeError):
    """Something about a run folder or its parameters that a person can mend; the text says how.

    `next_step` is what comes before running again, where a stage ends so.
    """

    def __init__(self, said: str, next_step: str = ""):
        super().__init__(said)
        self.next_step = next_step


class Folder:
    """A run folder, open for writing while this object holds its lock.

    Raises RunError when another live process holds it.
    """

    def __init__(self, path: Path):
        self.path = path
        self._lock = -1
        self.hold()

    def hold(self) -> None:
        """Take the folder's lock, if it is not held already. Raises RunError when another process has it."""
        if self._lock >= 0:
            return
        fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        for _ in range(20):  # `held` takes the lock for a moment to look
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(0.05)
        else:
            os.close(fd)
            raise RunError(f"{self.path} is being written by another process; wait for it, or stop it first")
        self._lock = fd

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __del__(self):
        with contextlib.suppress(Exception):  # the interpreter may be half gone
            self.close()

    # ---- where it stands ---------------------------------------------------------------------------------

    def set_status(self, outcome: str, stage: str, **facts: Any) -> None:
        """Replace status.json. `facts`: `reason` (a sentence), `log_tail`, `next_step`, `stopped_by`."""
        assert outcome in get_args(terms.Outcome) and stage in terms.STAGES
        self.write_json("status.json", {"outcome": outcome, "stage": stage, "at": now(), **facts})

    @contextlib.contextmanager
    def stage(self, name: str):
        """The status follows a stage: running, then stopped or failed with the reason when it raises.

        The folder is held again if an earlier stage let go of it: a stopped cell can simply be run again. What an
        exception says is kept without credentials, in the folder and in the notebook that shows it.
        """
        self.hold()
        self.set_status("running", name)
        try:
            yield self
        except KeyboardInterrupt:
            self._end("stopped", name, stopped_by="person", reason="interrupted by a person")
            raise
        except BaseException as error:
            _without_credentials(error)
            if by := getattr(error, "stopped_by", None):  # it stops a run in order
                self._end("stopped", name, error.next_step, stopped_by=by, reason=str(error))
                raise
            self._end(
                "failed",
                name,
                reason=str(error) or type(error).__name__,
                error=type(error).__name__,
                log_tail=[credentials.without(line) for line in getattr(error, "log_tail", [])],
                next_step=credentials.without(getattr(error, "next_step", "")),
            )
            raise

    def _end(self, outcome: str, stage: str, next_step: str = "", **facts: Any) -> None:
        """The status of a run that did not get to its end, and how to go on; then the folder is let go."""
        measured = any(self.path.glob("records.jsonl")) or any(self.path.glob("arms/*/records.jsonl"))
        on = go_on(self.path) if measured else "run again: nothing was measured yet"
        # On a full disk not even this can be written; the free lock then tells that the run was interrupted.
        with contextlib.suppress(OSError):
            self.set_status(outcome, stage, next_step="; then ".join(s for s in (next_step, on) if s), **facts)
        self.close()

    # ---- files -------------------------------------------------------------------------------------------

    def write_json(self, name: str, value: Any) -> Path:
        return self.write_text(name, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a file whole: readers see the old one or the new one, never half of it."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f".{target.name}.part")
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
        return target

    def append(self, *records: "BaseModel") -> None:
        """Append requests to records.jsonl and flush them to the disk: a SIGKILL loses those in flight."""
        path = self.path / "records.jsonl"
        with open(path, "a+b") as file:
            drop_torn(file)
            file.write(b"".join(r.model_dump_json().encode() + b"\n" for r in records))
            file.flush()
            os.fsync(file.fileno())


def _without_credentials(error: BaseException | None) -> None:
    """Blank them in what an exception says, and in those that led to it: a notebook shows them all."""
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        said = tuple(credentials.without(a) if isinstance(a, str) else a for a in error.args)
        if said != error.args:
            error.args = said
        error = error.__cause__ or error.__context__


def read_json(path: Path) -> Any:
    """A JSON file of a run folder. Raises RunError when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing; is {path.parent} a whole run folder?") from None
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{path} is broken: {error}; restore it, or run again") from None


def read_json_if_there(path: Path) -> dict:
    """As read_json, and {} for a file that no stage has written yet."""
    return read_json(path) if path.exists() else {}


def read_lines(path: Path) -> list[dict]:
    """The JSON lines of records.jsonl. Only a torn last line is forgiven: a kill leaves nothing else.

    Raises RunError naming any other line that is not JSON.
    """
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            raise RunError(
                f"{path}, line {number}: not a record; the file was changed after it was written. "
                "Remove that line if you know why it is broken"
            ) from None
    return found


def status(path: Path, *, page: bool = True) -> dict:
    """status.json of a run folder, with `running` read as `interrupted` when nobody holds the folder.

    So is a finished run without its page, unless that page is just being made (`page=False`). Raises RunError.
    """
    found = read_json(path / "status.json")
    if not isinstance(found, dict) or found.get("outcome") not in get_args(terms.Outcome):
        raise RunError(f"{path / 'status.json'} is broken: it holds no outcome; restore it, or run again")
    found = {name: _shown(value) for name, value in found.items()}
    finished = found["outcome"] in {"completed", "lacking", "imported"}
    if page and finished and not (path / "report.html").exists() and not held(path):
        return {
            **found,
            "outcome": "interrupted",
            "reason": "it ended while its report was written",
            "next_step": f"make the report with `llmrepro report {path}`",
        }
    if found.get("outcome") == "running" and not held(path):
        return {
            **found,
            "outcome": "interrupted",
            "reason": f"the process that ran it ended during {found.get('stage')} without a word",
            "next_step": go_on(path),
        }
    return found


def _shown(value: Any) -> Any:
    """What a server or a tool said of its end, without what a terminal would obey."""
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return showable(value) if isinstance(value, str) else value


def go_on(path: Path) -> str:
    """How to go on with the run or the study's run of a folder, as a sentence."""
    command = "compare" if (path / "study.json").exists() else "run"
    return f"go on with `llmrepro {command} --resume {path}` (in a notebook: resume={str(path)!r})"


def held(path: Path) -> bool:
    """Whether a live process holds the folder's lock."""
    try:
        fd = os.open(path / ".lock", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def sha256_of(path: Path) -> str:
    """Lower-case hex sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def now() -> str:
    """This moment in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def stamp() -> str:
    """This moment as a folder name: 2026-10-10T12-00-00Z."""
    return re.sub(r":", "-", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
