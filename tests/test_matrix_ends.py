"""However a cell of a matrix ends, or the matrix: the right word for it, nothing left running, no record lost, the
next cell goes on, and the matrix again goes on where it was."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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

    def __init__(self, folder: Path, acts: list[str], *options: str, repeats: int = 2, disk_mb: int = 0):
        self.folder, self.runs = folder, folder / "runs"
        self.runs.mkdir(parents=True)
        # a disk of its own, which can be full
        mount = ["mount", "-t", "tmpfs", "-o", f"size={disk_mb}m", "none", str(self.runs)]
        self.mounted = disk_mb > 0 and subprocess.run(mount, capture_output=True).returncode == 0
        if disk_mb and not self.mounted:  # nothing fills the disk of who runs the tests
            acts = [""] * len(acts)
        self.temporary = tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp")  # short enough for sockets
        self.rigs = [
            Rig(folder / f"rig-{n}", folder / "cache", n, ("chat",), repeats if n == 1 else 2)
            for n in range(1, len(acts) + 1)
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

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.runs)], check=True)

    def measuring(self) -> "Matrix":
        """Once the first cell has asked something, or is where it will not be disturbed."""
        there = ("truth/*/*/records.jsonl", "truth/*/*/swallowing")
        assert soon(lambda: any(f for name in there for f in self.runs.glob(name)), 120), self.folder
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

    def outcome(self, number: int) -> tuple:
        """What summary.json says of the cell of that number, from 1."""
        row = self.rows()[str(number)]
        return row["did"], row["outcome"], row["exit_code"]

    def swallowed(self) -> str:
        """How a first cell ends at a deadline that swallows the interrupt: its kernel is killed. On a slow machine
        it may not have come so far, and is interrupted in order."""
        return "interrupted" if list(self.runs.glob("truth/*-1/*/swallowing")) else "stopped"

    def status(self, rig: Rig) -> dict:
        return run_folder.status(self.path(rig))


BY_THEMSELVES = {
    "kernel": ("interrupted", 4, "the kernel"),
    "papermill": ("interrupted", -9, "killed by SIGKILL"),
    "torn": ("interrupted", -9, "killed by SIGKILL"),
    "exit": ("interrupted", 3, "left by SystemExit"),
    "empty": ("interrupted", 1, "made no report"),
    "no kernel": ("interrupted", 5, "died in its start"),
    "loading": ("failed", 3, "cannot load the model"),
    "server": ("completed", 0, ""),
}
LONG = 25  # rounds: some seconds


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """All of them at once: most wait for something most of the time."""
    folder = tmp_path_factory.mktemp("ends")
    made = {
        "cells": Matrix(folder / "cells", list(BY_THEMSELVES)),
        "late": Matrix(folder / "late", ["swallow"], "--cell-deadline", "25"),
        "hung": Matrix(folder / "hung", ["hung", ""], "--cell-deadline", "5"),
        "full": Matrix(folder / "full", ["full", ""], repeats=LONG, disk_mb=700),
        **{name: Matrix(folder / name, ["", ""], repeats=LONG) for name in ("INT", "TERM", "HUP", "KILL")},
        "twice": Matrix(folder / "twice", ["swallow", ""]),
        "whole": Matrix(folder / "whole", ["swallow", ""], "--deadline", "25"),
    }
    told = {
        "INT": lambda it: os.killpg(it.process.pid, signal.SIGINT),  # as a terminal does, to all that it started
        "TERM": lambda it: it.signal(signal.SIGTERM),
        "HUP": lambda it: it.signal(signal.SIGHUP),
        "KILL": lambda it: it.process.kill(),
        "twice": lambda it: it.signal(signal.SIGTERM, signal.SIGTERM),
    }
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda name: told[name](made[name].measuring()), told))
    yield made
    for it in made.values():
        it.process.kill()
        for process in left_below(it.folder):
            process.kill()
        shutil.rmtree(it.temporary)
        it.unmount()


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP"])
def test_a_signal_stops_the_cell_in_order_and_the_rest_is_not_reached(matrices, name):
    number = getattr(signal, f"SIG{name}")
    it = matrices[name]
    assert it.end() == 128 + number, it.said
    assert it.outcome(1) == ("measured", "stopped", 128 + number)
    assert it.outcome(2) == ("not reached", "", None)
    assert it.status(it.rigs[0])["stopped_by"] == ("person" if name == "INT" else "signal")
    it.check(it.rigs[0], whole=False)
    assert f"SIG{name}" in it.summary()["stopped"] and f"SIG{name}" in (it.runs / "index.html").read_text()


def test_of_a_matrix_killed_the_cell_ends_by_itself_and_the_matrix_again_asks_only_what_is_missing(matrices):
    it = matrices["KILL"]
    it.end()
    told = it.status(it.rigs[0])
    assert (told["outcome"], told["reason"]) == ("stopped", "the matrix that it belongs to was gone")
    it.check(it.rigs[0], whole=False)
    before = len(it.records(it.rigs[0]))
    assert 0 < before < 3 * LONG
    assert it.again() == 0, it.said
    assert it.outcome(1) == ("gone on with", "completed", 0) and it.outcome(2) == ("measured", "completed", 0)
    asked = [r for r in it.records(it.rigs[0]) if not r["warmup"]]
    assert len({(r["case"], r["repeat"]) for r in asked}) == 3 * LONG
    assert len(asked) <= 3 * LONG + 1, "one at most was in flight and is asked again"


def test_the_second_signal_kills_a_cell_that_swallows_the_first(matrices):
    it = matrices["twice"]
    assert it.end() == 143, it.said
    assert it.outcome(1) == ("measured", "interrupted", 143) and it.outcome(2)[0] == "not reached"
    it.check(it.rigs[0], whole=False)


def test_the_deadline_of_the_whole_ends_the_cell_and_the_matrix(matrices):
    it = matrices["whole"]
    assert it.end() == 124, it.said
    assert it.outcome(1) == ("measured", it.swallowed(), 124) and it.outcome(2)[0] == "not reached"
    assert "deadline" in it.rows()["1"]["reason"] and "deadline" in it.summary()["stopped"]
    it.check(it.rigs[0], whole=False)


def test_whatever_a_cell_dies_of_it_is_told_and_the_next_goes_on(matrices):
    it = matrices["cells"]
    assert it.end() == 12, it.said
    for number, (rig, (act, (outcome, code, why))) in enumerate(
        zip(it.rigs, BY_THEMSELVES.items(), strict=True), 1
    ):
        assert it.outcome(number) == ("measured", outcome, code), (act, it.said)
        assert why in it.rows()[str(number)]["reason"], (act, it.rows()[str(number)])
        assert it.status(rig)["outcome"] == outcome, act
        it.check(rig, whole=outcome == "completed")
    assert (it.path(it.rigs[2]) / "reproduce.ipynb.torn").exists()
    page = (it.runs / "index.html").read_text()
    assert "6 interrupted, 1 failed, 1 completed" in page and "left by SystemExit" in page
    it.rigs = [it.rigs[0], it.rigs[2], it.rigs[-1]]
    assert it.again() == 0, it.said
    done = [row["did"] for row in it.rows().values() if row["did"] != "there before"]
    assert done == ["gone on with", "gone on with", "skipped"]
    for rig in it.rigs:
        it.check(rig, whole=False)
        assert it.status(rig)["outcome"] == "completed"


def test_a_full_disk_fails_its_cell_and_what_was_measured_is_kept(matrices):
    it = matrices["full"]
    if not it.mounted:
        pytest.skip("a small disk can be mounted by root only")
    assert it.end() == 12, it.said
    assert "the summary could not be written: [Errno 28]" in it.said, it.said
    kept = len(it.records(it.rigs[0]))
    assert kept and it.status(it.rigs[0])["outcome"] in ("stopped", "interrupted")  # the guard may see it first
    assert "make room" in it.said and not list((it.runs / "truth/llama-cpp--here-2").glob("*")), "refused"
    it.check(it.rigs[0], whole=False)
    (it.runs / "filler").unlink()
    assert it.again() == 0, it.said
    assert it.outcome(1) == ("gone on with", "completed", 0) and it.outcome(2) == ("measured", "completed", 0)
    assert len(it.records(it.rigs[0])) > kept


def test_a_cell_that_swallows_interrupts_is_ended_after_its_deadline(matrices):
    it = matrices["late"]
    assert it.end() == 12, it.said
    assert it.outcome(1) == ("measured", it.swallowed(), 124)
    assert "deadline" in it.rows()["1"]["reason"]
    it.check(it.rigs[0], whole=False)


def test_a_papermill_that_hangs_is_killed_from_outside_and_the_next_cell_goes_on(matrices):
    it = matrices["hung"]
    assert it.end() == 12, it.said
    assert it.outcome(1) == ("measured", "interrupted", -9)
    assert "did not end by itself" in it.rows()["1"]["reason"]
    assert it.outcome(2)[0] == "measured", "it has 5 s, in which it need not come to its end"
    for rig in it.rigs:
        it.check(rig, whole=False)
