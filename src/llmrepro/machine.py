"""What this machine is. A fact that cannot be found is None, never zero."""

import os
import platform
import re
import shutil
import sys
from pathlib import Path

import psutil

from llmrepro import __version__, gpus, processor
from llmrepro.stopwatch import Stopwatch

GIB = 2**30
DISTURBING_CPUS = 0.25  # others' work that is worth a word beside a measured bandwidth
KIT = Path(__file__).resolve().parent


def describe(folder: Path, bandwidth: bool = False) -> dict:
    """Facts about this machine as JSON values; `folder` is where disk space is asked for.

    `gpus` is None where it is not known whether there are any, with the reason in `gpus_unknown`. With `bandwidth`
    what `measured_bandwidth` finds is among the facts of memory, which takes up to two seconds.
    """
    memory = psutil.virtual_memory()
    found, modules = gpus.describe(), processor.memory_modules()
    visible = os.environ.get(gpus.VISIBLE)
    facts = {
        "cpu": processor.describe(),
        "memory": {
            "total_gib": round(memory.total / GIB, 2),
            "available_gib": round(memory.available / GIB, 2),
            "modules": modules,
            "speed": processor.memory_speed(modules),
        },
        "disk_free_gib": round(shutil.disk_usage(_existing(folder)).free / GIB, 1),
        "gpus": found.gpus,
        **({"gpus_unknown": found.unknown} if found.gpus is None else {}),
        **({"cuda_visible_devices": visible} if visible is not None else {}),
        "other_gpus": gpus.others(),
        "os": {
            "name": _os_name(),
            "kernel": platform.release(),
            "hypervisor": _hypervisor(),
            "container": _container(),
        },
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "llmrepro": __version__,
    }
    if bandwidth:
        facts["memory"] |= measured_bandwidth()
    return facts


def differing(then: dict, now: dict) -> list[str]:
    """Names of what decides of a machine and is not the same in two descriptions of it: its processor, memory, and
    GPUs with their enforced power limits."""
    return [name for name, of in _DECIDING.items() if of(then) != of(now)]


_DECIDING = {
    "processor": lambda f: [f["cpu"].get(k) for k in ("model", "architecture", "physical_cores")],
    "memory": lambda f: round(f["memory"]["total_gib"]),
    "GPUs": lambda f: [[g.get(k) for k in ("name", "memory_gib", "power_limit_w")] for g in f["gpus"] or []],
}


def measured_bandwidth(earlier: dict | None = None) -> dict:
    """`bandwidth_gb_s`, the faster of reading and copying, for a roofline, and `bandwidth`, all that
    `memory_bandwidth.measure` tells, with the CPUs that other programs kept busy meanwhile; both None where memory
    is too little to measure it.

    `earlier` facts of the same CPU that hold it already spare the measurement.
    """
    known = (earlier or {}).get("memory", {})
    if known.get("bandwidth") and earlier["cpu"] == processor.describe():
        return {name: known[name] for name in ("bandwidth_gb_s", "bandwidth")}
    from llmrepro import memory_bandwidth  # numpy, which most commands do not wait for

    available = psutil.virtual_memory().available
    watch = Stopwatch()
    found = memory_bandwidth.measure(processor.l3_mib(), available, processor.usable_cores())
    if found is not None:
        found["other_cpus"] = watch.reading(os.getpid())["other_cpus"]
    return {"bandwidth_gb_s": found and max(found["read_gb_s"], found["copy_gb_s"]), "bandwidth": found}


def threads() -> int:
    """Threads for a CPU engine: usable physical cores less one for the client, at most 8, at least 1.

    llama.cpp's threads spin at a barrier: with every core taken, whatever else runs stops them all.
    A model that fits a laptop gains nothing beyond eight.
    """
    return max(1, min(8, processor.usable_cores() - 1))


def told(facts: dict) -> list[tuple[str, str]]:
    """What `describe` found, as rows to look at: those facts that decide what can run and how fast."""
    cpu, memory, os_ = facts["cpu"], facts["memory"], facts["os"]
    l3 = f", {cpu['l3_mib']:g} MiB of L3 cache" if cpu["l3_mib"] else ""
    nodes = len(cpu["numa_nodes"] or [])
    bandwidth = memory.get("bandwidth_gb_s")
    others = (memory.get("bandwidth") or {}).get("other_cpus") or 0
    beside = f" while other programs kept {others:g} CPUs busy" if others >= DISTURBING_CPUS else ""
    shown = [
        f"{memory['available_gib']:g} of {memory['total_gib']:g} GiB free",
        memory["speed"],
        f"{bandwidth:g} GB/s measured{beside}" if bandwidth else "",
    ]
    cards = "; ".join(map(gpus.line, facts["gpus"] or []))
    unknown = "none" if facts["gpus"] is not None else f"unknown: {facts.get('gpus_unknown')}"
    named = f" ({os_['hypervisor']})" if os_["hypervisor"] != "not named" else ""
    virtual = f"virtual machine{named}" if os_["hypervisor"] else ""
    inside = "" if os_["container"] == "none seen" else f"in a container ({os_['container']})"
    system = [os_["name"], virtual, inside, f"load {facts['load_1min']:g}"]
    return [
        (
            "processor",
            f"{cpu['model'] or 'unknown'} · {cpu['physical_cores']} cores, {threads()} for the engine{l3}"
            + (f", {nodes} NUMA nodes" if nodes > 1 else ""),
        ),
        ("memory", ", ".join(part for part in shown if part)),
        ("GPU", "; ".join([cards or unknown, *(facts["other_gpus"] or [])])),
        ("disk", f"{facts['disk_free_gib']:g} GiB free"),
        ("system", ", ".join(part for part in system if part)),
    ]


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        return f"{platform.system()} {sys.platform}"


def _hypervisor() -> str | None:
    """The product the firmware names when the CPU says that it is virtual; None when it does not say so."""
    if " hypervisor" not in processor.read("/proc/cpuinfo"):
        return None
    return processor.read("/sys/class/dmi/id/product_name").strip() or "not named"


ROOT = Path("/")
CONTAINERS = ("kubepods", "docker", "libpod", "lxc", "containerd")


def _container() -> str:
    """What a container's first process, its files or its variables say of it; "none seen" where none do."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (ROOT / "run/.containerenv").exists():
        return "podman"
    if (ROOT / ".dockerenv").exists():
        return "docker"
    named = processor.read(ROOT / "run/systemd/container").strip()
    groups = processor.read(ROOT / "proc/1/cgroup")
    found = named or next((c for c in CONTAINERS if f"/{c}" in groups), None)
    return {"kubepods": "kubernetes", "libpod": "podman", None: "none seen"}.get(found, found)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


def minimal_environment() -> dict[str, str]:
    """What an engine and its tools inherit: enough to find programs, caches and its locale, the GPUs that it may
    use, counted as NVML counts them, and none of the user's tokens."""
    names = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "XDG_CACHE_HOME", gpus.VISIBLE)
    return {**{name: os.environ[name] for name in names if name in os.environ}, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


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


def private(text: str) -> str:
    """A text for others: what tells of this machine's folders is replaced by what they are, so that no user, home
    or project is named: {cache}, {kit}, {venv} the notebook's own environment, {project} the kit's checkout, ~."""
    own = [("{venv}", Path(sys.prefix))] if sys.prefix != sys.base_prefix else []
    for name, folder in (
        ("{cache}", cache_dir()),
        ("{kit}", KIT),
        *own,
        ("{project}", KIT.parents[1]),
        ("~", Path.home()),
    ):
        if folder != Path("/"):
            text = re.sub(rf"{re.escape(str(folder))}(?![\w.-])", lambda _, name=name: name, text)
    return text


def expanded(path: str) -> Path:
    """The path on this machine of one that `shortened` made."""
    return Path(path.replace("{cache}", str(cache_dir())).replace("{kit}", str(KIT)))
