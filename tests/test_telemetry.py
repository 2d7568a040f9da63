"""What the sampler writes is what the machine does; what cannot be known is an empty cell; why it ends is told."""

import csv
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest
from nvml import Card, Library
from test_supervisor import kill, soon

from llmrepro import gpu_samples, gpus, guard_log, host_samples, process_tree, telemetry, xids
from llmrepro.host_samples import Host
from llmrepro.process_tree import Tree

GIB = 2**30


def rows(folder: Path, device: str | None = None) -> list[dict]:
    """Whole rows of telemetry.csv."""
    path = folder / "telemetry.csv"
    text = path.read_text() if path.exists() else ""
    found = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [row for row in found if device in (None, row["device"])]


def told(folder: Path, boot: int = 1) -> list[dict]:
    path = folder / guard_log.name(boot)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def command(folder: Path, *options) -> list[str]:
    return [sys.executable, "-P", "-m", "llmrepro.telemetry", str(folder), "1", *options]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "boots").mkdir()
    return tmp_path


@pytest.fixture
def start(folder):
    """The sampler in its own process, as a child of this one."""
    started = []

    def begin(*options):
        started.append(subprocess.Popen(command(folder, *options)))
        return started[-1]

    yield begin
    for process in started:
        process.terminate()
        process.wait()


@pytest.fixture
def inside(monkeypatch, folder):
    """The sampler in a thread of this process, beside the cards of a stand-in for NVML; losing one ends it."""
    monkeypatch.setattr(telemetry, "PERIOD_S", 0.02)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    threads, cards = [], []

    def begin(library, *options):
        cards.extend(library.cards)
        codes = []
        words = [str(folder), "1", "--gpus", "1", *options]
        threads.append(threading.Thread(target=lambda: codes.append(telemetry.main(words))))
        threads[-1].start()
        return threads[-1], codes

    yield begin
    for card in cards:
        card.lost = True
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


# the machine


def test_a_row_holds_what_the_machine_itself_says(start, folder):
    start()
    assert soon(lambda: len(rows(folder)) >= 3)
    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
    first, *_, last = rows(folder)
    assert ",".join(first) == (
        "t_ns,boot,device,busy,memory_gib,free_gib,page_cache_gib,steal_share,temperature_c,memory_temperature_c,"
        "power_w,power_limit_w,energy_j,sm_clock_mhz,memory_clock_mhz,pcie_generation,pcie_width,throttle,server_cpus,"
        "server_gib,disk_free_gib,sampler_cpu_s"
    )
    assert {row["device"] for row in rows(folder)} == {"host"} and last["boot"] == "1"
    assert float(last["memory_gib"]) + float(last["free_gib"]) == pytest.approx(memory.total / GIB, abs=0.01)
    assert float(last["free_gib"]) == pytest.approx(memory.available / GIB, abs=1.5)
    assert float(last["page_cache_gib"]) == pytest.approx(memory.cached / GIB, abs=1.5)
    assert float(last["disk_free_gib"]) == pytest.approx(disk.free / GIB, abs=1.5)
    assert 0 < float(last["sampler_cpu_s"]) < 30
    assert 0 <= time.perf_counter_ns() - int(last["t_ns"]) < 60e9, "the clock that all processes share"
    assert first["busy"] == first["steal_share"] == "", "over no time nothing is known"
    assert 0 <= float(last["busy"]) <= psutil.cpu_count() * 1.1
    assert all(last[name] == "" for name in ("power_w", "sm_clock_mhz", "memory_temperature_c", "throttle"))


def test_the_servers_processes_are_counted_and_the_sampler_is_not(start, folder):
    burn = "import time; held = bytearray(80 * 2**20); end = time.time() + 60\nwhile time.time() < end: pass"
    family = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    started = [subprocess.Popen([sys.executable, "-c", family])]
    try:
        assert soon(lambda: len(psutil.Process(started[0].pid).children()) == 1)
        sampler = start()
        assert soon(lambda: any(float(row["server_cpus"] or 0) > 0.1 for row in rows(folder)))
        everybody = psutil.Process().children(recursive=True)
        resident = sum(p.memory_info().rss for p in everybody if p.pid != sampler.pid)
        last = rows(folder)[-1]
        assert float(last["server_gib"]) == pytest.approx(resident / GIB, rel=0.05) and resident > 90 * 2**20
        assert float(last["server_cpus"]) <= float(last["busy"]) * 1.2
    finally:
        kill([*psutil.Process(started[0].pid).children(), psutil.Process(started[0].pid)])
        started[0].wait()


def test_where_the_server_is_elsewhere_it_is_unknown_until_a_file_names_its_process(start, folder):
    server = subprocess.Popen([sys.executable, "-c", "held = bytearray(80 * 2**20); import time; time.sleep(600)"])
    try:
        start("--pid-file", str(folder / "boots" / "1.pid"))
        assert soon(lambda: rows(folder))
        assert rows(folder)[-1]["server_gib"] == ""
        (folder / "boots" / "1.pid").write_text(f"{server.pid}")
        assert soon(lambda: rows(folder)[-1]["server_cpus"] != "")
        assert float(rows(folder)[-1]["server_gib"]) == pytest.approx(
            psutil.Process(server.pid).memory_info().rss / GIB, rel=0.05
        )
        server.kill()
        server.wait()
        assert soon(lambda: rows(folder)[-1]["server_gib"] == ""), "no process uses nothing: it is unknown again"
    finally:
        server.kill()
        server.wait()


def test_who_ended_still_counts_and_looking_reads_only_who_is_new_or_in_the_tree(monkeypatch):
    """This test's own process stands for the one that inherits orphans, and waits for them."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    tree = Tree(os.getpid())
    before = tree.look()
    child = subprocess.Popen([sys.executable, "-c", burn])
    assert soon(lambda: tree.look().processes == before.processes + 1)
    child.wait()
    after = tree.look()
    assert after.processes == before.processes
    assert after.cpu_s - before.cpu_s >= 0.25
    asked, stat = [], process_tree._stat
    monkeypatch.setattr(process_tree, "_stat", lambda pid: asked.append(pid) or stat(pid))
    tree.look()
    assert len(asked) < len(psutil.pids()) / 2 and os.getpid() in asked


def test_a_tree_whose_root_is_gone_tells_nothing():
    child = subprocess.Popen(["sleep", "600"])
    tree = Tree(child.pid, counted=True)
    assert tree.look().processes == 1
    child.kill()
    child.wait()
    assert tree.look() is None


def sensors(monkeypatch, folder, chips: dict[str, dict[str, int]]):
    """Sensors of the kernel: {driver: {label: millidegrees}}."""
    monkeypatch.setattr(host_samples, "HWMON", folder / "hwmon")
    for number, (driver, readings) in enumerate(chips.items()):
        chip = folder / "hwmon" / f"hwmon{number}"
        chip.mkdir(parents=True)
        (chip / "name").write_text(f"{driver}\n")
        for place, (label, value) in enumerate(readings.items(), 1):
            (chip / f"temp{place}_input").write_text(f"{value}\n")
            if label:
                (chip / f"temp{place}_label").write_text(f"{label}\n")


@pytest.mark.parametrize(
    ("chips", "core_c"),
    [
        ({}, None),
        ({"nvme": {"Composite": 70000}, "coretemp": {"Package id 0": 51000, "Core 0": 62000}}, 51.0),
        ({"coretemp": {"Package id 0": 51000, "Package id 1": 55500}}, 55.5),
        ({"k10temp": {"Tctl": 72000, "Tdie": 45000, "Tccd1": 50000}}, 45.0),
        ({"k10temp": {"Tctl": 72000}}, 72.0),
        ({"cpu_thermal": {"": 48312}}, 48.312),
    ],
)
def test_the_temperature_is_that_of_the_hottest_cpu_package(monkeypatch, folder, chips, core_c):
    sensors(monkeypatch, folder, chips)
    assert Host(folder).sample(1)["temperature_c"] == core_c


def counters(monkeypatch, folder, **zones: dict):
    monkeypatch.setattr(host_samples, "POWERCAP", folder)
    for name, (kind, microjoules) in zones.items():
        zone = folder / name.replace("_", ":").replace("intel:rapl", "intel-rapl")
        zone.mkdir(exist_ok=True)
        for file, text in (("name", kind), ("energy_uj", microjoules), ("max_energy_range_uj", 262_143_328_850)):
            (zone / file).write_text(f"{text}\n")


def test_energy_is_summed_over_packages_and_goes_on_when_a_counter_turns_over(monkeypatch, folder):
    others = {"intel_rapl_0_0": ("core", 5_000_000), "intel_rapl_2": ("psys", 9_000_000)}
    counters(
        monkeypatch, folder, intel_rapl_0=("package-0", 262_143_000_000), intel_rapl_1=("package-1", 7), **others
    )
    host = Host(folder)
    assert host.sample(1)["energy_j"] == 0
    others = {"intel_rapl_0_0": ("core", 9_000_000), "intel_rapl_2": ("psys", 99_000_000)}
    counters(
        monkeypatch, folder, intel_rapl_0=("package-0", 1_671_150), intel_rapl_1=("package-1", 1_000_007), **others
    )
    assert host.sample(2)["energy_j"] == pytest.approx(0.328850 + 1.671150 + 1.0)


def test_energy_is_unknown_when_one_package_may_not_be_read(monkeypatch, folder):
    counters(monkeypatch, folder, intel_rapl_0=("package-0", 1), intel_rapl_1=("package-1", "denied"))
    assert Host(folder).sample(1)["energy_j"] is None


# GPUs


def test_a_gpus_row_holds_what_nvml_tells(monkeypatch, inside, folder):
    card = Card(memory_bytes=64 * GIB, used_bytes=48 * GIB, busy_percent=75, core_c=71, memory_c=83)
    card.power_mw, card.energy_mj, card.reasons = 178_250, 12_345_678, 0x1 | 0x4 | 0x40
    library = Library(monkeypatch, [card, Card()])
    inside(library)
    assert soon(lambda: len(rows(folder, "gpu0")) >= 2)
    row = rows(folder, "gpu0")[0]
    assert {name: value for name, value in row.items() if value != ""} == {
        **{"t_ns": row["t_ns"], "boot": "1", "device": "gpu0", "busy": "0.750", "memory_gib": "48.000"},
        **{"free_gib": "16.000", "temperature_c": "71", "memory_temperature_c": "83", "power_w": "178.2"},
        **{"power_limit_w": "180.0", "energy_j": "12345.678", "sm_clock_mhz": "1140", "memory_clock_mhz": "1728"},
        **{"pcie_generation": "1", "pcie_width": "16", "throttle": "power_cap+hw_thermal"},
    }
    assert row["t_ns"] == rows(folder, "host")[0]["t_ns"], "the rows of one sample have one time"
    assert not rows(folder, "gpu1"), "a GPU that the recipe does not take is none of the run's"


def test_what_a_card_does_not_tell_is_unknown_and_older_drivers_are_asked_as_they_answer(monkeypatch):
    bare = Card(busy_percent=None, core_c=None, memory_c=None, power_mw=None, energy_mj=None, reasons=None)
    library = Library(monkeypatch, [bare])
    library.opened = 1
    row = gpu_samples.sample(gpus.Gpu(0, bare))
    names = ("busy", "temperature_c", "memory_temperature_c", "power_w", "energy_j", "throttle", "lost")
    assert [row[name] for name in names] == [None] * 7
    bare.core_c_as_older_drivers_tell, bare.reasons_as_older_drivers_tell = 66, 0x8
    row = gpu_samples.sample(gpus.Gpu(0, bare))
    assert (row["temperature_c"], row["throttle"]) == (66, "hw_slowdown")


@pytest.mark.parametrize(
    ("reasons", "words"), [(0, ""), (0x1, ""), (0x1 | 0x20, "sw_thermal"), (0x4 | 0x1000, "power_cap+0x1000")]
)
def test_what_holds_a_card_back_is_told_in_words(monkeypatch, reasons, words):
    card = Card(reasons=reasons)
    Library(monkeypatch, [card]).opened = 1
    assert gpu_samples.sample(gpus.Gpu(0, card))["throttle"] == words


@pytest.mark.parametrize(
    ("card", "said"), [(Card(lost=True), "GPU is lost"), (None, "it answers nothing"), (Card(), None)]
)
def test_a_lost_card_is_told_from_one_that_only_does_not_know(monkeypatch, card, said):
    Library(monkeypatch, [card] if card else []).opened = 1
    assert gpu_samples.sample(gpus.Gpu(0, card))["lost"] == said


# the file


def test_a_later_boot_goes_on_in_the_same_table_and_half_a_row_is_none(start, folder):
    header = ",".join(telemetry.COLUMNS)
    (folder / "telemetry.csv").write_text(f"{header}\n7,1,host{',' * 19}\n8,1,ho")
    start()
    assert soon(lambda: len(rows(folder)) >= 2)
    text = (folder / "telemetry.csv").read_text()
    assert text.count(header) == 1 and text.splitlines()[1] == f"7,1,host{',' * 19}"
    assert all(len(line.split(",")) == len(telemetry.COLUMNS) for line in text.splitlines())


def test_a_late_sample_delays_no_later_one_and_missed_ticks_are_left_out(monkeypatch, folder):
    clock, begun = SimpleNamespace(s=0.0), []
    lasts = iter([0.1, 2.3, 0.5, 1.0, 0.0])

    def sample(sampler):
        begun.append(clock.s)
        clock.s += next(lasts)
        if len(begun) == 5:
            sampler.stop = telemetry.limits.Stop("that is enough", "")

    monkeypatch.setattr(telemetry.Sampler, "_sample", sample)
    monkeypatch.setattr(
        telemetry.Sampler, "_listen", lambda _sampler, left_s: setattr(clock, "s", clock.s + left_s)
    )
    with ExitStack() as held:
        sampler = telemetry.Sampler(telemetry._parser().parse_args([str(folder), "1"]), os.getppid(), held)
        monkeypatch.setattr(
            telemetry, "time", SimpleNamespace(monotonic=lambda: clock.s, perf_counter_ns=lambda: 1)
        )
        sampler.run()
    assert begun == [0, 1, 4, 5, 7]


def test_it_ends_with_the_process_that_started_it(folder):
    asks = (
        f"import subprocess, time; print(subprocess.Popen({command(folder)!r}).pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", asks], stdout=subprocess.PIPE)
    sampler = psutil.Process(int(parent.stdout.readline()))
    try:
        assert soon(lambda: rows(folder))
        parent.kill()
        parent.wait()
        assert soon(lambda: not sampler.is_running() or sampler.status() == psutil.STATUS_ZOMBIE)
    finally:
        kill([sampler])
        parent.stdout.close()


# the guard


def test_a_gpu_that_gets_too_hot_ends_it_with_the_reason(monkeypatch, inside, folder):
    card = Card(core_c=79, memory_c=85)
    thread, codes = inside(Library(monkeypatch, [card]), "--core-c", "80", "--memory-c", "85")
    assert soon(lambda: len(rows(folder, "gpu0")) >= 2), "a limit that is reached is not broken"
    card.memory_c = 86
    thread.join(10)
    assert codes == [telemetry.STOPPED]
    watch, stop = told(folder)
    assert watch["kind"] == "watch" and watch["gpus"] == [0] and watch["xids"] == "nvml"
    assert watch["limits"]["core_c"] == 80 and watch["limits"]["memory_c"] == 85
    assert stop["reason"] == "the memory of GPU 0 was at 86 °C, and the recipe allows 85" and stop["next_step"]
    assert rows(folder, "gpu0")[-1]["memory_temperature_c"] == "86", "the sample that stopped it is in the table"


def test_xids_are_written_as_they_come_and_a_fatal_one_ends_it(monkeypatch, inside, folder):
    monkeypatch.setattr(telemetry, "PERIOD_S", 60)  # it does not wait for the next sample
    library = Library(monkeypatch, [Card(), Card()])
    thread, codes = inside(library)
    assert soon(lambda: library.sets and told(folder))
    library.happens(library.cards[0], 31)
    assert soon(lambda: [line["kind"] for line in told(folder)] == ["watch", "xid"])
    library.happens(library.cards[0], 79)
    thread.join(10)
    assert codes == [telemetry.STOPPED]
    _, first, second, stop = told(folder)
    assert (first["xid"], first["gpu"], second["xid"]) == (31, 0, 79)
    assert "Xid 79 of GPU 0" in stop["reason"] and "fallen off the bus" in stop["reason"]
    assert watch_times(folder) == sorted(watch_times(folder))


def watch_times(folder) -> list[int]:
    return [line["t_ns"] for line in told(folder)]


def test_a_fatal_xid_of_a_card_that_the_run_does_not_use_is_told_and_not_acted_on(monkeypatch, inside, folder):
    spare = Card(pci=(0, 0x0A, 0))
    library = Library(monkeypatch, [Card(tells_xids=False), spare])
    log: list[str] = []

    def lines():
        while len(log) < 3:
            time.sleep(0.01)
            if len(log) < len(rows(folder, "host")):
                log.append("NVRM: Xid (PCI:0000:0a:00): 79, pid=1, GPU has fallen off the bus.")
                yield log[-1]

    monkeypatch.setattr(xids, "_kernel_log", lambda: (lines(), ""))
    inside(library)
    assert soon(lambda: len(told(folder)) >= 5)
    watch, *heard, unwatched = told(folder)[:5]
    assert watch["xids"] == "kernel log" and [(x["xid"], x["gpu"]) for x in heard] == [(79, 1)] * 3
    assert unwatched["kind"] == "watch" and unwatched["xids"] == "unknown: the kernel's log can be read no longer"


def test_a_power_limit_is_held_against_that_of_the_runs_begin(monkeypatch, inside, folder):
    known = [{"index": 0, "power_limit_w": 250.0}]
    (folder / "machine.json").write_text(json.dumps({"gpus": known}))
    thread, codes = inside(Library(monkeypatch, [Card(enforced_mw=180_000)]))
    thread.join(10)
    assert codes == [telemetry.STOPPED]
    said = "the enforced power limit of GPU 0 is 180 W, and it was 250 W when the run began"
    assert told(folder)[-1]["reason"] == said
    assert "sudo nvidia-smi -i 0 -pl 250" in told(folder)[-1]["next_step"]


def test_a_power_limit_that_changes_is_seen_without_machine_json_too(monkeypatch, inside, folder):
    card = Card()
    thread, _ = inside(Library(monkeypatch, [card]))
    assert soon(lambda: len(rows(folder, "gpu0")) >= 2)
    card.enforced_mw = 180_900  # within what drivers round
    seen = len(rows(folder, "gpu0"))
    assert soon(lambda: len(rows(folder, "gpu0")) >= seen + 2)
    card.enforced_mw = 150_000
    thread.join(10)
    assert "is 150 W, and it was 180 W" in told(folder)[-1]["reason"]


@pytest.mark.parametrize("gone", ["the card", "the driver"])
def test_a_gpu_that_was_there_when_the_run_began_and_is_no_more_ends_it(monkeypatch, inside, folder, gone):
    known = [{"index": n, "power_limit_w": None} for n in range(2)]
    (folder / "machine.json").write_text(json.dumps({"gpus": known}))
    failing = Library(monkeypatch, fails=pynvml.NVMLError_DriverNotLoaded)
    thread, codes = inside(Library(monkeypatch, [Card()]) if gone == "the card" else failing)
    thread.join(10)
    assert codes == [telemetry.STOPPED]
    reason = told(folder)[-1]["reason"]
    assert f"NVML shows {1 if gone == 'the card' else 0} of the 2 GPUs" in reason
    assert ("driver is not loaded" in reason) == (gone == "the driver")


def test_where_neither_nvml_nor_the_log_may_be_read_it_samples_and_says_unknown(monkeypatch, inside, folder):
    monkeypatch.setattr(xids, "_kernel_log", lambda: (None, "/dev/kmsg may not be read (Permission denied)"))
    inside(Library(monkeypatch, [Card(tells_xids=False)]))
    assert soon(lambda: len(rows(folder, "gpu0")) >= 2)
    assert told(folder)[0]["xids"] == (
        "unknown: NVML gives no events (Not Supported), /dev/kmsg may not be read (Permission denied)"
    )


def test_a_recipe_without_a_gpu_opens_no_nvml(monkeypatch, start, folder):
    start()
    assert soon(lambda: rows(folder))
    assert told(folder)[0]["xids"] == "nothing to watch: the recipe needs no GPU" and told(folder)[0]["gpus"] == []


def test_the_sampler_starts_without_what_only_the_rest_of_the_kit_needs():
    code = "import llmrepro.telemetry, sys; print(*{'pydantic', 'requests', 'psutil'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split() == [
        "psutil"
    ]
