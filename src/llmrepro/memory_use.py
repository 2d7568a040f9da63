"""How much memory a server takes: its processes, and the GPUs."""

import re
from pathlib import Path

import psutil

from llmrepro import gpus
from llmrepro.stream import MEMORY

GIB = 2**30
PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


def of(pid: int | None) -> dict[str, float]:
    """{server, server_peak, device} in GiB, as far as they can be seen: resident memory of the process and all
    below it, now and each one's peak so far, and what is taken on the GPUs, whoever takes it.

    Pages that processes share are counted in each of them, so that the sum is a bound for a server of several.
    """
    found = {}
    if pid is not None and (tree := _tree(pid)):
        sizes = [(resident, _peak(one.pid) or resident) for one in tree if (resident := _resident(one))]
        if sizes:
            found["server"] = round(sum(now for now, _ in sizes) / GIB, 4)
            found["server_peak"] = round(sum(peak for _, peak in sizes) / GIB, 4)
    taken = gpus.taken_gib()
    return found if taken is None else {**found, "device": taken}


def ran_out(log_tail: list[str], killed: bool, kills_before: int | None) -> bool:
    """Whether a server that died did so for want of memory: it says so in its last lines, or it was `killed` while
    the system's own count of such kills rose."""
    if any(MEMORY.search(line) for line in log_tail):
        return True
    now = kills()
    return killed and None not in (now, kills_before) and now > kills_before


def kills() -> int | None:
    """How often this system has killed a process because memory ran out; None where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) if found else None


def _tree(pid: int) -> list[psutil.Process]:
    try:
        one = psutil.Process(pid)
        return [one, *one.children(recursive=True)]
    except psutil.Error:
        return []


def _resident(one: psutil.Process) -> int | None:
    try:
        return one.memory_info().rss
    except psutil.Error:
        return None


def _peak(pid: int) -> int | None:
    try:
        found = PEAK.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
