"""Filling an environment: an interpreter, the packages of a hashed lock, what is built from source.

uv does it, out of a cache of the kit's own, by hard links: an environment of 3 GB is there in seconds and takes
its room once. The price of a link is that who writes into a file of an environment writes into that cache; so
what was linked is checked against the wheels' records, and a package that was changed is fetched anew. A cache
that somebody else uses too (UV_CACHE_DIR is set) is copied from and never linked to.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import tarfile
from pathlib import Path

import uv

from llmrepro import contents, engines, package_index
from llmrepro.install import Engine
from llmrepro.progress import Progress

TICK_S = 0.5


class EnvironmentFailure(RuntimeError):
    """An environment that could not be built; `log_tail` is how its log ended, `next_step` what to do."""

    def __init__(self, message: str, log: Path | None = None, next_step: str = ""):
        self.log_tail = log.read_text(errors="replace").splitlines()[-15:] if log and log.exists() else []
        self.next_step = next_step or (f"read {log}" if log else "")
        self.found = message
        tail = "".join(f"\n    {line}" for line in self.log_tail)
        super().__init__(f"{message}; {self.next_step}{tail}")


class Steps:
    """Runs one tool after the other, all output into the log, the share done read from `[12/212]`.

    A tool that outlives a killed kernel holds `held`, the environment's lock, until it ends: nobody builds
    beside it. It ends soon, at its next word, since nobody reads it any more.
    """

    def __init__(self, log: Path, bar: Progress, held: int, cache: Path):
        self.log, self.bar, self.held = log, bar, held
        self.own_cache = not {"UV_CACHE_DIR", "UV_NO_CACHE"} & set(os.environ)
        self.env = {**plain_environment(), **package_index.uv_environment(), **self._cache_of_uv(cache)}

    def __call__(self, argv: list[str], what: str, cwd: Path | None = None, env: dict | None = None) -> None:
        """Run a tool to its end. Raises EnvironmentFailure when it fails or is not there."""
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"$ {' '.join(argv)}\n".encode())
            try:
                with self._started(argv, cwd, {**self.env, **(env or {})}) as process:
                    self._follow(process.stdout.fileno(), log, what)
            except FileNotFoundError:
                raise EnvironmentFailure(
                    f"{argv[0]} is missing", self.log, "install it, or restore the notebook environment"
                ) from None
        if process.returncode != 0:
            raise EnvironmentFailure(
                f"installing failed: {Path(argv[0]).name} {argv[1]} ended with {process.returncode}", self.log
            )

    def say(self, line: str) -> None:
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{line}\n")

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

    def _cache_of_uv(self, cache: Path) -> dict[str, str]:
        """Link to a cache of the kit's own, which lies on the same file system; copy from anybody else's."""
        mode = {"UV_LINK_MODE": os.environ.get("UV_LINK_MODE", "hardlink" if self.own_cache else "copy")}
        return mode | ({"UV_CACHE_DIR": str(cache / "uv")} if self.own_cache else {})

    @contextlib.contextmanager
    def _started(self, argv: list[str], cwd: Path | None, env: dict[str, str]):
        process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[self.held],
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


def fill(
    engine: Engine, lock: Path, python: Path, part: Path, step: Steps, suspect: dict[str, str]
) -> list[contents.File]:
    """A virtual environment at `part` with the packages of a lock, and the programs of an sdist; its files.

    `suspect`, in the form of `contents.altered`, are packages that were changed in an earlier environment.
    """
    _forget(suspect, step)
    # relocatable: it is moved into place, and its scripts must not name the place it was built in
    step([uv.find_uv_bin(), "venv", "--relocatable", "--python", str(python), str(part)], "environment")
    _packages(engine, lock, part, step)
    found = contents.files(part)
    changed = contents.altered(part, found)
    if changed:
        _forget(changed, step)
        again = [option for package in changed for option in ("--reinstall-package", package)]
        _packages(engine, lock, part, step, *again)
    if engine.install.kind == "sdist":
        _build_source(engine, part, step)
    return contents.files(part) if changed or engine.install.kind == "sdist" else found


def _forget(changed: dict[str, str], step: Steps) -> None:
    """Take packages out of uv's cache into which somebody may have written through an environment's links."""
    if changed and step.own_cache:
        told = ", ".join(f"{package} ({file})" for package, file in changed.items())
        step.say(f"# changed since they were unpacked, fetched anew: {told}")
        step([uv.find_uv_bin(), "cache", "clean", *changed], "cache")


def _packages(engine: Engine, lock: Path, part: Path, step: Steps, *options: str) -> None:
    """Sync with what this machine's pip is told; when that fails, once more with the recipe's indexes beside."""
    argv = [uv.find_uv_bin(), "pip", "sync", "--require-hashes", "--only-binary", ":all:", *options]
    argv += ["--compile-bytecode"]  # else a server's first start does it, and is measured
    argv += ["--python", str(part / "bin/python"), str(lock)]
    try:
        step(argv, "packages")
    except EnvironmentFailure:
        if not engine.install.indexes or package_index.configuration().get("no-index"):
            raise
        step.say(f"# not to be had so; once more, with the recipe's indexes: {', '.join(engine.install.indexes)}")
        indexes = " ".join([*step.env.get("UV_INDEX", "").split(), *engine.install.indexes])
        step(argv, "packages", env={"UV_INDEX": indexes})


def _build_source(engine: Engine, part: Path, step: Steps) -> None:
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


def plain_environment() -> dict[str, str]:
    """This process's environment, without what points tools at another Python or makes them write colours:
    Jupyter's kernels set CLICOLOR_FORCE, and a coloured version number is no version number."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CLICOLOR_FORCE", "FORCE_COLOR"}
    return {
        **{k: v for k, v in os.environ.items() if k not in ours},
        "NO_COLOR": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
