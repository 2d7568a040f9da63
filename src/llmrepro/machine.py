"""What this machine is. A fact that cannot be found is None, never zero."""

import contextlib
import os
import platform
import shutil
import sys
import time
from pathlib import Path

import psutil

from llmrepro import __version__
from llmrepro.recipe import Needs

GIB = 2**30
KIT = Path(__file__).resolve().parent


def describe(folder: Path) -> dict:
    """Facts about this machine as JSON values; `folder` is where disk space is asked for."""
    memory = psutil.virtual_memory()
    return {
        "cpu": {
            "model": _cpu_model(),
            "architecture": platform.machine(),
            "physical_cores": physical_cores(),
            "usable_cpus": usable_cpus(),
            "l3_mib": _l3_mib(),
            "simd": _simd(),
        },
        "memory": {"total_gib": round(memory.total / GIB, 2), "available_gib": round(memory.available / GIB, 2)},
        "disk_free_gib": round(shutil.disk_usage(_existing(folder)).free / GIB, 1),
        "gpus": None,  # not looked for yet: unknown, not none
        "os": {"name": _os_name(), "kernel": platform.release(), "hypervisor": _hypervisor()},
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "llmrepro": __version__,
    }


def threads() -> int:
    """Threads for a CPU engine: usable physical cores less one for the client, at most 8, at least 1.

    llama.cpp's threads spin at a barrier: with every core taken, whatever else runs stops them all.
    A model that fits a laptop gains nothing beyond eight.
    """
    cores = min(physical_cores() or usable_cpus(), usable_cpus())
    return max(1, min(8, cores - 1))


def usable_cpus() -> int:
    """CPUs this process may run on: its affinity, and the container's CPU quota where there is one."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


def physical_cores() -> int | None:
    return psutil.cpu_count(logical=False)


def lacks(needs: Needs, facts: dict, folder: Path) -> list[str]:
    """What a machine is missing of a recipe's needs, a sentence each; empty when it can run live."""
    found = []
    architecture = facts["cpu"]["architecture"]
    if needs.architectures and architecture not in needs.architectures:
        found.append(f"needs a CPU of {' or '.join(needs.architectures)}; this one is {architecture}")
    total = facts["memory"]["total_gib"]
    if total < needs.memory_gib:
        found.append(f"needs {needs.memory_gib:g} GiB of memory; this machine has {total:g}")
    if facts["disk_free_gib"] < needs.disk_gib:
        found.append(f"needs {needs.disk_gib:g} GiB of free disk; {folder} has {facts['disk_free_gib']:g}")
    if needs.vram_gib or needs.compute_capability:
        wanted = f"a GPU with {needs.vram_gib:g} GiB" + (
            f" and compute capability {needs.compute_capability}" if needs.compute_capability else ""
        )
        found.append(f"needs {wanted}; none is known here")
    for command in needs.commands:
        if shutil.which(command) is None:
            found.append(f"needs the command {command!r}; install the package that brings it")
    return found


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

        `server` is the process started since, still alive; what it and its children used is not others'.
        """
        end = psutil.cpu_times()
        passed = sum(end) - sum(self._start)
        seconds = time.perf_counter() - self._at
        steal = getattr(end, "steal", None)
        share = None if steal is None or passed <= 0 else round((steal - self._start.steal) / passed, 4)
        others = None
        with contextlib.suppress(psutil.Error):  # a server that ended took its times with it
            if server is not None:
                own_s = _tree_s(psutil.Process(server)) + _cpu_s(psutil.Process()) - self._own_s
                others = round(max(0.0, _busy_s(end) - _busy_s(self._start) - own_s) / seconds, 2)
        return {
            "load_before": round(self._load, 2),
            "load_after": round(os.getloadavg()[0], 2),
            "steal_share": share,
            "other_cpus": others,
            "seconds": round(seconds, 3),
        }


def _busy_s(times) -> float:
    """CPU seconds of user and kernel code on all CPUs; guests are counted within user."""
    return times.user + times.nice + times.system + times.irq + times.softirq


def _cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of those children of it that have ended."""
    times = process.cpu_times()
    return times.user + times.system + times.children_user + times.children_system


def _tree_s(process: psutil.Process) -> float:
    return _cpu_s(process) + sum(_cpu_s(child) for child in process.children(recursive=True))


def _cpu_model() -> str | None:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return None


SIMD = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


def _simd() -> str | None:
    """Those of the CPU's vector extensions that decide how fast it multiplies; a virtual CPU's model name may tell
    nothing of them."""
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return " ".join(f for f in SIMD if f in line.split())
    return None


def _l3_mib() -> float | None:
    size = _read("/sys/devices/system/cpu/cpu0/cache/index3/size").strip()
    return int(size[:-1]) / 1024 if size.endswith("K") else None


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {sys.platform}"


def _hypervisor() -> str | None:
    """The product the firmware names when the CPU says that it is virtual; None when it does not say so."""
    if " hypervisor" not in _read("/proc/cpuinfo"):
        return None
    return _read("/sys/class/dmi/id/product_name").strip() or "not named"


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def minimal_environment() -> dict[str, str]:
    """What an engine and its tools inherit: enough to find programs, caches and its locale, and none of the user's
    tokens."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME")
    return {name: os.environ[name] for name in names if name in os.environ}


def cache_dir() -> Path:
    """Where environments and weights are kept between runs: LLMREPRO_CACHE, else the user's cache folder."""
    named = os.environ.get("LLMREPRO_CACHE")
    if named:
        return Path(named).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "llmrepro"


def shortened(path: str | Path) -> str:
    """A path as run folders hold it: below {cache} or {kit} where it is, so that no home folder is told."""
    for name, folder in (("{cache}", cache_dir()), ("{kit}", KIT)):
        if Path(path).is_relative_to(folder):
            return f"{name}/{Path(path).relative_to(folder)}"
    return str(path)


def expanded(path: str) -> Path:
    """The path on this machine of one that `shortened` made."""
    return Path(path.replace("{cache}", str(cache_dir())).replace("{kit}", str(KIT)))
