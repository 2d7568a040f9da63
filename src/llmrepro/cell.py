"""One cell of a matrix: a run folder whose notebook is executed by `llmrepro run`, in a process of its own.

That process ends its notebook in order by itself: at its deadline, by a signal, or when this one is gone. What
became of the run is in the folder's status.json, whatever the process says.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from llmrepro import earlier_boots, executed, execution, run_folder
from llmrepro.boot import ServerFailure

COMMAND = [
    sys.executable,
    "-P",
    "-m",
    "llmrepro",
    "run",
]  # -P: no module is taken from where the command was typed
EXECUTED, SAID = "reproduce.ipynb", "matrix.log"
LATE_S = 2 * execution.PATIENCE_S  # after its deadline a process that still lives will not end by itself
ENDING_S = 30.0  # for a kernel to see that its papermill was killed
TICK_S = 0.1


class End(NamedTuple):
    """How a cell's process ended. `code` is its exit code, or the negative number of the signal that killed it."""

    code: int
    seconds: float
    why: str  # a sentence where the process did not end by itself, else ""


def run(
    folder: Path,
    *,
    deadline_s: float | None = None,
    signals: Sequence[int] = (),
    on_tick: Callable[[], None] = lambda: None,
) -> End:
    """Execute the notebook of a run folder that nobody holds, and return when nothing of it is left.

    Signals that come into `signals` meanwhile, from a thread or a handler, are passed on: the first stops the
    notebook in order, the second kills its kernel, the third the process. `on_tick` is called ten times a second.
    A kernel that never started is tried once more: that alone passes by itself.
    """
    end = _once(folder, deadline_s, signals, on_tick)
    if end.code == execution.NOT_STARTED and not signals:
        end = _once(folder, deadline_s, signals, on_tick)
    return end


def _once(folder: Path, deadline_s: float | None, signals: Sequence[int], on_tick: Callable[[], None]) -> End:
    begin = time.monotonic()
    deadline = [] if deadline_s is None else ["--deadline", f"{deadline_s:.1f}"]
    with open(folder / SAID, "ab") as said:
        process = subprocess.Popen(
            [*COMMAND, "--resume", str(folder), *deadline],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches it once, from here
            env={**os.environ, execution.PARENT: str(os.getpid())},
        )
    why, kernels, passed = "", [], 0
    while process.poll() is None:
        kernels = _children(process.pid) or kernels
        for number in signals[passed:]:
            passed += 1
            process.send_signal(number if passed < 3 else signal.SIGKILL)
        if not why and deadline_s is not None and time.monotonic() - begin > deadline_s + LATE_S:
            why = f"it did not end by itself {LATE_S:g} s after its deadline of {deadline_s:g} s, and was killed"
            process.kill()
        on_tick()
        time.sleep(TICK_S)
    left = _clear(folder, kernels)
    if process.returncode < 0 or why:
        why = why or f"its process was killed by {signal.Signals(-process.returncode).name}"
        executed.repair(folder / EXECUTED, why)
    return End(process.returncode, time.monotonic() - begin, "; ".join(s for s in (why, left) if s))


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children()
    return []


def _clear(folder: Path, kernels: list[psutil.Process]) -> str:
    """Wait until nothing of a cell is left; what its killed process left behind is ended. "" or what remains."""
    end = time.monotonic() + ENDING_S
    while run_folder.held(folder) and time.monotonic() < end:
        time.sleep(TICK_S)
    for kernel in kernels:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a pid that was given anew
            kernel.kill()
    try:
        earlier_boots.wait(folder / "boots", lambda _waited_s, _what: None)
    except ServerFailure as failure:
        return str(failure)
    return ""
