"""The sampler: a process beside a server that writes down once a second what the machine does, and has the server
ended when it must not go on. Run as `python -m llmrepro.telemetry RUN_FOLDER BOOT …`.

It appends to telemetry.csv of the run folder, a row per device and sample (COLUMNS; an empty cell is unknown), and
tells of the guard what guard_log says; a `stop` line is its last before it ends with code 3. It is started for one
boot and ends with the process that started it.
"""

import argparse
import json
import math
import os
import queue
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pynvml

from llmrepro import gpu_samples, gpus, guard_log, limits, lines, xids
from llmrepro.host_samples import Host
from llmrepro.limits import Limits
from llmrepro.process_tree import Tree
from llmrepro.xids import Xid

PERIOD_S = 1.0
STOPPED = 3  # the exit code of a guard that stops the server
NO_GPU = "nothing to watch: the recipe needs no GPU"
COLUMNS = {  # with the digits behind the point that are worth keeping
    **{"t_ns": 0, "boot": 0, "device": 0, "busy": 3, "memory_gib": 3, "free_gib": 3, "page_cache_gib": 3},
    **{"steal_share": 4, "temperature_c": 1, "memory_temperature_c": 1, "power_w": 1, "power_limit_w": 1},
    **{"energy_j": 3, "sm_clock_mhz": 0, "memory_clock_mhz": 0, "pcie_generation": 0, "pcie_width": 0},
    **{"throttle": 0, "server_cpus": 3, "server_gib": 3, "disk_free_gib": 3, "sampler_cpu_s": 3},
}


def main(words: list[str]) -> int:
    """The exit code: 3 when the guard stopped the server, 0 when the process that started this one is gone."""
    asked = _parser().parse_args(words)
    parent = os.getppid()
    with ExitStack() as held:
        return Sampler(asked, parent, held).run()


class Sampler:
    """One boot's. `asked` is its command line; what it opens is closed with `held`."""

    def __init__(self, asked: argparse.Namespace, parent: int, held: ExitStack):
        folder = Path(asked.folder)
        self.boot, self.parent, self.pid_file = asked.boot, parent, asked.pid_file
        self.host = Host(folder)
        if self.pid_file is None:  # the server and its orphans are what the supervisor has below it beside this
            self.host.server = Tree(parent, but=os.getpid())
        there, why = _visible() if asked.gpus else ([], "")
        self.cards = there[: asked.gpus]  # an engine takes the first there are
        self.limits = _limits(asked, folder)
        self.stop = limits.fewer(len(there), self.limits, why)
        self.heard: queue.SimpleQueue[Xid | str] = queue.SimpleQueue()
        unwatched = f"{xids.UNKNOWN}: {why or 'there is no GPU'}" if asked.gpus else NO_GPU
        source = xids.watch(self.cards, self.heard.put, self.heard.put) if self.cards else unwatched
        self.table = _appended(folder / "telemetry.csv", held)
        lines.drop_torn(self.table)
        if self.table.tell() == 0:
            self.table.write((",".join(COLUMNS) + "\n").encode())
        self.told = _appended(folder / guard_log.name(self.boot), held)
        self._tell_watch(source)

    def run(self) -> int:
        """Sample on absolute ticks: one that is late delays none, and those that it missed are left out."""
        begin = time.monotonic()
        while self.stop is None:
            self._sample()
            ticks = math.floor((time.monotonic() - begin) / PERIOD_S) + 1
            while self.stop is None and (left_s := begin + ticks * PERIOD_S - time.monotonic()) > 0:
                self._listen(left_s)
            if os.getppid() != self.parent:
                return 0
        self._tell("stop", **self.stop._asdict())
        return STOPPED

    def _sample(self) -> None:
        if self.host.server is None and self.pid_file.exists():
            self.host.server = Tree(int(self.pid_file.read_text()), counted=True)
        t_ns = time.perf_counter_ns()
        rows = [self.host.sample(t_ns), *map(gpu_samples.sample, self.cards)]
        self.table.write("".join(_row({"t_ns": t_ns, "boot": self.boot, **row}) for row in rows).encode())
        first = {int(row["device"].removeprefix("gpu")): row["power_limit_w"] for row in rows[1:]}
        if first.keys() - self.limits.power_limit_w.keys():
            self.limits = replace(self.limits, power_limit_w={**first, **self.limits.power_limit_w})
        self.stop = limits.broken(rows, self.limits)

    def _listen(self, at_most_s: float) -> None:
        """Take in one Xid, or that there will be no more."""
        try:
            heard = self.heard.get(timeout=at_most_s)
        except queue.Empty:
            return
        if isinstance(heard, str):
            return self._tell_watch(f"{xids.UNKNOWN}: {heard}")
        self._tell("xid", heard.t_ns, xid=heard.number, gpu=heard.gpu, text=heard.text)
        if heard.gpu is None or heard.gpu in self._indexes:
            self.stop = limits.fatal(heard.number, heard.gpu, heard.text)

    @property
    def _indexes(self) -> list[int]:
        return [card.index for card in self.cards]

    def _tell_watch(self, source: str) -> None:
        self._tell("watch", limits=self.limits.told(), gpus=self._indexes, xids=source)

    def _tell(self, *what, **facts) -> None:
        self.told.write(guard_log.line(*what, **facts))


def _appended(path: Path, held: ExitStack) -> BinaryIO:
    """Open without a buffer: what was written is in the file."""
    return held.enter_context(path.open("a+b", buffering=0))


def _visible() -> tuple[list[gpus.Gpu], str]:
    """The GPUs that CUDA would show, with NVML opened; without any why, where that is known.

    NVML is not shut down: a thread waits inside it, and a crash there would take the exit code away.
    """
    try:
        pynvml.nvmlInit()
        return list(gpus.visible()), ""
    except pynvml.NVMLError as error:
        return [], gpus.why(error)


def _limits(asked: argparse.Namespace, folder: Path) -> Limits:
    """The recipe's, and what machine.json says of the GPUs when the run began."""
    try:
        known = json.loads((folder / "machine.json").read_text(encoding="utf-8")).get("gpus") or []
    except (OSError, ValueError):
        known = []
    before = {
        gpu["index"]: gpu["power_limit_w"] for gpu in known[: asked.gpus] if gpu["power_limit_w"] is not None
    }
    return Limits(asked.core_c, asked.memory_c, before, len(known) if asked.gpus else 0)


def _row(values: dict) -> str:
    cells = [values.get(name) for name in COLUMNS]
    digits = COLUMNS.values()
    shown = [
        f"{c:.{d}f}" if isinstance(c, float) else "" if c is None else c
        for c, d in zip(cells, digits, strict=True)
    ]
    return ",".join(map(str, shown)) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("llmrepro.telemetry")
    parser.add_argument("folder", help="of the run")
    parser.add_argument("boot", type=int)
    parser.add_argument("--gpus", type=int, default=0, help="how many the recipe needs; only these are looked at")
    parser.add_argument("--core-c", type=float, help="stop above this: the GPU's core, or the CPU without a GPU")
    parser.add_argument("--memory-c", type=float, help="stop above this: the GPU's memory")
    parser.add_argument(
        "--pid-file",
        type=Path,
        help="the server is what runs below the process that this file names, once it is there; else it is "
        "all that runs below the process that started this one",
    )
    return parser


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # for the same reason not through NVML's own clean-up
