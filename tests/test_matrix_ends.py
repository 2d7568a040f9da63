"""However a cell of a matrix ends, or the matrix: the right word for it, nothing left running, no record lost, the
next cell goes on, and the matrix again goes on where it was."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from kill_rig import Rig
from test_notebook import left_below
from test_supervisor import soon

from llmrepro import run_folder

pytestmark = pytest.mark.engine
MATRIX = Path(__file__).with_name("dying_matrix.py")


class Matrix:
    """`llmrepro matrix` over recipes that each die in their own way, in a folder of their own."""

    def __init__(self, folder: Path, acts: list[str], *options: str, repeats: int = 2):
        self.folder, self.runs = folder, folder / "runs"
        self.temporary = tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp")  # short enough for sockets
        self.rigs = [
            Rig(folder / f"rig-{n}", folder / "cache", n, ("chat",), repeats) for n in range(1, len(acts) + 1)
        ]
        for rig, act in zip(self.rigs, acts, strict=True):
            (rig.recipe / "act").write_text(act)
        self.options = options
        self.process = self.begin()

    def begin(self) -> subprocess.Popen:
        recipes = [rig.recipe for rig in self.rigs]
        return subprocess.Popen(
            [sys.executable, MATRIX, "matrix", "--trust", "--runs-dir", self.runs, *self.options, *recipes],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=self.folder,
            env={
                **os.environ,
                "TMPDIR": self.temporary,
                "LLMREPRO_CACHE": str(self.folder / "cache"),
                "LLMREPRO_LOCKS": str(self.folder),  # several matrices at once, as on several machines
            },
        )

    def measuring(self) -> "Matrix":
        """Once a request of the last cell that was begun has been answered."""
        assert soon(lambda: any(self.records(rig) for rig in self.rigs), 60), self.process.communicate(timeout=30)
        return self

    def signal(self, *numbers: int) -> "Matrix":
        for number in numbers:
            os.kill(self.process.pid, number)
            time.sleep(0.5)  # two of a kind at once would arrive as one
        return self

    def end(self) -> int:
        self.said = self.process.communicate(timeout=240)[0]
        assert soon(lambda: not left_below(self.folder), 15), (left_below(self.folder), self.said)
        return self.process.returncode

    def again(self) -> int:
        """What comes of the same command once nothing dies any more."""
        for rig in self.rigs:
            (rig.recipe / "act").unlink(missing_ok=True)
        self.process = self.begin()
        return self.end()

    def path(self, rig: Rig) -> Path:
        """The one folder of a recipe's runs."""
        (found,) = (self.runs / json.loads((rig.recipe / "recipe.json").read_text())["id"]).glob("*")
        return found

    def records(self, rig: Rig) -> list[dict]:
        found = self.runs.glob(f"{json.loads((rig.recipe / 'recipe.json').read_text())['id']}/*/records.jsonl")
        return [record for path in found for record in run_folder.read_lines(path)]

    def rows(self) -> dict[str, dict]:
        """summary.json by recipe."""
        return {row["recipe"].rpartition("-")[2]: row for row in self.summary()["rows"]}

    def summary(self) -> dict:
        return json.loads((self.runs / "summary.json").read_text())

    def check(self, rig: Rig, whole: bool) -> None:
        """That the folder of a cell tells the truth: of every answer a record, but for one in flight; no cell of
        the notebook claims to be complete that is not; nobody holds it."""
        path = self.path(rig)
        answered, kept = len(rig.told("ended")), len(self.records(rig))
        assert answered - (not whole) <= kept, (answered, kept, self.said)
        assert not run_folder.held(path)
        made = path / "reproduce.ipynb"
        if made.exists():
            cells = nbformat.read(made, as_version=4).cells
            claimed = [c for c in cells if c.cell_type == "code" and c.metadata.papermill.status == "completed"]
            assert all("shell.execute_reply" in c.metadata.execution for c in claimed if c.source), path


@pytest.fixture
def matrix(tmp_path):
    made = []

    def begin(name: str, acts: list[str], *options: str, **more) -> Matrix:
        made.append(Matrix(tmp_path / name, acts, *options, **more))
        return made[-1]

    yield begin
    for it in made:
        it.process.kill()
        for process in left_below(it.folder):
            process.kill()
        shutil.rmtree(it.temporary)


BY_THEMSELVES = {
    "kernel": ("interrupted", 4, "kernel"),
    "papermill": ("interrupted", -9, "killed by SIGKILL"),
    "torn": ("interrupted", -9, "killed by SIGKILL"),
    "exit": ("interrupted", 3, "SystemExit"),
    "empty": ("interrupted", 1, ""),
    "server": ("completed", 0, ""),
    "no kernel": ("interrupted", 5, "/bin/false"),
    "": ("completed", 0, ""),
}


def test_whatever_a_cell_dies_of_it_is_told_and_the_next_goes_on(matrix):
    it = matrix("deaths", list(BY_THEMSELVES))
    late = matrix("late", ["swallow", "hung", ""], "--cell-deadline", "20")
    assert it.end() == 12, it.said
    print(it.said)
    for (act, (outcome, code, why)), rig, row in zip(
        BY_THEMSELVES.items(), it.rigs, it.rows().values(), strict=True
    ):
        assert (row["outcome"], row["exit_code"]) == (outcome, code), (act, row, it.said)
        assert why in row["reason"], (act, row)
        it.check(rig, whole=outcome == "completed")
    assert late.end() == 12, late.said
    print(late.said)
    assert it.again() == 0, it.said
