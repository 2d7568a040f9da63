"""Xids, the errors that NVIDIA's driver reports of a GPU, as they come: from NVML's events or the kernel's log.

Where neither may be read it is unknown whether there was one.
"""

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pynvml

from llmrepro import gpus
from llmrepro.gpus import Gpu

NVML, KERNEL_LOG, UNKNOWN = "nvml", "kernel log", "unknown"
KMSG = "/dev/kmsg"
JOURNAL = ("journalctl", "--dmesg", "--output=cat", "--quiet")
ANSWER_S = 5.0  # for the journal to show that it may be read
WAIT_MS = 1000  # for one event; then it is waited for again
FALLEN = 79
LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+),? ?(.*)")
FALLEN_LINE = re.compile(r"NVRM: .*?([0-9a-fA-F]{1,8}:[0-9a-fA-F]{1,2}:[0-9a-fA-F]{1,2}).*(fallen off the bus.*)")


class Xid(NamedTuple):
    """One error. `gpu` is the card's NVML index, None where it is not known of which card it is."""

    t_ns: int  # perf_counter_ns when it was read
    number: int
    gpu: int | None
    text: str


def watch(used: list[Gpu], found: Callable[[Xid], None], ended: Callable[[str], None]) -> str:
    """Call `found` from a thread for each Xid from now on. To be called while NVML is open.

    Returns where they are read: "nvml", which tells those of the cards in `used`; "kernel log", which tells those
    of all; or "unknown: why". `ended(why)` is called when that can be read no longer.
    """
    try:
        events = _registered(used)
    except pynvml.NVMLError as error:
        nvml = f"NVML gives no events ({error})"
    else:
        _in_thread(lambda: _wait_for(events, found, ended))
        return NVML
    lines, log = _kernel_log()
    if lines is None:
        return f"{UNKNOWN}: {nvml}, {log}"
    cards = _addresses()
    _in_thread(lambda: _read(lines, cards, found, ended))
    return KERNEL_LOG


def of_line(line: str, cards: dict[tuple, int]) -> Xid | None:
    """The Xid that a line of the kernel's log reports, or None. `cards` are NVML indexes by PCI address."""
    xid, fallen = LINE.search(line), FALLEN_LINE.search(line)
    if xid is None and fallen is None:
        return None
    where, number, text = xid.groups() if xid else (fallen[1], FALLEN, fallen[2])
    return Xid(time.perf_counter_ns(), int(number), cards.get(_address(where)), text.strip())


def _address(text: str) -> tuple | None:
    """Domain, bus and device of 0000:db:00, 00000000:DB:00.0 or db:00."""
    try:
        numbers = [int(part, 16) for part in text.partition(".")[0].split(":")]
    except ValueError:
        return None
    return tuple([0, 0, 0, *numbers][-3:])


def _addresses() -> dict[tuple, int]:
    found = {}
    for index in range(gpus.asked(pynvml.nvmlDeviceGetCount) or 0):
        pci = gpus.asked(pynvml.nvmlDeviceGetPciInfo, gpus.asked(pynvml.nvmlDeviceGetHandleByIndex, index))
        if pci is not None:
            found[(pci.domain, pci.bus, pci.device)] = index
    return found


def _registered(used: list[Gpu]):
    events = pynvml.nvmlEventSetCreate()
    try:
        for gpu in used:
            pynvml.nvmlDeviceRegisterEvents(gpu.handle, pynvml.nvmlEventTypeXidCriticalError, events)
    except pynvml.NVMLError:
        pynvml.nvmlEventSetFree(events)
        raise
    return events


def _wait_for(events, found: Callable[[Xid], None], ended: Callable[[str], None]) -> None:
    while True:
        try:
            event = pynvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except pynvml.NVMLError_Timeout:
            continue
        except pynvml.NVMLError as error:  # of a lost card as well, whose loss is seen by asking it
            return ended(f"NVML gives no more events ({error})")
        if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
            gpu = gpus.asked(pynvml.nvmlDeviceGetIndex, event.device)
            found(Xid(time.perf_counter_ns(), event.eventData, gpu, "told by NVML, which gives no text"))


def _read(lines: Iterator[str], cards: dict, found: Callable[[Xid], None], ended: Callable[[str], None]) -> None:
    for line in lines:
        xid = of_line(line, cards)
        if xid is not None:
            found(xid)
    ended("the kernel's log can be read no longer")


def _kernel_log() -> tuple[Iterator[str] | None, str]:
    """Its lines from now on; or None, and why."""
    try:
        log = os.open(KMSG, os.O_RDONLY)
        os.lseek(log, 0, os.SEEK_END)
        return _records(log), ""
    except OSError as error:
        kmsg = f"{KMSG} may not be read ({error.strerror})"
    program = shutil.which(JOURNAL[0])
    if program is None:
        return None, f"{kmsg}, and there is no {JOURNAL[0]}"
    try:  # who may not read the kernel's messages is shown none, and is not told by the exit code
        shown = subprocess.run(
            [program, *JOURNAL[1:], "--lines=1"], capture_output=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{kmsg}, and {JOURNAL[0]} does not answer ({type(error).__name__})"
    if not shown.stdout.strip():
        return None, f"{kmsg}, and {JOURNAL[0]} shows nothing of the kernel"
    follow = subprocess.Popen(
        [program, *JOURNAL[1:], "--lines=0", "--follow"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    return (line.decode(errors="replace") for line in follow.stdout), ""


def _records(log: int) -> Iterator[str]:
    """The texts of /dev/kmsg's records: `priority,number,time,flags;text`, then lines of properties, which begin
    with a blank. A line break within a text is written \\x0a."""
    while True:
        try:
            record = os.read(log, 8192)
        except BrokenPipeError:  # what was to be read next has been overwritten: go on with the oldest there is
            continue
        except OSError:
            return
        if not record:
            return
        text = record.decode(errors="replace").partition(";")[2].partition("\n")[0]
        yield text.replace("\\x0a", " ")


def _in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, daemon=True).start()
