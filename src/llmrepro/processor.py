"""The CPU and its memory as the kernel and the firmware tell of them. What they do not tell is None."""

import os
import platform
import re
import subprocess
from pathlib import Path

import psutil

GIB = 2**30
SYSTEM = Path("/sys/devices/system")
UDEV = Path("/run/udev/data/+dmi:id")


def describe() -> dict:
    """Facts about the CPU. `numa_nodes` are {node, cpus, memory_gib}, CPUs as the kernel lists them: 0-15,32."""
    return {
        "model": model(),
        "architecture": platform.machine(),
        "physical_cores": physical_cores(),
        "usable_cpus": usable_cpus(),
        "l3_mib": l3_mib(),
        "simd": _simd(),
        "numa_nodes": numa_nodes(),
    }


def model() -> str | None:
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    try:  # ARM's kernels tell numbers only; lscpu knows their names
        told = subprocess.run(
            ["lscpu"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError:
        return None
    found = re.search(r"^Model name:\s*(\S.*)$", told.stdout, re.MULTILINE)
    return found and found[1]


def physical_cores() -> int | None:
    return psutil.cpu_count(logical=False)


def usable_cores() -> int:
    """Physical cores that this process may use; a quota of CPUs counts as so many cores."""
    return min(physical_cores() or usable_cpus(), usable_cpus())


def usable_cpus() -> int:
    """CPUs this process may run on: its affinity, and the container's CPU quota where there is one."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(int(quota) / int(period))))
    except (OSError, ValueError):
        return allowed


SIMD = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16", "i8mm")


def _simd() -> str | None:
    """Those of the CPU's vector extensions that decide how fast it multiplies; a virtual CPU's model name may tell
    nothing of them."""
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            return " ".join(f for f in SIMD if f in line.split())
    return None


def l3_mib() -> float | None:
    """All of the L3 there is: the sum over its caches, each shared by some of the CPUs."""
    sizes = {}
    for cache in SYSTEM.glob("cpu/cpu[0-9]*/cache/index*"):
        size = read(cache / "size").strip()
        if read(cache / "level").strip() == "3" and size.endswith("K"):
            sizes[read(cache / "shared_cpu_list").strip()] = int(size[:-1])
    return sum(sizes.values()) / 1024 if sizes else None


def numa_nodes() -> list[dict] | None:
    nodes = []
    for path in SYSTEM.glob("node/node[0-9]*"):
        total = re.search(r"MemTotal:\s*(\d+) kB", read(path / "meminfo"))
        nodes.append(
            {
                "node": int(path.name.removeprefix("node")),
                "cpus": read(path / "cpulist").strip() or None,
                "memory_gib": round(int(total[1]) / 2**20, 2) if total else None,
            }
        )
    return sorted(nodes, key=lambda n: n["node"]) or None


def memory_modules() -> dict | None:
    """{count, type, speed_mts, channels, gib} of the modules that are in: what they have in common, and None where
    they differ or nothing is told.

    `speed_mts` is what the firmware set them to, in MT/s. `channels` counts the channels that their slots name,
    and not every firmware names them. Read from what udev keeps of the firmware's tables, which themselves only
    root may read; nothing of it is to be had in most containers and virtual machines.
    """
    told: dict[str, dict[str, str]] = {}
    for number, name, value in re.findall(r"^E:MEMORY_DEVICE_(\d+)_(\w+)=(.*)$", read(UDEV), re.MULTILINE):
        if value != "Unknown":
            told.setdefault(number, {})[name] = value
    modules = [m for m in told.values() if m.get("SIZE", "").isdigit() and m.get("PRESENT") != "0"]
    if not modules:
        return None
    speed = _common([m.get("CONFIGURED_SPEED_MTS") or m.get("SPEED_MTS") for m in modules])
    channels = [_channel(m) for m in modules]
    return {
        "count": len(modules),
        "type": _common([m.get("TYPE") for m in modules]),
        "speed_mts": int(speed) if speed and speed.isdigit() else None,
        "channels": len(set(channels)) if all(channels) else None,
        "gib": round(sum(int(m["SIZE"]) for m in modules) / GIB, 1),
    }


def memory_speed(modules: dict | None) -> str | None:
    """Modules in a few words, as they are published: "DDR5-6400, 12 channels"; None unless both are known."""
    if modules is None or None in (modules["type"], modules["speed_mts"]):
        return None
    channels = f", {modules['channels']} channels" if modules["channels"] else ""
    return f"{modules['type']}-{modules['speed_mts']}{channels}"


def _channel(module: dict[str, str]) -> str | None:
    """The channel that a slot's name begins with: P0 CHANNEL A, Controller0-ChannelA, P0_Node0_Channel0."""
    for name in ("BANK_LOCATOR", "LOCATOR"):
        found = re.match(r".*CHANNEL[\W_]*([A-Z]|\d+)(?![A-Z])", module.get(name, ""), re.IGNORECASE)
        if found:
            return found[0]
    return None


def _common(values: list) -> str | None:
    return values[0] if len(set(values)) == 1 else None


def read(path: str | Path) -> str:
    """A file's text; "" when it is not there or not to be read."""
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
