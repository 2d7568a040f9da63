"""The facts about a machine: true here, read rightly of other machines, and unknown where nothing tells them."""

import json
import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from llmrepro import gpus, machine, memory_bandwidth, processor


def lscpu(*options: str) -> str:
    shown = subprocess.run(["lscpu", *options], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return shown.stdout


def listed(cpus: str | None) -> set[int]:
    """0-2,5 as the CPUs that it means."""
    ends = [part.split("-") for part in (cpus or "").split(",") if part]
    return {cpu for first, *last in ends for cpu in range(int(first), int((last or [first])[0]) + 1)}


def test_the_facts_here_are_those_of_proc_and_lscpu(tmp_path):
    facts = machine.describe(tmp_path)
    cpu = facts["cpu"]
    summary = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lscpu().splitlines())}
    assert (cpu["model"], cpu["architecture"]) == (summary["Model name"], summary["Architecture"])
    rows = [row.split(",") for row in lscpu("-p=CPU,CORE,NODE").splitlines() if not row.startswith("#")]
    assert cpu["physical_cores"] == len({core for _, core, _ in rows})
    assert 1 <= cpu["usable_cpus"] <= len(rows)
    l3 = [c for c in json.loads(lscpu("-J", "-B", "--caches=ALL-SIZE,LEVEL"))["caches"] if int(c["level"]) == 3]
    assert cpu["l3_mib"] == (int(l3[0]["all-size"]) / 2**20 if l3 else None)
    for node in cpu["numa_nodes"] or []:
        assert listed(node["cpus"]) == {int(cpu) for cpu, _, where in rows if where == str(node["node"])}
    (total_kb,) = re.findall(r"^MemTotal:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert facts["memory"]["total_gib"] == pytest.approx(int(total_kb) / 2**20, abs=0.01)
    assert 0 < facts["memory"]["available_gib"] <= facts["memory"]["total_gib"]
    assert facts["os"]["kernel"] == platform.release()
    assert json.loads(json.dumps(facts)) == facts
    assert "bandwidth" not in facts["memory"]  # nobody asked for it


def test_describing_is_quick_unless_bandwidth_is_asked_for(monkeypatch, tmp_path):
    def measure(l3_mib, available_bytes, threads):
        assert (l3_mib, threads) == (processor.l3_mib(), processor.usable_cores())
        return {"copy_gb_s": 40.0, "read_gb_s": 50.0}

    monkeypatch.setattr(memory_bandwidth, "measure", measure)
    facts = machine.describe(tmp_path, bandwidth=True)
    assert facts["memory"]["bandwidth_gb_s"] == 50.0  # the faster: it is a roof
    monkeypatch.setattr(memory_bandwidth, "measure", lambda *_: pytest.fail("it was measured"))
    machine.describe(tmp_path)
    assert machine.measured_bandwidth(facts)["bandwidth"] == facts["memory"]["bandwidth"]
    assert facts["memory"]["bandwidth"]["other_cpus"] >= 0
    elsewhere = {**facts, "cpu": {**facts["cpu"], "model": "another"}}
    monkeypatch.setattr(memory_bandwidth, "measure", lambda *_: None)
    assert machine.measured_bandwidth(elsewhere) == {"bandwidth_gb_s": None, "bandwidth": None}


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A made-up /sys/devices/system, and what udev knows of the firmware."""
    monkeypatch.setattr(processor, "SYSTEM", tmp_path)
    monkeypatch.setattr(processor, "UDEV", tmp_path / "dmi")

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    return write


def test_l3_is_the_sum_of_its_caches_each_counted_once(system):
    for cpu in range(8):  # four caches, each of two threads of one core, as an EPYC 9175F has sixteen
        for index, (level, size, shared) in enumerate(
            (("1", "48K", cpu), ("2", "1024K", cpu), ("3", "32768K", None))
        ):
            folder = f"cpu/cpu{cpu}/cache/index{index}"
            system(f"{folder}/level", level)
            system(f"{folder}/size", size)
            system(f"{folder}/shared_cpu_list", str(shared) if shared is not None else f"{cpu % 4},{cpu % 4 + 4}")
    assert processor.l3_mib() == 4 * 32


def test_numa_nodes_have_their_cpus_and_memory(system):
    for node, (cpus, kb) in enumerate((("0-7,16-23", 402653184), ("8-15,24-31", 402653184), ("", 134217728))):
        system(f"node/node{node}/cpulist", cpus)
        system(f"node/node{node}/meminfo", f"Node {node} MemTotal:       {kb} kB")
    assert processor.numa_nodes() == [
        {"node": 0, "cpus": "0-7,16-23", "memory_gib": 384.0},
        {"node": 1, "cpus": "8-15,24-31", "memory_gib": 384.0},
        {"node": 2, "cpus": None, "memory_gib": 128.0},  # of memory alone
    ]


def test_what_the_kernel_does_not_tell_is_unknown(system):
    assert processor.l3_mib() is None
    assert processor.numa_nodes() is None
    assert processor.memory_modules() is None
    assert processor.memory_speed(None) is None


def modules(count: int, *, bank="P0 CHANNEL {letter}", slot="DIMM {n}", speed="6400", kind="DDR5") -> str:
    lines = ["E:ID_VENDOR=a maker", f"E:MEMORY_ARRAY_NUM_DEVICES={count + 1}"]
    for n in range(count):
        told = {"SIZE": 64 * 2**30, "TYPE": kind, "SPEED_MTS": "7200", "CONFIGURED_SPEED_MTS": speed}
        told |= {"BANK_LOCATOR": bank.format(letter="ABCDEFGHIJKL"[n % 12], n=n), "LOCATOR": slot.format(n=n)}
        lines += [f"E:MEMORY_DEVICE_{n}_{name}={value}" for name, value in told.items()]
    lines += [f"E:MEMORY_DEVICE_{count}_PRESENT=0", f"E:MEMORY_DEVICE_{count}_TYPE=Unknown"]
    return "\n".join(lines)


def test_memory_modules_are_told_as_the_firmware_has_set_them(system):
    system("dmi", modules(12))
    found = processor.memory_modules()
    assert found == {"count": 12, "type": "DDR5", "speed_mts": 6400, "channels": 12, "gib": 768.0}
    assert processor.memory_speed(found) == "DDR5-6400, 12 channels"


@pytest.mark.parametrize(
    ("count", "bank", "slot", "channels"),
    [
        (2, "BANK {n}", "Controller{n}-ChannelA-DIMM0", 2),  # of two controllers, each with a channel A
        (4, "P0_Node0_Channel{n}_Dimm0", "DIMM{n}", 4),
        (24, "P0 CHANNEL {letter}", "DIMM {n}", 12),  # two modules in each
        (2, "BANK {n}", "DIMM_A{n}", None),  # no word of channels
    ],
)
def test_channels_are_counted_where_slots_name_them(system, count, bank, slot, channels):
    system("dmi", modules(count, bank=bank, slot=slot))
    assert processor.memory_modules()["channels"] == channels


def test_modules_that_differ_have_no_speed_in_common(system):
    system("dmi", modules(1) + "\n" + modules(2, speed="4800").replace("MEMORY_DEVICE_", "MEMORY_DEVICE_1"))
    found = processor.memory_modules()
    assert (found["count"], found["type"], found["speed_mts"]) == (3, "DDR5", None)
    assert processor.memory_speed(found) is None


@pytest.mark.parametrize(
    ("files", "variables", "said"),
    [
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": "", ".dockerenv": ""}, {}, "podman"),
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({"proc/1/cgroup": "1:name=systemd:/kubepods/burstable/pod1"}, {}, "kubernetes"),
        ({"proc/1/cgroup": "4:memory:/lxc/one"}, {}, "lxc"),
        ({"run/systemd/container": "systemd-nspawn\n"}, {}, "systemd-nspawn"),
        ({"proc/1/cgroup": "0::/init.scope"}, {}, "none seen"),
    ],
)
def test_a_container_is_told_by_its_traces(monkeypatch, tmp_path, files, variables, said):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert machine.describe(tmp_path)["os"]["container"] == said


def test_what_is_shown_says_what_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "describe", lambda: gpus.Found(None, "nobody can tell"))
    monkeypatch.setattr(gpus, "others", lambda: ["AMD GPU 1002:744c"])
    shown = dict(machine.told(machine.describe(tmp_path)))
    assert shown["GPU"] == "unknown: nobody can tell; AMD GPU 1002:744c"
    assert "GB/s" not in shown["memory"]
    monkeypatch.setattr(gpus, "describe", lambda: gpus.Found([]))
    monkeypatch.setattr(gpus, "others", lambda: None)
    facts = machine.describe(tmp_path)
    facts["memory"] |= {"bandwidth_gb_s": 47.5, "speed": "DDR5-6400"}
    shown = dict(machine.told(facts))
    assert shown["GPU"] == "none"
    assert shown["memory"].endswith("GiB free, DDR5-6400, 47.5 GB/s measured")
    facts["memory"]["bandwidth"] = {"other_cpus": 1.5}
    assert dict(machine.told(facts))["memory"].endswith("measured while other programs kept 1.5 CPUs busy")
