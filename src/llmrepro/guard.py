"""The guard of a run: how its sampler is started, and what follows from what it tells (guard_log.py).

The sampler (telemetry.py) stops a server that breaks a limit. An Xid that is none of limits.FATAL_XIDS it only
tells: within a rung of a ladder it is that rung's result, anywhere else it stops the run.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmrepro import guard_log
from llmrepro.gpus import VISIBLE
from llmrepro.recipe import Recipe
from llmrepro.workload import Workload
from llmrepro.xids import Xid

# Until Python has started and NVML was opened, which takes seconds where nothing else uses the driver.
START_S = 15.0
END_S = 5.0


class GuardStop(RuntimeError):
    """The guard stopped the run: what was found and what the limit is. What was measured before is kept."""

    stopped_by = "guard"

    def __init__(self, reason: str, next_step: str):
        super().__init__(reason)
        self.next_step = next_step


class Listener:
    """Hears what the guard of one boot tells while it is measured; `path` is its guard file, None without one."""

    def __init__(self, path: Path | None):
        self.path = path
        self._heard = 0  # Xids so far

    def hear(self, workload: Workload, rung: bool = True) -> list[int]:
        """The Xids, by number, that came since this was last called, of the GPUs that the run uses; of a card that
        is not known too.

        To be called after each request. Raises GuardStop when the guard has stopped the server, or when there was
        an Xid and the workload is none that goes on until it fails, or the request no `rung` of it.
        """
        told = guard_log.read(self.path)
        if told.stop is not None:
            raise GuardStop(told.stop.reason, told.stop.next_step)
        new, self._heard = told.xids[self._heard :], len(told.xids)
        ours = [x for x in new if x.gpu is None or x.gpu in told.gpus]
        if ours and not (workload.rises and rung):
            raise self._stop(ours[0], workload)
        return [x.number for x in ours]

    def _stop(self, xid: Xid, workload: Workload) -> GuardStop:
        """The stop for an Xid, written down where the sampler writes its own: one place tells of every stop."""
        who = "a GPU" if xid.gpu is None else f"GPU {xid.gpu}"
        stop = GuardStop(
            f"the driver reported Xid {xid.number} of {who} during {workload.id}: {xid.text}",
            "look it up in NVIDIA's list of Xid errors; restart the server's program, or the machine",
        )
        with open(self.path, "ab") as file:
            file.write(guard_log.line("stop", reason=str(stop), next_step=stop.next_step))
        return stop


@contextmanager
def heeded(path: Path) -> Iterator[None]:
    """What goes wrong within is the guard's stop, where the guard has stopped the server meanwhile."""
    try:
        yield
    except Exception as error:
        stop = guard_log.read(path).stop
        if stop is None or isinstance(error, GuardStop):
            raise
        raise GuardStop(stop.reason, stop.next_step) from error


def sampler(folder: Path, boot: int, recipe: Recipe, pid_file: Path | None = None) -> list[str]:
    """The command line of a boot's sampler. `pid_file`: see telemetry's own help."""
    wanted = {
        "--gpus": recipe.needs.gpu_count,
        "--core-c": recipe.safety.core_c,
        "--memory-c": recipe.safety.memory_c,
        "--pid-file": pid_file,
    }
    options = [word for name, value in wanted.items() if value is not None for word in (name, str(value))]
    return [sys.executable, "-P", "-m", "llmrepro.telemetry", str(folder), str(boot), *options]


def environment() -> dict[str, str]:
    """What a sampler inherits: it is this kit's own, and gets what finding Python and a GPU takes."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", VISIBLE)
    return {name: os.environ[name] for name in names if name in os.environ}


@contextmanager
def beside(folder: Path, boot: int, recipe: Recipe) -> Iterator[Path]:
    """A sampler beside a server that somebody else started, while the context lasts. Yields its guard file. Of the
    server's processes nothing is known."""
    told = folder / guard_log.name(boot)
    command = sampler(folder, boot, recipe, pid_file=folder / "boots" / f"{boot}.pid")  # which nobody writes
    with open(folder / "boots" / f"{boot}.sampler.log", "wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an interrupt is for who measures
        )
    try:
        end = time.monotonic() + START_S
        while not told.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        yield told
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # a driver may hold it
            process.kill()
            process.wait()
