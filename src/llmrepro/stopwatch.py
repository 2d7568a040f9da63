"""What a machine did while a server lived: load, what the hypervisor took, other programs."""

import contextlib
import os
import time

import psutil


class Stopwatch:
    """What else this machine did between its start and a reading: load, CPU steal, other programs."""

    def __init__(self):
        self._start = psutil.cpu_times()
        self._own_s = _cpu_s(psutil.Process())
        self._load = os.getloadavg()[0]
        self._at = time.perf_counter()

    def reading(self, server: int | None = None) -> dict:
        """load_before, load_after (1 minute), steal_share (0..1, what the hypervisor took), other_cpus (CPUs that
        other programs kept busy on average), seconds. None where it cannot be known.

        `server` is the process started since, still alive; what it and its children used is not others'. Without
        one it may be this process itself.
        """
        end = psutil.cpu_times()
        passed = sum(end) - sum(self._start)
        seconds = time.perf_counter() - self._at
        steal = getattr(end, "steal", None)
        share = None if steal is None or passed <= 0 else round((steal - self._start.steal) / passed, 4)
        others = None
        with contextlib.suppress(psutil.Error):  # a server that ended took its times with it
            if server is not None:
                own_s = _cpu_s(psutil.Process()) - self._own_s
                own_s += _tree_s(psutil.Process(server)) if server != os.getpid() else 0
                others = round(max(0.0, busy_s(end) - busy_s(self._start) - own_s) / seconds, 2)
        return {
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "steal_share": share,
            "other_cpus": others,
            "seconds": round(seconds, 3),
        }


def busy_s(times) -> float:
    """CPU seconds of user and kernel code on all CPUs; guests are counted within user."""
    return times.user + times.nice + times.system + times.irq + times.softirq


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of those children of it that have ended."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _tree_s(process: psutil.Process) -> float:
    return _cpu_s(process) + sum(_cpu_s(child) for child in process.children(recursive=True))
