"""Xids are heard as they come: from NVML, else from the kernel's log; where neither may be read, it is unknown."""

import os
import threading
import time

import pynvml
import pytest
from nvml import Card, Library
from test_supervisor import soon

from llmrepro import gpus, xids

ONE_LINE = "NVRM: Xid (PCI:0000:db:00): 31, pid=13641, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"
TWO_LINES = "NVRM: Xid (PCI:0000:0a:00): 31, name=VLLM::EngineCor, channel 0x00000002."
CARDS = {(0, 0xDB, 0): 1, (0, 0x0A, 0): 0}


@pytest.mark.parametrize(
    ("line", "number", "gpu", "text"),
    [
        (ONE_LINE, 31, 1, "pid=13641, Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS"),
        (TWO_LINES, 31, 0, "name=VLLM::EngineCor, channel 0x00000002."),
        (f"[ 4711.123456] {TWO_LINES}", 31, 0, "name=VLLM::EngineCor, channel 0x00000002."),
        ("NVRM: Xid (0000:0a:00): 79, GPU has fallen off the bus.", 79, 0, "GPU has fallen off the bus."),
        ("NVRM: GPU 0000:0a:00.0: GPU has fallen off the bus.", 79, 0, "fallen off the bus."),
        ("NVRM: Xid (PCI:0000:77:00): 13, Graphics Exception", 13, None, "Graphics Exception"),
    ],
)
def test_an_xid_is_read_from_a_line_of_either_form(line, number, gpu, text):
    found = xids.of_line(line, CARDS)
    assert (found.number, found.gpu, found.text) == (number, gpu, text)
    assert 0 <= time.perf_counter_ns() - found.t_ns < 1e9


@pytest.mark.parametrize(
    "line", ["", "MMU Fault: ENGINE GRAPHICS", "NVRM: loading NVIDIA UNIX x86_64 Kernel Module", "usb 1-1: reset"]
)
def test_other_lines_of_the_kernel_are_no_xids(line):
    assert xids.of_line(line, CARDS) is None


@pytest.fixture
def heard():
    """What the watch tells: (found, ended)."""
    return [], []


def watch(used, heard):
    return xids.watch(used, heard[0].append, heard[1].append)


def opened(library):
    library.opened += 1
    return list(gpus.visible())


def test_nvml_tells_an_xid_with_its_card_the_moment_it_comes(monkeypatch, heard):
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    library = Library(monkeypatch, [Card(uuid="GPU-a"), Card(uuid="GPU-b")])
    assert watch(opened(library), heard) == "nvml"
    library.happens(library.cards[1], 31)
    assert soon(lambda: heard[0])
    assert (heard[0][0].number, heard[0][0].gpu) == (31, 1)
    library.sets[0][0].put(pynvml.NVMLError_GpuIsLost())  # ends the thread
    assert soon(lambda: heard[1] == ["NVML gives no more events (GPU is lost)"])


def test_an_event_that_is_waited_for_in_vain_is_waited_for_again(monkeypatch, heard):
    monkeypatch.setattr(xids, "WAIT_MS", 10)
    library = Library(monkeypatch, [Card()])
    watch(opened(library), heard)
    time.sleep(0.1)
    library.happens(library.cards[0], 79)
    assert soon(lambda: heard[0]) and not heard[1]
    library.sets[0][0].put(pynvml.NVMLError_GpuIsLost())


@pytest.fixture
def without_events(monkeypatch):
    """A card whose driver gives no events; the kernel's log decides."""
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    return opened(Library(monkeypatch, [Card(pci=(0, 0x0A, 0), tells_xids=False)]))


@pytest.fixture
def no_kmsg(monkeypatch, tmp_path):
    monkeypatch.setattr(xids, "KMSG", str(tmp_path / "kmsg"))


def journal(monkeypatch, folder, script):
    """A stand-in for journalctl, first on the PATH."""
    program = folder / "journalctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_without_events_the_journal_is_followed(monkeypatch, tmp_path, without_events, no_kmsg, heard):
    readable = (
        f'case "$*" in *--follow*) echo "{TWO_LINES}"; echo "MMU Fault: ENGINE CE3";; *) echo "Linux";; esac'
    )
    journal(monkeypatch, tmp_path, readable)
    assert watch(without_events, heard) == "kernel log"
    assert soon(lambda: heard[1]), "the journal has ended"
    assert [(x.number, x.gpu) for x in heard[0]] == [(31, 0)]
    assert heard[1] == ["the kernel's log can be read no longer"]


@pytest.mark.parametrize("script", ["exit 1", "exit 0", 'echo "No journal files were opened" >&2; exit 1'])
def test_a_journal_that_shows_nothing_of_the_kernel_is_unknown_and_not_none(
    monkeypatch, tmp_path, without_events, no_kmsg, heard, script
):
    journal(monkeypatch, tmp_path, script)
    assert watch(without_events, heard) == (
        f"unknown: NVML gives no events (Not Supported), {tmp_path}/kmsg may not be read (No such file or "
        "directory), and journalctl shows nothing of the kernel"
    )
    assert heard == ([], [])


def test_without_a_journal_it_is_unknown(monkeypatch, tmp_path, without_events, no_kmsg, heard):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert watch(without_events, heard).endswith("and there is no journalctl")


@pytest.mark.skipif(not os.access(xids.KMSG, os.R_OK), reason="the kernel's log may not be read here")
def test_the_kernels_own_log_is_read_where_it_may_be(monkeypatch, without_events, heard):
    lines = []
    monkeypatch.setattr(xids, "of_line", lambda line, _cards: lines.append(line))
    assert watch(without_events, heard) == "kernel log"
    time.sleep(0.2)
    assert heard == ([], []) and len(lines) < 20, "what was logged before is none of this run's"


def test_a_record_of_the_kernels_log_is_its_text():
    reader, writer = os.pipe()
    records = xids._records(reader)
    for text, properties in (
        (TWO_LINES + "\\x0aMMU Fault: ENGINE CE3", " SUBSYSTEM=pci\n DEVICE=+pci:0000:0a:00.0\n"),
        ("b;c", ""),
    ):
        threading.Thread(target=os.write, args=(writer, f"4,1339,5140900,-;{text}\n{properties}".encode())).start()
        found = next(records)
        assert found == text.replace("\\x0a", " ")
    os.close(writer)
    assert list(records) == []
    os.close(reader)
