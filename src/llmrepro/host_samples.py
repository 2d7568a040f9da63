"""What the machine does now: CPUs, memory, disk, and where it tells them the CPU's temperature and energy."""

import os
import re
import time
from pathlib import Path

import psutil

from llmrepro.process_tree import Tree
from llmrepro.stopwatch import busy_s

GIB = 2**30
HWMON, POWERCAP = Path("/sys/class/hwmon"), Path("/sys/class/powercap")
# Drivers of sensors within the CPU, and which of their readings is of the whole package, the best first.
SENSORS = {
    "coretemp": ("Package id",),
    "k10temp": ("Tdie", "Tctl"),
    "zenpower": ("Tdie", "Tctl"),
    "cpu_thermal": ("",),
}


class Host:
    """One machine, looked at again and again. `folder` is where free disk is asked for.

    Sensors are looked for once: psutil reads all there are each time, those of disks too, and every core's, which
    interrupts that core.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.server: Tree | None = None  # its processes, once they are known
        self._sensors = _sensors()
        self._energy = _Energy()
        self._before: tuple | None = None
        self._server_before: tuple[int, float] | None = None

    def sample(self, t_ns: int) -> dict:
        """A row of telemetry.csv; what is over a time is over that since the sample before, and None in the first.
        `swap_free_gib` comes with it, for the guard."""
        memory = psutil.virtual_memory()
        return {
            "device": "host",
            **self._cpus(t_ns),
            "memory_gib": (memory.total - memory.available) / GIB,
            "free_gib": memory.available / GIB,
            "page_cache_gib": memory.cached / GIB,
            "temperature_c": max((c for path in self._sensors if (c := _celsius(path)) is not None), default=None),
            "energy_j": self._energy.joules(),
            **self._server(t_ns),
            "disk_free_gib": _disk_free_gib(self.folder),
            "sampler_cpu_s": time.process_time(),
            "swap_free_gib": psutil.swap_memory().free / GIB,
        }

    def _cpus(self, t_ns: int) -> dict:
        times = psutil.cpu_times()
        before, self._before = self._before, (t_ns, times)
        if before is None:
            return {"busy": None, "steal_share": None}
        passed = sum(times) - sum(before[1])
        steal = getattr(times, "steal", None)
        return {
            "busy": max(0.0, busy_s(times) - busy_s(before[1])) / ((t_ns - before[0]) / 1e9),
            "steal_share": None if steal is None or passed <= 0 else max(0.0, steal - before[1].steal) / passed,
        }

    def _server(self, t_ns: int) -> dict:
        used = self.server and self.server.look()
        before, self._server_before = self._server_before, used and (t_ns, used.cpu_s)
        if not used or not used.resident_bytes:  # it is gone, or only its zombie is left
            return {"server_cpus": None, "server_gib": None}
        cpus = before and max(0.0, used.cpu_s - before[1]) / ((t_ns - before[0]) / 1e9)
        return {"server_cpus": cpus, "server_gib": used.resident_bytes / GIB}


class _Energy:
    """RAPL's counters of the CPU packages, summed. They turn over within minutes or hours, and since 2020 most
    kernels let only root read them."""

    def __init__(self):
        self._last: dict[Path, int] = {}
        self._joules = 0.0
        self._zones: dict[Path, int | None] = {}  # counter, with the microjoules at which it turns over
        for zone in sorted(
            POWERCAP.glob("intel-rapl:*")
        ):  # AMD's too; of zones within zones the name has two colons
            if re.fullmatch(r"intel-rapl:\d+", zone.name) and (_text(zone / "name") or "").startswith("package"):
                self._zones[zone / "energy_uj"] = _number(zone / "max_energy_range_uj")

    def joules(self) -> float | None:
        """Since the first call; None when there are no counters, or one may not be read."""
        found = {path: _number(path) for path in self._zones}
        if not found or None in found.values() or None in self._zones.values():
            return None
        for path, now in found.items():
            used = now - self._last.get(path, now)
            self._joules += (used if used >= 0 else used + self._zones[path]) / 1e6
        self._last = found
        return self._joules


def _sensors() -> list[Path]:
    found = []
    for chip in sorted(HWMON.glob("hwmon*")):
        labels = {
            path: _text(path.with_name(path.name.replace("_input", "_label"))) or ""
            for path in chip.glob("temp*_input")
        }
        for wanted in SENSORS.get(_text(chip / "name"), ()):
            fitting = [path for path, label in labels.items() if label.startswith(wanted)]
            if fitting:
                found += fitting
                break
    return found


def _celsius(path: Path) -> float | None:
    millidegrees = _number(path)
    return None if millidegrees is None else millidegrees / 1000


def _number(path: Path) -> int | None:
    try:
        return int(_text(path) or "")
    except ValueError:
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _disk_free_gib(folder: Path) -> float:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize / GIB
