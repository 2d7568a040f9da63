"""What a cell of a matrix costs beside the work itself: papermill, a kernel, two processes.

The work is a published recipe's page: the stages called one after the other in a plain Python process of its own.
The cell is that recipe as `llmrepro matrix` runs it. They take turns; the medians and their difference are told.
"""

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llmrepro import cell
from llmrepro import run as runs
from llmrepro.parameters import Parameters

RECIPE = "qwen3.8-27b/open-jet--cmp-170hx"
PAIRS = 5
ALLOWED_S = 6.0
STAGES = """
import sys
from llmrepro import stages
run = stages.runs.create(stages.Parameters(resume=sys.argv[1]))
for stage in ("card", "machine", "prepare", "measure", "results", "charts", "report"):
    getattr(stages, stage)(run)
"""


def folder(place: str) -> Path:
    with contextlib.closing(runs.create(Parameters(recipe=RECIPE, mode="published", runs_dir=place))) as run:
        return run.path


def plainly(path: Path) -> float:
    begin = time.monotonic()
    subprocess.run([sys.executable, "-c", STAGES, str(path)], check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def as_a_cell(path: Path) -> float:
    end = cell.run(path)
    assert end.code == 0, end
    return end.seconds


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        plain, cells = [], []
        for number in range(PAIRS):
            turns = [(plain, plainly), (cells, as_a_cell)]
            for times, run in turns if number % 2 else reversed(turns):  # neither always has the warmer machine
                times.append(run(folder(place)))
        over = [c - p for c, p in zip(cells, plain, strict=True)]
    print(f"A cell of the matrix: {RECIPE}, as published, {PAIRS} pairs")
    print(f"  the stages in one process  {statistics.median(plain):5.2f} s (median)")
    print(f"  the same as a cell         {statistics.median(cells):5.2f} s")
    print(
        f"  a cell costs               {statistics.median(over):5.2f} s more ({min(over):.2f} to {max(over):.2f})"
    )
    print(f"  which is {'within' if statistics.median(over) <= ALLOWED_S else 'OVER'} the {ALLOWED_S:g} s allowed")


if __name__ == "__main__":
    main()
