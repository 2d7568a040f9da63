"""The guard of a run: how its sampler is started, what it told of a boot, and what follows from that for the run.

The sampler (telemetry.py) stops a server that breaks a limit. An Xid that is none of limits.FATAL_XIDS it only
tells: within a rung of a ladder it is that rung's result, anywhere else it stops the run.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmrepro.gpus import VISIBLE
from llmrepro.recipe import Recipe
from llmrepro.run_folder import now, read_lines
from llmrepro.telemetry import guard_file
from llmrepro.workload import Workload
from llmrepro.xids import Xid

START_S = (
    15.0  # until Python has started and NVML was opened, which takes seconds where nothing else uses the driver
)
END_S = 5.0


class GuardStop(RuntimeError):
    """The guard stopped the run: what was found and what the limit is. What was measured before is kept."""

    stopped_by = "guard"

    def __init__(self, reason: str, next_step: str):
        super().__init__(reason)
        self.next_step = next_step


@dataclass(frozen=True)
class Seen:
    """What a guard file tells: why the guard stopped the server, or None; every Xid; the last `watch` line."""

    stop: str | None
    next_step: str
    xids: list[Xid]
    watch: dict | None


def read(path: Path | None) -> Seen:
    """A guard file, as far as it is written; nothing seen where there is none. Raises RunError for a broken line
    that is not the last."""
    told = read_lines(path) if path is not None else []
    stop = next((line for line in told if line["kind"] == "stop"), {})
    xids = [Xid(x["t_ns"], x["xid"], x["gpu"], x["text"]) for x in told if x["kind"] == "xid"]
    watch = [line for line in told if line["kind"] == "watch"]
    return Seen(stop.get("reason"), stop.get("next_step", ""), xids, watch[-1] if watch else None)


def latest(folder: Path) -> Seen:
    """What the guard of a run's latest boot told."""
    numbers = [int(path.name.partition(".")[0]) for path in (folder / "boots").glob("*.guard.jsonl")]
    return read(guard_file(folder, max(numbers)) if numbers else None)


class Listener:
    """Hears what the guard of one boot tells while it is measured; `path` is its guard file, None without one."""

    def __init__(self, path: Path | None):
        self.path = path
        self._heard = 0  # Xids so far

    def hear(self, workload: Workload) -> list[int]:
        """The Xids, by number, that came since this was last called, of the GPUs that the run uses; of a card that
        is not known too.

        To be called after each request. Raises GuardStop when the guard has stopped the server, or when there was
        an Xid and the workload is none that goes on until it fails.
        """
        seen = read(self.path)
        if seen.stop is not None:
            raise GuardStop(seen.stop, seen.next_step)
        new, self._heard = seen.xids[self._heard :], len(seen.xids)
        ours = [x for x in new if x.gpu is None or x.gpu in seen.watch["gpus"]]
        if ours and not workload.rises:
            raise self._stop(ours[0], workload)
        return [x.number for x in ours]

    def _stop(self, xid: Xid, workload: Workload) -> GuardStop:
        """The stop for an Xid, written down where the sampler writes its own: one place tells of every stop."""
        who = "a GPU" if xid.gpu is None else f"GPU {xid.gpu}"
        stop = GuardStop(
            f"the driver reported Xid {xid.number} of {who} during {workload.id}: {xid.text}",
            "look it up in NVIDIA's list of Xid errors; restart the server's program, or the machine",
        )
        line = {"kind": "stop", "at": now(), "t_ns": time.perf_counter_ns(), "reason": str(stop)}
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "next_step": stop.next_step}, ensure_ascii=False) + "\n")
        return stop


@contextmanager
def heeded(path: Path) -> Iterator[None]:
    """What goes wrong within is the guard's stop, where the guard has stopped the server meanwhile."""
    try:
        yield
    except Exception as error:
        seen = read(path)
        if seen.stop is None or isinstance(error, GuardStop):
            raise
        raise GuardStop(seen.stop, seen.next_step) from error


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
    told = guard_file(folder, boot)
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
