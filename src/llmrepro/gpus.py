"""GPUs: NVIDIA's as their management library (NVML) tells of them, others only that they are there.

What a card or its driver does not support is None. Numbers are those of nvidia-smi, which counts in the order of
the PCI bus; engines are started with CUDA_DEVICE_ORDER=PCI_BUS_ID, so that they count alike.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pynvml

GIB = 2**30
VISIBLE = "CUDA_VISIBLE_DEVICES"
PCI = Path("/sys/bus/pci/devices")
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
DISPLAY, ACCELERATOR = "0x03", "0x12"  # PCI classes; AMD's cards without a display are of the second

# NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities": FP32 cores of a multiprocessor.
CORES_PER_MULTIPROCESSOR = {
    **{"6.0": 64, "6.1": 128, "7.0": 64, "7.2": 64, "7.5": 64, "8.0": 64},
    **{"8.6": 128, "8.7": 128, "8.9": 128, "9.0": 128, "10.0": 128, "10.3": 128, "12.0": 128, "12.1": 128},
}


class Found(NamedTuple):
    """`gpus` is None when it is not known whether there are any, and then `unknown` says why."""

    gpus: list[dict] | None
    unknown: str = ""


def describe() -> Found:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves, as JSON values.

    Of each: index, name, memory_gib, driver, compute_capability ("8.0"), power_limit_w (enforced: the least of all
    limits), power_limit_set_w, power_limit_default_w, sm_clock_mhz and memory_clock_mhz (now), their _max_mhz,
    pcie_generation and pcie_width (now: links drop when idle), their _max, multiprocessors.
    """
    try:
        with opened():
            driver = asked(pynvml.nvmlSystemGetDriverVersion)
            return Found([_facts(gpu, driver) for gpu in visible()])
    except pynvml.NVMLError as error:
        return Found(None, why(error))


def taken_gib() -> float | None:
    """Memory taken on the visible GPUs, by whomever; None where it cannot be told."""
    try:
        with opened():
            seen = [asked(pynvml.nvmlDeviceGetMemoryInfo, gpu.handle) for gpu in visible()]
    except pynvml.NVMLError:
        return None
    return round(sum(m.used for m in seen) / GIB, 3) if seen and None not in seen else None


def uuids() -> list[str]:
    """What names each visible card, a part's (MIG) whole one: its UUID, or the index of one that tells none. Empty
    where NVML tells nothing."""
    try:
        with opened():
            cards = [(gpu.index, asked(pynvml.nvmlDeviceGetHandleByIndex, gpu.index)) for gpu in visible()]
            return sorted({asked(pynvml.nvmlDeviceGetUUID, card) or str(index) for index, card in cards})
    except pynvml.NVMLError:
        return []


def power_limit_command(gpu: int, watts: float) -> str:
    """What a person types to set a card's power limit; it needs root, and lasts until the driver is unloaded."""
    return f"sudo nvidia-smi -i {gpu} -pl {watts:g}"


def line(gpu: dict) -> str:
    """A GPU in a few words, of what is known of it."""
    power, default = gpu["power_limit_w"], gpu["power_limit_default_w"]
    parts = [
        gpu["name"] or f"GPU {gpu['index']}, which does not tell its name",
        f"{gpu['memory_gib']:g} GiB" if gpu["memory_gib"] else "",
        f"compute capability {gpu['compute_capability']}" if gpu["compute_capability"] else "",
        f"power limit {power:g} W" + (f" (default {default:g})" if default not in (None, power) else "")
        if power
        else "",
        f"PCIe {gpu['pcie_generation_max']}.0 x{gpu['pcie_width_max']}"
        if gpu["pcie_generation_max"] and gpu["pcie_width_max"]
        else "",
        f"driver {gpu['driver']}" if gpu["driver"] else "",
    ]
    return ", ".join(part for part in parts if part)


def others() -> list[str] | None:
    """GPUs of AMD and Intel on the PCI bus, as "AMD GPU 1002:744c"; None when the bus is not to be seen."""
    found = _on_bus()
    return found and [name for name in found if not name.startswith("NVIDIA")]


class Gpu(NamedTuple):
    """A card that NVML knows; for `asked`, between `opened` and its end."""

    index: int
    handle: object  # None: NVML gives none for it


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """NVML, initialised. Raises pynvml.NVMLError; `why` has the sentence for it."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def asked(function, *args):
    """What NVML answers; None where the card, its driver or the rights of this process do not."""
    if None in args:
        return None
    try:
        return function(*args)
    except pynvml.NVMLError:
        return None


def visible() -> Iterator[Gpu]:
    """Those that CUDA would show: numbers, UUIDs or their beginnings, up to the first that names none or one again
    (NVIDIA, CUDA C++ Programming Guide, "CUDA Environment Variables")."""
    count = pynvml.nvmlDeviceGetCount()
    there = [Gpu(i, asked(pynvml.nvmlDeviceGetHandleByIndex, i)) for i in range(count)]
    named = os.environ.get(VISIBLE)
    if named is None:
        yield from there
        return
    seen = set()
    for word in map(str.strip, named.split(",")):
        gpu = _named(word, there)
        if gpu is None or word in seen or (gpu.index in seen and not word.startswith("MIG-")):
            return
        seen |= {word, gpu.index}
        yield gpu


def _named(word: str, there: list[Gpu]) -> Gpu | None:
    if word.isdecimal():
        return there[int(word)] if int(word) < len(there) else None
    if word.startswith("MIG-"):
        part = asked(pynvml.nvmlDeviceGetHandleByUUID, word)
        whole = asked(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, part)
        index = asked(pynvml.nvmlDeviceGetIndex, whole)
        return None if index is None else Gpu(index, part)
    fits = [g for g in there if word and str(asked(pynvml.nvmlDeviceGetUUID, g.handle)).startswith(word)]
    return fits[0] if len(fits) == 1 and word.startswith("GPU-") else None


def _facts(gpu: Gpu, driver: str | None) -> dict:
    handle = gpu.handle
    memory = asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    capability = capability and ".".join(map(str, capability))
    cores = asked(pynvml.nvmlDeviceGetNumGpuCores, handle)
    each = CORES_PER_MULTIPROCESSOR.get(capability)
    return {
        "index": gpu.index,
        "name": asked(pynvml.nvmlDeviceGetName, handle),
        "memory_gib": memory and round(memory.total / GIB, 2),
        "driver": driver,
        "compute_capability": capability,
        "power_limit_w": watts(asked(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "power_limit_set_w": watts(asked(pynvml.nvmlDeviceGetPowerManagementLimit, handle)),
        "power_limit_default_w": watts(asked(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "sm_clock_mhz": asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": asked(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "sm_clock_max_mhz": asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        "memory_clock_max_mhz": asked(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_MEM),
        "pcie_generation": asked(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": asked(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "pcie_generation_max": asked(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        "pcie_width_max": asked(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        "multiprocessors": cores // each if cores and each and cores % each == 0 else None,
    }


def watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else round(milliwatts / 1000, 1)


def why(error: pynvml.NVMLError) -> str:
    """Why NVML tells nothing, and whether a card is to be seen all the same."""
    said = {
        pynvml.NVMLError_LibraryNotFound: "libnvidia-ml.so.1, which comes with NVIDIA's driver, is not here",
        pynvml.NVMLError_DriverNotLoaded: "NVIDIA's driver is not loaded",
        pynvml.NVMLError_LibRmVersionMismatch: "NVIDIA's driver was updated while loaded; restart the machine",
    }.get(type(error), f"NVIDIA's driver says: {error}")
    bus = _on_bus()
    if bus is None:
        return f"{said}, and the PCI bus is not to be seen"
    seen = [name for name in bus if name.startswith("NVIDIA")]
    if not seen:
        return f"{said}, and no NVIDIA GPU is on the PCI bus"
    return f"{said}, while {', '.join(seen)} is on the PCI bus; in a container, start it with the GPUs given to it"


def _on_bus() -> list[str] | None:
    """Every GPU on the PCI bus by vendor and PCI id; None when there is no bus to see."""
    if not PCI.is_dir():
        return None
    found = []
    for device in sorted(PCI.iterdir()):
        told = {}
        for name in ("class", "vendor", "device"):
            with contextlib.suppress(OSError):
                told[name] = (device / name).read_text().strip()
        vendor = VENDORS.get(told.get("vendor"))
        kinds = (DISPLAY, ACCELERATOR) if vendor == "AMD" else (DISPLAY,)
        if vendor and told.get("class", "").startswith(kinds):
            ids = re.sub("0x", "", f"{told['vendor']}:{told.get('device', '?')}")
            found.append(f"{vendor} GPU {ids}")
    return found
