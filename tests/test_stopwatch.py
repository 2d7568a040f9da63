"""What a stopwatch tells of the machine: the work of others, apart from one's own and one's server's."""

import os
import subprocess
import sys
import time

import psutil

from llmrepro import stopwatch
from llmrepro.stopwatch import Stopwatch

WORK = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"
SECONDS = 2.0


def worker() -> subprocess.Popen:
    """A process that keeps one CPU busy until it is ended."""
    return subprocess.Popen([sys.executable, "-S", "-c", WORK])


def used(process: subprocess.Popen) -> float:
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def readings() -> tuple[float, float, float]:
    """(others' CPUs with the worker as the server, with another process as the server, CPUs the worker used)."""
    watch, busy, idle = Stopwatch(), worker(), subprocess.Popen(["sleep", "60"])
    try:
        time.sleep(SECONDS)
        with_it, without = watch.reading(busy.pid), watch.reading(idle.pid)
        return with_it["other_cpus"], without["other_cpus"], used(busy) / without["seconds"]
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()


def test_the_servers_own_work_is_not_others_and_anothers_is():
    mine, others, used_cpus = readings()
    assert used_cpus > 0.1, "the worker got no CPU at all"
    assert abs(others - mine - used_cpus) < 0.25 * max(used_cpus, 0.4)  # clock ticks, and two readings


def test_without_a_live_server_it_is_unknown():
    watch = Stopwatch()
    assert watch.reading()["other_cpus"] is None
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert watch.reading(gone.pid)["other_cpus"] is None
    assert watch.reading(os.getpid())["other_cpus"] is not None


def test_of_this_process_itself_its_own_work_is_taken_away_once(monkeypatch):
    busy_s, own_s, now_s = iter([16.0, 10.0]), iter([1.0, 3.0]), iter([0.0, 2.0])
    monkeypatch.setattr(stopwatch, "busy_s", lambda times: next(busy_s))  # at the end, then at the start
    monkeypatch.setattr(stopwatch, "_cpu_s", lambda process: next(own_s))
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(now_s))
    assert Stopwatch().reading(os.getpid())["other_cpus"] == 2.0  # 6 CPU seconds in 2 seconds, 2 of them ours
