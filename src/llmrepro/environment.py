"""An engine's own environment: isolated, built once from its hashed lock, never changed afterwards.

It is keyed by all that decides what is in it, built under another name and moved into place when complete:
a killed installation leaves nothing that a later run would trust.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

import uv

from llmrepro import engines, machine, package_index
from llmrepro.progress import Progress
from llmrepro.recipe import Engine

TICK_S = 0.5
RECIPE_OF_BUILD = 2  # raise it when the steps below change what they make


class EnvironmentFailure(RuntimeError):
    """An environment that could not be built; `log_tail` is how its log ended, `next_step` what to do."""

    def __init__(self, message: str, log: Path | None = None, next_step: str = ""):
        self.log_tail = log.read_text(errors="replace").splitlines()[-15:] if log and log.exists() else []
        self.next_step = next_step or (f"read {log}" if log else "")
        tail = "".join(f"\n    {line}" for line in self.log_tail)
        super().__init__(f"{message}; {self.next_step}{tail}")


@dataclass(frozen=True)
class Environment:
    path: Path
    key: str
    freeze: str  # `name==version` lines, as installed
    seconds: float  # that its building took; 0.0 when it was there already

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"


def prepare(engine: Engine, lock: Path, log: Path, cache: Path | None = None) -> Environment:
    """The environment of an engine: reused when complete and unchanged, else built. `log` gets every tool's
    output. Raises EnvironmentFailure.
    """
    if not lock.is_file():
        raise EnvironmentFailure(
            f"{lock} is missing, and no engine is installed without a hashed lock",
            next_step="restore it, or make it beside engine.in with `uv pip compile --universal --generate-hashes "
            "engine.in -o engine.lock`",
        )
    _checked(lock)
    python = _interpreter(engine.install.python)
    key = key_of(engine, lock, python)
    place = (cache or machine.cache_dir()) / "environments" / key
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the cache folder cannot be written: {error}", next_step="name another in LLMREPRO_CACHE"
        ) from None
    with _locked(place.with_suffix(".lock")) as held:
        found = _complete(place, engine)
        if found is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"environment {key} was there already, complete and unchanged\n", encoding="utf-8")
            return found
        part, old = place.with_suffix(".part"), place.with_suffix(".old")
        for left_over in (part, old):
            _remove(left_over)
        start = time.monotonic()
        _build(engine, lock, python, part, log, held)
        for program in engines.load(engine.name).programs(engine.install):
            if not (part / program).exists():
                raise EnvironmentFailure(f"{engine.name} was installed but {program} is not there", log)
        freeze = _freeze(part)
        seconds = round(time.monotonic() - start, 1)
        marker = {"key": key, "freeze": freeze, "files": _files(part), "seconds": seconds}
        (part / ".complete").write_text(json.dumps(marker))
        if place.is_symlink() or place.exists():  # changed by somebody: kept until the new one is whole
            os.rename(place, old)
        os.rename(part, place)
        _remove(old)
        return Environment(place, key, _with_source(engine, freeze), seconds)


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
        "fixes": engine.fixes,
        "install": engine.install.model_dump(mode="json"),
        "steps": RECIPE_OF_BUILD,
    }
    if engine.install.kind == "sdist":  # built for the very CPU it is built on
        decides["cpu"] = machine.describe(Path("/"))["cpu"]["model"]
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def _remove(path: Path) -> None:
    """Take away whatever stands there: a folder, a file, a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _checked(lock: Path) -> None:
    """Raises EnvironmentFailure when a lock holds more than pins and hashes: it may not choose where from."""
    for line in lock.read_text(encoding="utf-8").splitlines():
        words = line.strip().rstrip("\\").split()
        if not words or words[0].startswith("#"):
            continue
        option = words[0].startswith("-") and not words[0].startswith(("--hash=", "--only-binary", "--no-binary"))
        if option or (not words[0].startswith("-") and "==" not in words[0]):
            raise EnvironmentFailure(
                f"{lock} holds {line.strip()!r}, and only `name==version` with hashes is installed",
                next_step="make it again with `uv pip compile --universal --generate-hashes`",
            )


def _build(engine: Engine, lock: Path, python: Path, part: Path, log: Path, held: int) -> None:
    pins = ", ".join(f"{n} {v}" for n, v in engine.install.pins.items())
    log.parent.mkdir(parents=True, exist_ok=True)
    with Progress(f"install {pins}", 100) as bar:
        step = _Steps(log, bar, held)
        # relocatable: it is moved into place, and its scripts must not name the place it was built in
        step([uv.find_uv_bin(), "venv", "--relocatable", "--python", str(python), str(part)], "environment")
        options = ["--require-hashes", "--only-binary", ":all:", "--compile-bytecode"]
        step(
            [uv.find_uv_bin(), "pip", "sync", *options, "--python", str(part / "bin/python"), str(lock)],
            "packages",
        )
        if engine.install.kind == "sdist":
            _build_source(engine, part, step)
        bar.to(100, "done")


def _build_source(engine: Engine, part: Path, step) -> None:
    ((name, version),) = engine.install.pins.items()
    folder = part / "source"
    folder.mkdir()
    try:
        archive = package_index.download(
            f"{name}=={version}",
            folder,
            kind="sdist",
            sha256=engine.install.sha256,
            progress=lambda done, total: step.bar.to(0, "source"),
        )
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except (package_index.PackageIndexError, tarfile.TarError, OSError) as error:
        raise EnvironmentFailure(str(error), step.log) from None
    sources = [p for p in folder.iterdir() if p.is_dir()]
    for argv in engines.load(engine.name).build(sources[0], part, engine.install):
        step(argv, "build", cwd=sources[0])
    shutil.rmtree(folder)  # only the programs are kept


class _Steps:
    """Runs one tool after the other, all output into the log, the share done read from `[12/212]`.

    A tool that outlives a killed kernel holds `held`, the environment's lock, until it ends: nobody builds
    beside it. It ends soon, at its next word, since nobody reads it any more.
    """

    def __init__(self, log: Path, bar: Progress, held: int):
        self.log, self.bar, self.held = log, bar, held

    def __call__(self, argv: list[str], what: str, cwd: Path | None = None) -> None:
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"$ {' '.join(argv)}\n".encode())
            try:
                with _started(argv, cwd, self.held) as process:
                    self._follow(process.stdout.fileno(), log, what)
            except FileNotFoundError:
                raise EnvironmentFailure(
                    f"{argv[0]} is missing", self.log, "install it, or restore the notebook environment"
                ) from None
        if process.returncode != 0:
            raise EnvironmentFailure(
                f"installing failed: {Path(argv[0]).name} {argv[1]} ended with {process.returncode}", self.log
            )

    def _follow(self, output: int, log, what: str) -> None:
        done = 0.0
        while True:
            if select.select([output], [], [], TICK_S)[0]:
                said = os.read(output, 65536)
                if not said:
                    return
                log.write(said)
                shares = re.findall(rb"\[(\d+)/(\d+)\]", said)
                done = 100 * int(shares[-1][0]) / int(shares[-1][1]) if shares else done
            self.bar.to(done, what)


@contextlib.contextmanager
def _started(argv: list[str], cwd: Path | None, held: int):
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env={**_plain_environment(), **package_index.uv_environment()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[held],
        start_new_session=True,
    )
    try:
        yield process
        process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):  # the compilers below it go with their session
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        raise
    finally:
        process.stdout.close()


def _complete(place: Path, engine: Engine) -> Environment | None:
    """The environment at a place when it is complete and still holds what was installed, else None."""
    try:
        marker = json.loads((place / ".complete").read_text())
        files, freeze = marker["files"], marker["freeze"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    programs = engines.load(engine.name).programs(engine.install)
    whole = all((place / p).exists() for p in [*programs, "bin/python"])
    if place.is_symlink() or not whole or files != _files(place):
        return None  # somebody changed it: it is built anew
    return Environment(place, place.name, _with_source(engine, freeze), 0.0)


def _files(place: Path) -> str:
    """sha256 over path, size and time of every file but bytecode: one added, changed or gone makes it another."""
    found = sorted(
        (str(p.relative_to(place)), s.st_size, s.st_mtime_ns)
        for p in place.rglob("*")
        if p.suffix != ".pyc" and p.name != ".complete" and stat.S_ISREG((s := p.lstat()).st_mode)
    )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def _freeze(place: Path) -> str:
    shown = subprocess.run(
        [uv.find_uv_bin(), "pip", "freeze", "--python", str(place / "bin/python")],
        capture_output=True,
        text=True,
        check=False,
        env=_plain_environment(),
    )
    if shown.returncode != 0:
        raise EnvironmentFailure(
            f"{place} could not be checked: {shown.stderr.strip()[-300:]}", next_step="mend that, then run again"
        )
    return shown.stdout


def _with_source(engine: Engine, freeze: str) -> str:
    if engine.install.kind != "sdist":
        return freeze
    return freeze + "".join(
        f"{name}=={version}  # built from source, sha256 {engine.install.sha256}\n"
        for name, version in engine.install.pins.items()
    )


def _plain_environment() -> dict[str, str]:
    """This process's environment, without what points tools at another Python or makes them write colours:
    Jupyter's kernels set CLICOLOR_FORCE, and a coloured version number is no version number."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CLICOLOR_FORCE", "FORCE_COLOR"}
    return {
        **{k: v for k, v in os.environ.items() if k not in ours},
        "NO_COLOR": "1",
        "UV_PYTHON_DOWNLOADS": "never",
        # hard links would let a change here reach uv's cache, and from there every other environment
        "UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "copy"),
    }


def _interpreter(wanted: str | None) -> Path:
    """The Python an environment is made with: the notebook's own, or an installed one of a pinned version."""
    if wanted is None:
        return Path(sys.executable)
    found = subprocess.run(
        [uv.find_uv_bin(), "python", "find", "--no-project", wanted],
        capture_output=True,
        text=True,
        check=False,
        env=_plain_environment(),
    )
    if found.returncode != 0:
        raise EnvironmentFailure(
            f"this engine needs Python {wanted} and none is installed here",
            next_step="install it (with your system's packages, pyenv or conda)",
        )
    return Path(found.stdout.strip())


@contextlib.contextmanager
def _locked(path: Path):
    """Hold a lock file, its descriptor given: two notebooks that need one environment build it once."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another process is installing this engine; waiting for it", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
