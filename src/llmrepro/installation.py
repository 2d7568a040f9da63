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

from llmrepro import checkouts, contents, engines, machine, package_index
from llmrepro.install import Checkout, Engine
from llmrepro.markup import showable
from llmrepro.progress import Progress

TICK_S = 0.5
SOURCE = "source"  # the folder below an environment with an sdist while it is built, or with checkouts for good


class EnvironmentFailure(RuntimeError):
    """An environment that could not be built; `log_tail` is how its log ended, `next_step` what to do."""

    def __init__(self, message: str, log: Path | None = None, next_step: str = ""):
        said = log.read_text(errors="replace") if log and log.exists() else ""
        self.log_tail = [showable(line) for line in said.splitlines()[-15:]]
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

    def __call__(
        self,
        argv: list[str],
        what: str,
        cwd: Path | None = None,
        env: dict | None = None,
        whole_env: dict | None = None,
    ) -> None:
        """Run a tool to its end, with `env` beside this process's own environment or with `whole_env` alone.

        Raises EnvironmentFailure when it fails or is not there.
        """
        with open(self.log, "ab", buffering=0) as log:
            log.write(f"$ {' '.join(argv)}\n".encode())
            try:
                with self._started(argv, cwd, whole_env or {**self.env, **(env or {})}) as process:
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
            cwd=cwd or "/",  # uv reads settings where it is started, which may be a stranger's folder
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
    """A virtual environment at `part` with the packages of a lock, and what is built from sources; its files.

    `suspect`, in the form of `contents.altered`, are packages that were changed in an earlier environment.
    """
    build = build_commands(engine, part)  # first: what cannot be built is not fetched
    _forget(suspect, step)
    step(venv_command(python, part), "environment")
    _packages(engine, lock, part, step)
    found = contents.files(part)
    changed = contents.altered(part, found)
    if changed:
        _forget(changed, step)
        again = [option for package in changed for option in ("--reinstall-package", package)]
        _packages(engine, lock, part, step, *again)
    if engine.install.kind == "sdist":
        _build_sdist(engine, part, step, build)
    elif engine.install.kind == "git":
        _build_checkouts(engine, part, step, build)
    return contents.files(part) if changed or build else found


def venv_command(python: Path, place: Path) -> list[str]:
    """Relocatable: it is moved into place, and its scripts must not name the place it was built in."""
    return [uv.find_uv_bin(), "venv", "--relocatable", "--python", str(python), str(place)]


def sync_command(lock: Path, place: Path, *options: str) -> list[str]:
    argv = [uv.find_uv_bin(), "pip", "sync", "--require-hashes", "--only-binary", ":all:", *options]
    argv += ["--compile-bytecode"]  # else a server's first start does it, and is measured
    return [*argv, "--python", str(place / "bin/python"), str(lock)]


def overlay_command(lock: Path, place: Path) -> list[str]:
    """What lays the packages of a fix's lock over those of the engine's: these and no others change."""
    argv = [uv.find_uv_bin(), "pip", "install", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    return [*argv, "--compile-bytecode", "--python", str(place / "bin/python"), "-r", str(lock)]


def build_commands(engine: Engine, place: Path) -> list[list[str]]:
    """What builds an engine's sources, in order, run in the folder that they lie in; [] for what comes built.

    Raises EnvironmentFailure when this engine cannot be built so, or not here.
    """
    if engine.install.kind not in ("sdist", "git"):
        return []
    try:
        return engines.load(engine.name).build(place / SOURCE, place, engine.install)
    except engines.EngineError as error:
        raise EnvironmentFailure(str(error), next_step="mend the recipe's `install`, or what is missing") from None


def _forget(changed: dict[str, str], step: Steps) -> None:
    """Take packages out of uv's cache into which somebody may have written through an environment's links."""
    if changed and step.own_cache:
        told = ", ".join(f"{package} ({file})" for package, file in changed.items())
        step.say(f"# changed since they were unpacked, fetched anew: {told}")
        step([uv.find_uv_bin(), "cache", "clean", *changed], "cache")


def _packages(engine: Engine, lock: Path, part: Path, step: Steps, *options: str) -> None:
    """Sync with what this machine's pip is told; when that fails, once more with the recipe's indexes beside."""
    argv = sync_command(lock, part, *options)
    try:
        step(argv, "packages")
    except EnvironmentFailure:
        if not engine.install.indexes or package_index.configuration().get("no-index"):
            raise
        step.say(f"# not to be had so; once more, with the recipe's indexes: {', '.join(engine.install.indexes)}")
        indexes = " ".join([*step.env.get("UV_INDEX", "").split(), *engine.install.indexes])
        step(argv, "packages", env={"UV_INDEX": indexes})


def _build_sdist(engine: Engine, part: Path, step: Steps, build: list[list[str]]) -> None:
    ((name, version),) = engine.install.pins.items()
    folder = part / SOURCE
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
    for argv in build:
        step(argv, "build", cwd=sources[0], whole_env=build_environment())
    shutil.rmtree(folder)  # only the programs are kept


def _build_checkouts(engine: Engine, part: Path, step: Steps, build: list[list[str]]) -> None:
    """Sources at their commits, built where they lie and kept: the engine runs from them."""
    folder = part / SOURCE
    folder.mkdir()
    for checkout in engine.install.checkouts:
        _checkout(checkout, folder / checkout.name, step)
    for argv in build:
        step(argv, "build", cwd=folder, whole_env=build_environment())
    for checkout in engine.install.checkouts:  # a look at it with git would write into it, and so change it
        shutil.rmtree(folder / checkout.name / ".git")


def _checkout(checkout: Checkout, folder: Path, step: Steps) -> None:
    began = step.log.stat().st_size

    def run(argv: list[str], env: dict[str, str]) -> None:
        step(argv, f"fetch {checkout.name}", whole_env=env)

    try:
        checkouts.fetch(checkout.repo, checkout.commit, folder, run)
    except checkouts.CheckoutFailure as failure:
        raise EnvironmentFailure(str(failure), next_step=failure.next_step) from None
    except EnvironmentFailure:
        if shutil.which("git") is None:
            raise
        said = step.log.read_bytes()[began:].decode(errors="replace")
        failure = checkouts.failure(checkout.repo, checkout.commit, said)
        raise EnvironmentFailure(str(failure), step.log, failure.next_step) from None


# What finds a compiler, and what it is told; conda's own compilers are named so.
COMPILING = re.compile(
    r"CC|CXX|CUDACXX|CUDAHOSTCXX|(C|CXX|CPP|LD)FLAGS|CPATH|LIBRARY_PATH|PKG_CONFIG_PATH|CUDA_(HOME|PATH)|CONDA_PREFIX"
    r"|CONDA_BUILD_SYSROOT|CMAKE_(PREFIX_PATH|BUILD_PARALLEL_LEVEL)|CCACHE_DIR"
)


def build_environment() -> dict[str, str]:
    """What builds sources of others inherits: no token of the user's, and no proxy, as everything is there."""
    told = {name: value for name, value in os.environ.items() if COMPILING.fullmatch(name)}
    return {**machine.minimal_environment(), **told, "NO_COLOR": "1"}


def plain_environment() -> dict[str, str]:
    """This process's environment, without what points tools at another Python or makes them write colours:
    Jupyter's kernels set CLICOLOR_FORCE, and a coloured version number is no version number."""
    ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "CLICOLOR_FORCE", "FORCE_COLOR"}
    paths = {k: os.path.abspath(v) for k in ("UV_CACHE_DIR", "UV_CONFIG_FILE") if (v := os.environ.get(k))}
    return {
        **{k: v for k, v in os.environ.items() if k not in ours},
        **paths,
        "NO_COLOR": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }
