"""`llmrepro run` for one cell of a matrix, which comes to grief as the file `act` beside its recipe says.

Run as the cell's process, in the place of `python -m llmrepro`. What takes seconds and says nothing here, the
measured bandwidth and the figures, is left out of the notebook, and the weights are the rig's own.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import nbformat
import psutil

from llmrepro import execution, notebooks
from llmrepro.cli import main

FOLDER = Path(sys.argv[sys.argv.index("--resume") + 1])
RECIPE = Path(json.loads((FOLDER / "parameters.json").read_text())["recipe"]).parent
ACT = (RECIPE / "act").read_text() if (RECIPE / "act").exists() else ""
AFTER = 3  # requests
QUICK = f"""
from llmrepro import charts as _charts, machine as _machine, preparation as _preparation
_machine.measured_bandwidth, _charts.draw = lambda earlier: {{}}, lambda path: []
_ready, _own = _preparation.ready, {str(RECIPE.parent / "m.gguf")!r}
_preparation.ready = lambda model, env, log, own, before: _ready(model, env, log, _own, before)
"""
if ACT == "loading":  # an engine that is broken
    QUICK += """
from llmrepro import engines as _engines
_engines.placed = lambda *_, **__: ["/bin/sh", "-c", "echo cannot load the model; exit 7"]
"""
# What a cell of the notebook does in the place of its own.
INSTEAD = {
    "exit": ("measure", "import sys\nsys.exit(0)"),
    "empty": ("report", "pass"),
    "swallow": (
        "machine",
        "import time\n(run.path / 'swallowing').touch()\n"
        "while True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass",
    ),
}


def notebook() -> Path:
    made = nbformat.read(notebooks.template(), as_version=4)
    for one in made.cells:
        if one.id == "card":
            one.source = QUICK + one.source
        if ACT in INSTEAD and one.id == INSTEAD[ACT][0]:
            one.source = INSTEAD[ACT][1]
    path = FOLDER / "variant.ipynb"
    nbformat.write(made, path)
    return path


def kernel() -> int:
    return next(p.pid for p in psutil.Process().children() if "ipykernel_launcher" in " ".join(p.cmdline()))


def records() -> int:
    path = FOLDER / "records.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def server() -> int:
    journal = [json.loads(line) for line in (RECIPE.parent / "journal.jsonl").read_text().splitlines()]
    return [line["pid"] for line in journal if line["what"] == "up"][-1]


def tear() -> None:
    """Papermill writes the notebook in place: a kill may leave half of it."""
    path = FOLDER / "reproduce.ipynb"
    path.write_bytes(path.read_bytes()[:999])
    os.kill(os.getpid(), signal.SIGKILL)


def fill() -> None:
    """Take what is free on the disk of the runs, which is a small one of their own."""
    assert os.path.ismount(FOLDER.parents[2])
    with contextlib.suppress(OSError), open(FOLDER.parents[2] / "filler", "wb", buffering=0) as filler:
        while True:
            filler.write(bytes(65536))


DEATHS = {
    "full": fill,
    "kernel": lambda: os.kill(kernel(), signal.SIGKILL),
    "papermill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "torn": tear,
    "server": lambda: os.kill(server(), signal.SIGKILL),
}


def die() -> None:
    while records() < AFTER:
        time.sleep(0.02)
    DEATHS[ACT]()


execution.PATIENCE_S = 1.0
notebooks.to_execute = lambda _recipe: (notebook(), None)
if ACT == "hung":
    os.kill(os.getpid(), signal.SIGSTOP)
if ACT == "no kernel":
    execution.sys = type("Python", (), {"executable": "/bin/false", "stdout": sys.stdout, "stderr": sys.stderr})
if ACT in DEATHS:
    threading.Thread(target=die, daemon=True).start()
main(prog_name="llmrepro")
