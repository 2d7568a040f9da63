"""The run folder: what a run was asked, where it stands, and everything it measured. The only writer of it.

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
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from llmrepro import catalog, terms
from llmrepro import recipe as recipes
from llmrepro.recipe import Recipe


class RunError(RuntimeError):
    """Something about a run folder or its parameters that a person can mend; the text says how."""


class Parameters(BaseModel):
    """The parameters cell of the notebooks. Types are not guessed: papermill's `-p` turns 007 into 7."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    recipe: str = Field(catalog.DEFAULT, description="id, or path of a recipe.json")
    mode: terms.Mode = Field("auto", description="auto | live | published")
    profile: terms.Profile = Field("quick", description="quick | full")
    repeats: int | None = Field(None, ge=1, le=1000, description="rounds per workload; None: the recipe's")
    servers: list[str] | None = Field(None, description="server ids; None: all of the recipe's")
    resume: str | None = Field(None, description="a run folder to go on with")
    runs_dir: str | None = Field(None, description="where run folders go; None: runs/ of the project")
    weights_path: str | None = Field(None, description="your own copy of the weights file")
    trust: bool = Field(False, description="install what a recipe from elsewhere names")
    overrides: dict[str, Any] = Field({}, description="dotted path in the recipe: value")


LISTS = " Lists and mappings are written as YAML, [default] or {a.b: 1}; with papermill give them with -y"
WRITTEN = {
    "list_type": LISTS,
    "dict_type": LISTS,
    "string_type": " With papermill use -r for text that looks like a number",
    "int_type": " With papermill use -p, and no quotes",
    "bool_type": " With papermill use -p, and no quotes",
}


def parameters(values: dict[str, Any]) -> Parameters:
    """Checked parameters. Raises RunError naming the parameter, what it was, and what would do."""
    unknown = sorted(set(values) - set(Parameters.model_fields))
    if unknown:
        raise RunError(
            f"no parameter is called {unknown[0]!r}; {terms.nearest(unknown[0], Parameters.model_fields)}"
        )
    try:
        return Parameters.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise RunError(
            f"parameter {name}: {first['msg']}, found {first['input']!r}; "
            f"it is: {Parameters.model_fields[name].description}.{WRITTEN.get(first['type'], '')}"
        ) from None


def resolved(recipe: Recipe, params: Parameters) -> Recipe:
    """The recipe as it will be run: overrides applied, repeats set. Raises RunError."""
    data = json.loads(recipe.model_dump_json(by_alias=True, exclude_unset=True))
    for path, value in params.overrides.items():
        _override(data, path.split("."), value, path)
    try:
        changed = recipes.validated(
            data, f"{recipe.id} with overrides {', '.join(params.overrides)}" if params.overrides else recipe.id
        )
    except recipes.RecipeError as error:
        raise RunError(str(error)) from None
    known = [s.id for s in changed.servers]
    for name in params.servers or []:
        if name not in known:
            raise RunError(f"{recipe.id} has no server {name!r}; {terms.nearest(name, known)}")
    if params.repeats is None:
        return changed
    return changed.model_copy(
        update={"workloads": [w.model_copy(update={"repeats": params.repeats}) for w in changed.workloads]}
    )


def _override(node, keys: list[str], value, path: str) -> None:
    for key in keys[:-1]:
        node = _step(node, key, path)
    last = keys[-1]
    if isinstance(node, list):
        node[node.index(_step(node, last, path))] = value
    elif isinstance(node, dict):
        node[last] = value
    else:
        raise RunError(
            f"override {path!r}: nothing lies below {'.'.join(keys[:-1])}; give a path into recipe.json"
        )


def _step(node, key: str, path: str):
    if isinstance(node, list):  # by position, or by the `id` that an entry carries
        found = [n for i, n in enumerate(node) if str(i) == key or (isinstance(n, dict) and n.get("id") == key)]
        known = [n["id"] if isinstance(n, dict) and "id" in n else str(i) for i, n in enumerate(node)]
        if not found:
            raise RunError(f"override {path!r}: no entry {key!r}; {terms.nearest(key, known)}")
        return found[0]
    if isinstance(node, dict):
        if key not in node:
            raise RunError(f"override {path!r}: no key {key!r}; {terms.nearest(key, node)}")
        return node[key]
    raise RunError(f"override {path!r}: nothing lies below {key!r}; give a path into recipe.json")


class Run:
    """One run folder, open for writing while this object holds its lock.

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

    # ---- what it was asked -------------------------------------------------------------------------------

    @property
    def parameters(self) -> Parameters:
        return Parameters.model_validate(read_json(self.path / "parameters.json"))

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.path)

    # ---- where it stands ---------------------------------------------------------------------------------

    def set_status(self, outcome: str, stage: str, **facts: Any) -> None:
        """Replace status.json. `facts`: `reason` (a sentence), `log_tail`, `next_step`, `stopped_by`."""
        assert outcome in get_args(terms.Outcome) and stage in terms.STAGES
        self.write_json("status.json", {"outcome": outcome, "stage": stage, "at": now(), **facts})

    @contextlib.contextmanager
    def stage(self, name: str):
        """The status follows a stage: running, then stopped or failed with the reason when it raises.

        The folder is held again if an earlier stage let go of it: a stopped cell can simply be run again.
        """
        self.hold()
        self.set_status("running", name)
        try:
            yield self
        except KeyboardInterrupt:
            self._end("stopped", name, stopped_by="person", reason="interrupted by a person")
            raise
        except BaseException as error:
            self._end(
                "failed",
                name,
                reason=str(error) or type(error).__name__,
                error=type(error).__name__,
                log_tail=list(getattr(error, "log_tail", [])),
                next_step=getattr(error, "next_step", ""),
            )
            raise

    def _end(self, outcome: str, stage: str, next_step: str = "", **facts: Any) -> None:
        """The status of a run that did not get to its end, and how to go on; then the folder is let go."""
        if (self.path / "records.jsonl").exists():
            on = f"go on with `llmrepro run --resume {self.path}` (in a notebook: resume={str(self.path)!r})"
        else:
            on = "run again: nothing was measured yet"
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

    def append(self, record: BaseModel) -> None:
        """Append one request to records.jsonl and flush it to the disk: a SIGKILL loses the one in flight."""
        path = self.path / "records.jsonl"
        with open(path, "a+b") as file:
            _drop_torn_line(file)
            file.write(record.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _drop_torn_line(file) -> None:
    """Cut off what a kill left behind the last newline: half a record is no record."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return
    file.seek(size - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def create(params: Parameters) -> Run:
    """A new run folder `<runs_dir>/<recipe id>/<UTC time>/`, or the one to resume. Raises RunError."""
    if params.resume is not None:
        return _resumed(params)
    committed = catalog.load(params.recipe)
    recipe = resolved(committed, params)
    folder = catalog.path_of(params.recipe).parent
    _trusted(recipe, params, folder)
    params = params.model_copy(update=_from_anywhere(params, folder))
    base = Path(params.runs_dir).expanduser().resolve() if params.runs_dir else catalog.home().parent / "runs"
    for attempt in range(100):
        path = base / recipe.id / (stamp() + (f"-{attempt}" if attempt else ""))
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"cannot make a run folder under {base}: {error}; give another runs_dir") from None
    run = Run(path)
    run.write_json("parameters.json", params.model_dump())
    for name, one in (("recipe.committed.json", committed), ("recipe.json", recipe)):
        run.write_text(name, one.model_dump_json(by_alias=True, exclude_unset=True, indent=1) + "\n")
    texts = {p.sha256: catalog.prompt_text(p, folder) for p in recipes.prompts(recipe) if p.file is not None}
    run.write_json("prompts.json", texts)
    run.set_status("running", "card")
    return run


def _trusted(recipe: Recipe, params: Parameters, folder: Path) -> None:
    """A recipe chooses code that runs as the user: one from elsewhere is shown, and waits for a yes."""
    if folder.is_relative_to(catalog.home()) or params.trust or params.mode == "published":
        return
    pins = ", ".join(f"{n} {v}" for n, v in recipe.engine.install.pins.items())
    raise RunError(
        f"{recipe.id} comes from {folder}, not from this kit, and installing it runs code that it names: {pins} "
        f"({recipe.engine.install.kind}), hashes in {folder}/engine.lock; weights {recipe.model.repo} "
        f"{recipe.model.revision}. Read these, then give --trust (in a notebook: trust=True), or only look with "
        "mode published"
    )


def _from_anywhere(params: Parameters, folder: Path) -> dict[str, str]:
    """The paths among the parameters, made whole: a run is gone on with from any folder."""
    paths = {} if params.recipe in catalog.ids() else {"recipe": str(folder / catalog.path_of(params.recipe).name)}
    if params.weights_path is not None:
        paths["weights_path"] = str(Path(params.weights_path).expanduser().resolve())
    return paths


def _resumed(params: Parameters) -> Run:
    path = Path(params.resume).expanduser().resolve()
    if not (path / "recipe.json").is_file():
        raise RunError(f"resume: {path} is no run folder (it has no recipe.json); give the folder that a run made")
    try:
        was = Parameters.model_validate(read_json(path / "parameters.json"))
    except ValidationError:
        raise RunError(f"{path}/parameters.json is not of this version of the kit; start a new run") from None
    asked = params.model_dump(exclude_defaults=True, exclude={"resume"})
    differs = [n for n, v in asked.items() if getattr(was, n) != v and n not in {"trust", "runs_dir"}]
    if differs:
        raise RunError(
            f"resume: {differs[0]} was {getattr(was, differs[0])!r} in {path} and is now "
            f"{asked[differs[0]]!r}; leave it as it was, or start a new run"
        )
    committed = resolved(catalog.load(was.recipe), was)
    if committed != load_recipe(path):
        raise RunError(
            f"resume: the recipe {committed.id} has changed since {path} was begun, so its records "
            "cannot be mixed with new ones; start a new run"
        )
    trusting = was.model_copy(update={"trust": was.trust or params.trust})
    _trusted(committed, trusting, catalog.path_of(was.recipe).parent)
    run = Run(path)
    if params.trust and not was.trust:
        run.write_json("parameters.json", trusting.model_dump())
    run.set_status("running", "card")
    return run


def load_recipe(path: Path, name: str = "recipe.json") -> Recipe:
    """The resolved recipe of a run folder, or the committed one (`recipe.committed.json`)."""
    return recipes.validated(read_json(path / name), str(path / name))


def read_json(path: Path) -> Any:
    """A JSON file of a run folder. Raises RunError when it is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} is missing; is {path.parent} a whole run folder?") from None
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{path} is broken: {error}; restore it, or run again") from None


def boots(path: Path) -> dict[int, dict]:
    """boots/<n>.json of a run folder by number, in order."""
    numbers = sorted(int(p.stem) for p in (path / "boots").glob("*.json") if p.stem.isdigit())
    return {n: read_json(path / "boots" / f"{n}.json") for n in numbers}


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
    finished = found["outcome"] in {"completed", "lacking"}
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
            "next_step": f"go on with `llmrepro run --resume {path}` (in a notebook: resume={str(path)!r})",
        }
    return found


def held(path: Path) -> bool:
    """Whether a live process holds the folder's lock."""
    try:
        fd = os.open(path / ".lock", os.O_RDWR)
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
