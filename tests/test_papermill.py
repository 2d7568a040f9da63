"""papermill's own command gives what `llmrepro run` gives, whatever kernels Jupyter knows of."""

import json
import os
import re
import site
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from test_notebook import BIN, ROOT, command, files, only_run

from llmrepro import run_folder

pytestmark = pytest.mark.engine

RECIPE = "llama-4-scout/vllm--rtx-pro-6000"
NOTEBOOK = ROOT / "notebooks" / f"{RECIPE}.ipynb"
QUIET = ("--log-level", "ERROR", "--no-progress-bar")
PUBLISHED = ("-p", "mode", "published")
REFUSED = ("-p", "mode", "life")  # by the kit's first cell, so by a Python that has the kit


def environment(folder: Path) -> tuple[Path, Path]:
    """The interpreter of a new environment, and where its packages would be."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    return folder / "bin" / "python", packages


def without_kernelspec(folder: Path) -> Path:
    """A Python with all that this one has but its kernelspec: packages, uv, nbconvert's templates."""
    python, packages = environment(folder)
    lines = [f"import site; site.addsitedir({place!r})\n" for place in site.getsitepackages()]
    (packages / "packages.pth").write_text("".join(lines))
    (folder / "share" / "jupyter").mkdir(parents=True)
    for path in ("bin/uv", "share/jupyter/nbconvert"):
        (folder / path).symlink_to(Path(sys.prefix, path))
    return python


def stranger(folder: Path) -> Path:
    """A Python with the packages that a kernel needs and without this kit."""
    python, packages = environment(folder)
    for path in (one for place in site.getsitepackages() for one in Path(place).glob("*")):
        if "llmrepro" not in path.name and not (packages / path.name).exists():
            (packages / path.name).symlink_to(path)
    return python


def kernelspec(jupyter: Path, python: Path) -> None:
    """A kernel called `python3` that is another Python, as Jupyter looks for it in a folder of JUPYTER_PATH."""
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    told = {"argv": argv, "display_name": "Another", "language": "python", "env": {"PYTHONPATH": ""}}
    place = jupyter / "kernels" / "python3"
    place.mkdir(parents=True)
    (place / "kernel.json").write_text(json.dumps(told))


def what_it_says(run: Path) -> dict:
    """The files of a run's folder, without what moves from one moment to the next: times, load, free memory and
    disk, and the hashes of files that hold them."""
    moving = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(\+00:00|Z)|\b(has|are) [\d.]+|[0-9a-f]{64}")
    told = {}
    for name in files(run) - {"parameters.json", "machine.json", "report.html"}:
        told[name] = (run / name).read_bytes()
    for name in ("result.json", "status.json"):
        read = json.loads(moving.sub("…", told[name].decode()))
        told[name] = _without_load(read)
    # Where its lines are broken depends on how long the path of an environment's folder is.
    told["commands.txt"] = told["commands.txt"].replace(b" \\\n    ", b" ")
    return told


def _without_load(node):
    if isinstance(node, list):
        return [_without_load(one) for one in node]
    if isinstance(node, dict):
        return {
            k: _without_load(v) for k, v in node.items() if not (k == "here" and node.get("name") == "load_1min")
        }
    return node


def test_papermill_without_a_kernelspec_gives_what_the_command_gives(tmp_path):
    python = without_kernelspec(tmp_path / "env")
    (tmp_path / "here").mkdir()
    done = command(
        *(python, "-m", "papermill", *QUIET, NOTEBOOK, "out.ipynb"),
        *("-p", "runs_dir", tmp_path / "one", *PUBLISHED),
        cwd=tmp_path / "here",
    )
    assert done.returncode == 0, done.stderr
    again = command(
        *(BIN / "llmrepro", "run", RECIPE, "--mode", "published", "--runs-dir", tmp_path / "two"), cwd=tmp_path
    )
    assert again.returncode == 0, again.stderr
    one, two = only_run(tmp_path / "one"), only_run(tmp_path / "two")
    assert "report.html" in files(one) == files(two)
    assert what_it_says(one) == what_it_says(two)
    asked = [run_folder.read_json(run / "parameters.json") | {"runs_dir": None} for run in (one, two)]
    assert asked[0] == asked[1]
    for notebook in (tmp_path / "here" / "out.ipynb", two / "reproduce.ipynb"):
        executed = nbformat.read(notebook, as_version=4)
        assert executed.metadata.kernelspec.name == "python3"
        assert {c.metadata.papermill.status for c in executed.cells} == {"completed"}


def test_where_python3_is_another_python_k_names_the_kits(tmp_path):
    """As with a JUPYTER_PATH of someone's, or a Jupyter that is not the kit's."""
    kernelspec(tmp_path / "jupyter", stranger(tmp_path / "env"))

    def papermill(*options):
        words = (BIN / "papermill", *QUIET, NOTEBOOK, "out.ipynb", "-p", "runs_dir", tmp_path / "runs", *REFUSED)
        done = command(
            *words, *options, cwd=tmp_path, env=os.environ | {"JUPYTER_PATH": str(tmp_path / "jupyter")}
        )
        assert done.returncode != 0
        return re.sub(r"\x1b\[[0-9;]*m", "", done.stderr)

    assert "No module named 'llmrepro'" in papermill()
    subprocess.run(
        [sys.executable, "-m", "ipykernel", "install", "--prefix", tmp_path / "user", "--name", "llmrepro"],
        check=True,
        capture_output=True,
    )
    (tmp_path / "jupyter/kernels/llmrepro").symlink_to(tmp_path / "user/share/jupyter/kernels/llmrepro")
    assert "parameter mode: Input should be 'auto', 'live' or 'published', found 'life'" in papermill(
        "-k", "llmrepro"
    )
    assert not (tmp_path / "runs").exists()
