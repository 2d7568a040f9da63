"""An engine's own environment: isolated, built once from its hashed lock, never changed afterwards.

It is keyed by all that decides what is in it, built under another name and moved into place when complete:
a killed installation leaves nothing that a later run would trust.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field
from pathlib import Path

import uv

from llmrepro import containers, contents, engines, fixes, installation, machine, processor
from llmrepro.install import Engine
from llmrepro.installation import EnvironmentFailure, plain_environment
from llmrepro.progress import Progress

PIN = re.compile(  # name[extras]==version ; marker --hash=sha256:…
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._ -]+\])?==[A-Za-z0-9.+!_-]+\s*(;(?:(?!--|#|://).)*)?"
    r"(\s+--hash=sha256:[0-9a-f]{64})+"
)
RECIPE_OF_BUILD = 3  # raise it when the steps below change what they make


@dataclass(frozen=True)
class Environment:
    path: Path
    key: str
    freeze: str  # `name==version` lines, as installed
    seconds: float  # that its building took; 0.0 when it was there already
    fixes: list[dict] = field(default_factory=list)  # {name, needed, applied, why, evidence, exports}, in order

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def exports(self) -> dict[str, str]:
        """What the engine is started with; `fixes.exported` fills in {environment} and {PATH}."""
        return {name: value for fix in self.fixes for name, value in fix["exports"].items()}


def prepare(engine: Engine, lock: Path, log: Path, cache: Path | None = None) -> Environment:
    """The environment of an engine: reused when complete and unchanged, else built. `log` gets every tool's
    output. Raises EnvironmentFailure.
    """
    if engine.install.kind == "container":
        return _of_image(engine, log, cache)
    python = _usable(engine, lock)
    place = _place(engine, lock, python, cache)
    key = place.name
    _make_room(place)
    with locked(place.with_suffix(".lock")) as held:
        found = complete(place, engine)
        if found is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"environment {key} was there already, complete and unchanged\n", encoding="utf-8")
            return found
        part, old = place.with_suffix(".part"), place.with_suffix(".old")
        for left_over in (part, old):
            _remove(left_over)
        start = time.monotonic()
        told = _build(engine, lock, python, part, place, log, held)
        told = {"key": key, **told, "seconds": round(time.monotonic() - start, 1)}
        (part / ".complete").write_text(json.dumps(told))
        if place.is_symlink() or place.exists():  # changed by somebody: kept until the new one is whole
            os.rename(place, old)
        os.rename(part, place)
        _remove(old)
        return _environment(place, engine, told, told["seconds"])


def _make_room(place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the cache folder cannot be written: {error}", next_step="name another in LLMREPRO_CACHE"
        ) from None


def _of_image(engine: Engine, log: Path, cache: Path | None) -> Environment:
    """The environment of an image: a folder that says what was pulled and by what. It needs no lock."""
    if engine.fixes:
        raise EnvironmentFailure(
            "the engine is an image, and a fix would make another one of it",
            next_step="take the fixes out of the recipe, or pin an image that has them",
        )
    place = place_of(engine, Path(), cache)
    _make_room(place)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    with locked(place.with_suffix(".lock")) as held, Progress("image", 100) as bar:
        step = installation.Steps(log, bar, held, place.parent.parent)
        pulled_s = []

        def pull(argv: list[str]) -> str | None:
            began, start = log.stat().st_size, time.monotonic()
            try:
                step(argv, "pull")
            except EnvironmentFailure:
                return log.read_bytes()[began:].decode(errors="replace")
            pulled_s.append(round(time.monotonic() - start, 1))
            return None

        try:
            told = containers.prepare(containers.find(), engine.install.container, place, pull)
        except containers.ContainerFailure as failure:
            raise EnvironmentFailure(failure.found, next_step=failure.next_step) from None
        step.say(f"# {json.dumps(told)}" + ("" if pulled_s else ", here already"))
        bar.to(100, "done")
        return _image_environment(place, told, *pulled_s)


def _image_environment(place: Path, told: dict, seconds: float = 0.0) -> Environment:
    freeze = f"{told['image']}  # {told['name']} {told['version']}, image id {told['image_id']}\n"
    return Environment(place, place.name, freeze, seconds)


def place_of(engine: Engine, lock: Path, cache: Path | None = None) -> Path:
    """Where `prepare` has an engine's environment, there or not. Raises EnvironmentFailure when it could not be
    built: a lock that is missing or holds more than pins, a Python that is not here, no podman and no docker.
    """
    if engine.install.kind == "container":
        try:
            decides = [containers.find().path, engine.install.container.image, RECIPE_OF_BUILD]
        except containers.ContainerFailure as failure:
            raise EnvironmentFailure(failure.found, next_step=failure.next_step) from None
        key = hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]
        return (cache or machine.cache_dir()) / "environments" / key
    return _place(engine, lock, _usable(engine, lock), cache)


def _usable(engine: Engine, lock: Path) -> Path:
    """The interpreter for an engine whose lock can be used."""
    if not lock.is_file():
        raise EnvironmentFailure(
            f"{lock} is missing, and no engine is installed without a hashed lock",
            next_step="restore it, or make it beside engine.in with `uv pip compile --universal --generate-hashes "
            "engine.in -o engine.lock`",
        )
    for one in (lock, *_overlays(engine, lock)):
        _checked(one)
    return interpreter(engine.install.python)


def _place(engine: Engine, lock: Path, python: Path, cache: Path | None) -> Path:
    return (cache or machine.cache_dir()) / "environments" / key_of(engine, lock, python)


def _overlays(engine: Engine, lock: Path) -> list[Path]:
    """The locks of fixes, which lie beside the engine's. Raises EnvironmentFailure when one is missing."""
    found = [lock.parent / fix.lock for fix in engine.fixes if fix.lock is not None]
    for one in found:
        if not one.is_file():
            raise EnvironmentFailure(
                f"{one} is missing, and a fix of {engine.name} installs it", next_step="restore it"
            )
    return found


def key_of(engine: Engine, lock: Path, python: Path) -> str:
    """16 hex digits over everything that decides what the environment holds."""
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
    )
    decides = {
        "lock": hashlib.sha256(lock.read_bytes()).hexdigest(),
        "python": version.stdout.strip(),
        "platform": sysconfig.get_platform(),
        "libc": platform.libc_ver(),
        # what a recipe leaves at its default decides nothing: a field that a later kit adds changes no key
        "fixes": [f.model_dump(mode="json", exclude_defaults=True) for f in engine.fixes],
        "laid_over": [hashlib.sha256(other.read_bytes()).hexdigest() for other in _overlays(engine, lock)],
        "install": engine.install.model_dump(mode="json", exclude_defaults=True),
        "steps": RECIPE_OF_BUILD,
    }
    if engine.install.kind in ("sdist", "git"):  # built for the very CPU it is built on
        decides["cpu"] = processor.model()
        decides |= _toolchain(engine)
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _toolchain(engine: Engine) -> dict[str, str]:
    """What of this machine decides what a build makes, beside its CPU. Raises EnvironmentFailure without it."""
    told = getattr(engines.load(engine.name), "toolchain", None)
    try:
        return told(engine.install) if told else {}
    except engines.EngineError as error:
        raise EnvironmentFailure(str(error), next_step="install that, then run again") from None


def _remove(path: Path) -> None:
    """Take away whatever stands there: a folder, a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def pins(lock: Path) -> dict[str, str]:
    """The packages of a lock with their versions."""
    found = re.findall(
        r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", lock.read_text(encoding="utf-8"), re.MULTILINE
    )
    return dict(found)


def _checked(lock: Path) -> None:
    """Raises EnvironmentFailure when a lock holds more than pins and hashes: it may not choose where from."""
    try:
        text = lock.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EnvironmentFailure(f"{lock} is not UTF-8 ({error.reason})", next_step="restore it") from None
    if hiding := re.search(r"(?m)^\s*#.*\\$", text):  # to uv its next line is no comment
        raise EnvironmentFailure(
            f"{lock} holds {hiding[0][:200]!r}, a comment that goes on behind its backslash",
            next_step="make it again with `uv pip compile --universal --generate-hashes`",
        )
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line and not line.startswith("#") and not PIN.fullmatch(line) and line != "--only-binary :all:":
            raise EnvironmentFailure(
                f"{lock} holds {line[:200]!r}, and only `name==version` with hashes is installed",
                next_step="make it again with `uv pip compile --universal --generate-hashes`",
            )


def _build(engine: Engine, lock: Path, python: Path, part: Path, place: Path, log: Path, held: int) -> dict:
    """Everything from nothing to what the marker says: packages, programs, fixes."""
    what = [*(c.name for c in engine.install.checkouts), *(f"{n} {v}" for n, v in engine.install.pins.items())]
    log.parent.mkdir(parents=True, exist_ok=True)
    cache = place.parent.parent
    with Progress(f"install {', '.join(what)}", 100) as bar:
        step = installation.Steps(log, bar, held, cache)
        found = installation.fill(engine, lock, python, part, step, _changed(place))
        for program in engines.load(engine.name).programs(engine.install):
            if not (part / program).exists():
                raise EnvironmentFailure(f"{engine.name} was installed but {program} is not there", log)
        told = {"freeze": _freeze(part), "fixes": _repair(engine, part, lock.parent, cache, step)}
        told["files"] = contents.digest(contents.files(part) if engine.fixes else found)
        bar.to(100, "done")
    return told


def _changed(place: Path) -> dict[str, str]:
    """The packages that somebody changed in the environment that gives way to a new one."""
    try:
        return contents.altered(place, contents.files(place))
    except (OSError, ValueError):  # nothing there, or nothing that was ever an environment
        return {}


def _repair(engine: Engine, part: Path, beside: Path, cache: Path, step) -> list[dict]:
    made = []
    for fix in engine.fixes:
        step.bar.to(99, f"fix {fix.name}")
        if fix.lock is not None:
            step(installation.overlay_command(beside / fix.lock, part), f"packages of {fix.name}")
        try:
            made.append(fixes.repair(part, fix, beside, cache))
        except fixes.FixFailure as failure:
            step.say(f"# fix {fix.name} failed: {failure}; {failure.next_step}")
            raise EnvironmentFailure(
                f"the fix {fix.name} failed: {failure}", next_step=failure.next_step
            ) from None
        if fix.lock is not None:
            made[-1]["laid_over"] = pins(beside / fix.lock)
        step.say(f"# fix {fix.name}: {json.dumps(made[-1])}")
    return made


def complete(place: Path, engine: Engine) -> Environment | None:
    """The environment at a place when it is whole and still holds what was installed, else None: it is built
    anew at its next use."""
    if engine.install.kind == "container":
        told = containers.facts(place)
        here = told and containers.image_id(containers.runtime_of(place), told["image"])
        return _image_environment(place, told) if here and here == told["image_id"] else None
    try:
        told = json.loads((place / ".complete").read_text())
        found = _environment(place, engine, told, 0.0)
        digest = told["files"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    programs = engines.load(engine.name).programs(engine.install)
    whole = all((place / p).exists() for p in [*programs, "bin/python"])
    if place.is_symlink() or not whole or digest != contents.digest(contents.files(place)):
        return None  # somebody changed it: it is built anew
    return found


def _environment(place: Path, engine: Engine, told: dict, seconds: float) -> Environment:
    freeze = _with_source(engine, told["freeze"])
    return Environment(place, place.name, freeze, seconds, told["fixes"])


def _freeze(place: Path) -> str:
    shown = subprocess.run(
        [uv.find_uv_bin(), "pip", "freeze", "--python", str(place / "bin/python")],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=plain_environment(),
    )
    if shown.returncode != 0:
        raise EnvironmentFailure(
            f"{place} could not be checked: {shown.stderr.strip()[-300:]}", next_step="mend that, then run again"
        )
    return shown.stdout


def _with_source(engine: Engine, freeze: str) -> str:
    freeze += "".join(f"{c.name} @ git+{c.repo}@{c.commit}\n" for c in engine.install.checkouts)
    if engine.install.kind != "sdist":
        return freeze
    return freeze + "".join(
        f"{name}=={version}  # built from source, sha256 {engine.install.sha256}\n"
        for name, version in engine.install.pins.items()
    )


def interpreter(wanted: str | None) -> Path:
    """The Python an environment is made with: the notebook's own, or an installed one of a pinned version.

    Raises EnvironmentFailure when that version is not here.
    """
    found = Path(sys.executable) if wanted is None else _installed(wanted)
    if found is None:
        raise EnvironmentFailure(
            f"this engine needs Python {wanted} and none is installed here",
            next_step="install it (with your system's packages, pyenv or conda)",
        )
    return found


@functools.cache
def _installed(wanted: str) -> Path | None:
    """An installed Python of a version, or None; looked for once, until `look_again`: it takes up to a second."""
    found = subprocess.run(
        [uv.find_uv_bin(), "python", "find", "--no-project", wanted],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",  # it asks the Python of a .venv where it is started, which may be a stranger's folder
        env=plain_environment(),
    )
    return Path(found.stdout.strip()) if found.returncode == 0 else None


def look_again() -> None:
    """Forget which Pythons are here: one may have been installed since, or taken away."""
    _installed.cache_clear()


@contextlib.contextmanager
def locked(path: Path):
    """Hold a lock file, its descriptor given: two notebooks that need one environment build it once."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is making what is needed here; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
