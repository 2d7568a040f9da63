"""What the guard allows while a server runs, and the sentences of a limit that a sample breaks."""

from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from llmrepro import gpus

# Below this a log that grows by a few hundred megabytes fills the disk, and a full disk loses records.
DISK_FLOOR_GIB = 0.5
# The kernel keeps tens to some hundreds of megabytes for itself, and ends a process rather than give them away.
# What is left of swap counts as memory.
MEMORY_FLOOR_GIB = 0.25
POWER_SLACK_W = 1.0  # drivers round a limit that was set
# Of NVIDIA's GPU errors those after which no measurement on that card is worth anything (NVIDIA, Xid Errors).
FATAL_XIDS = {
    48: "an ECC error of two bits in its memory",
    63: "a faulty row of its memory that was remapped, or a page that was retired",
    64: "a faulty row of its memory that could not be remapped, or a page that could not be retired",
    74: "an error of NVLink",
    79: "it has fallen off the bus",
    94: "an uncorrectable memory error that was contained",
    95: "an uncorrectable memory error that was not contained",
}


class Stop(NamedTuple):
    """Why the guard stops a server: what was found and what the limit is; and what to do next."""

    reason: str
    next_step: str


@dataclass(frozen=True)
class Limits:
    """None: no limit. Temperatures are the GPUs' where a recipe needs one, else the CPU's. `power_limit_w` is what
    each GPU was limited to when the run began, `gpu_count` how many there were, by `machine.describe`."""

    core_c: float | None = None
    memory_c: float | None = None
    power_limit_w: dict[int, float] = field(default_factory=dict)
    gpu_count: int = 0
    disk_free_gib: float = DISK_FLOOR_GIB
    memory_free_gib: float = MEMORY_FLOOR_GIB

    def told(self) -> dict:
        return asdict(self)


def fewer(there: int, limits: Limits, why: str = "") -> Stop | None:
    """The stop for GPUs that are gone since the run began; `why` is why NVML shows none."""
    if there >= limits.gpu_count:
        return None
    found = f"NVML shows {there} of the {limits.gpu_count} GPUs that there were when the run began"
    return Stop(
        found + (f": {why}" if why else ""), "look with nvidia-smi and in the kernel log; restart the machine"
    )


def broken(rows: list[dict], limits: Limits) -> Stop | None:
    """The first limit that a sample breaks: rows of host_samples and gpu_samples, all of one moment."""
    host, cards = rows[0], rows[1:]
    checks = [
        *(_lost(card) for card in cards),
        *(_hot(row, limits) for row in (cards or [host])),
        *(_power(card, limits) for card in cards),
        _memory(host, limits),
        _disk(host, limits),
    ]
    return next((stop for stop in checks if stop is not None), None)


def fatal(xid: int, gpu: int | None, text: str) -> Stop | None:
    """The stop for a GPU error after which nothing is measured, whenever it comes."""
    if xid not in FATAL_XIDS:
        return None
    who = "a GPU" if gpu is None else f"GPU {gpu}"
    return Stop(
        f"the driver reported Xid {xid} of {who}, {FATAL_XIDS[xid]}: {text}",
        "reset the GPU or restart the machine; if it comes again, have the card and its power looked at",
    )


def _lost(card: dict) -> Stop | None:
    if card["lost"] is None:
        return None
    return Stop(
        f"{_name(card)} is gone: NVML says {card['lost']}",
        "look with nvidia-smi and in the kernel log; restart the machine",
    )


def _hot(row: dict, limits: Limits) -> Stop | None:
    for key, what, most in (
        ("temperature_c", "", limits.core_c),
        ("memory_temperature_c", "the memory of ", limits.memory_c),
    ):
        found = row.get(key)
        if most is not None and found is not None and found > most:
            return Stop(
                f"{what}{_name(row)} was at {found:g} °C, and the recipe allows {most:g}",
                "let it cool down and see that air gets to it, or lower its power limit",
            )
    return None


def _power(card: dict, limits: Limits) -> Stop | None:
    before, now = limits.power_limit_w.get(_index(card)), card["power_limit_w"]
    if before is None or now is None or abs(now - before) <= POWER_SLACK_W:
        return None
    return Stop(
        f"the enforced power limit of {_name(card)} is {now:g} W, and it was {before:g} W when the run began",
        f"set it again ({gpus.power_limit_command(_index(card), before)}), or start a new run with this one",
    )


def _memory(host: dict, limits: Limits) -> Stop | None:
    free_gib = host["free_gib"] + host["swap_free_gib"]
    if free_gib >= limits.memory_free_gib:
        return None
    return Stop(
        f"{free_gib:.2f} GiB of memory were left, swap counted; below {limits.memory_free_gib:g} the system soon "
        "ends a process of its own choice",
        "close what else runs, or give the server a smaller context or model",
    )


def _disk(host: dict, limits: Limits) -> Stop | None:
    free_gib = host["disk_free_gib"]
    if free_gib >= limits.disk_free_gib:
        return None
    return Stop(
        f"{free_gib:.2f} GiB were free on the run folder's disk; below {limits.disk_free_gib:g} records get lost",
        "make room",
    )


def _name(row: dict) -> str:
    return "the CPU" if row["device"] == "host" else f"GPU {_index(row)}"


def _index(card: dict) -> int:
    return int(card["device"].removeprefix("gpu"))
