"""Nothing is measured beside something else on one machine, whoever measures and however that ends."""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest
from kill_rig import Rig
from nvml import Card, Library
from studies import claim, written
from test_server import READY
from test_supervisor import FAKE, alive, gone, kill, soon
from victims import FORKS, begin, measures

from llmrepro import (
    compare_stages,
    comparison,
    gpus,
    guard_log,
    jobs,
    locks,
    occupancy,
    run_folder,
    server,
    stages,
)
from llmrepro import run as runs
from llmrepro.comparison import StudyParameters
from llmrepro.locks import Part
from llmrepro.parameters import checked
from llmrepro.run_folder import RunError

CPU = [Part("cpu", True)]
CARD = [Part("cpu", False), Part("gpu-GPU-a", True)]
OTHER_CARD = [Part("cpu", False), Part("gpu-GPU-b", True)]


@pytest.fixture
def folder(monkeypatch):
    """A folder for locks as /tmp is one: for all users."""
    path = Path(tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp"))
    path.chmod(0o1777)
    monkeypatch.setenv(locks.FOLDER, str(path))
    monkeypatch.setattr(locks, "_said", set())
    yield path
    shutil.rmtree(path)


def free(path: Path) -> bool:
    """Whether a lock file could be locked alone."""
    with open(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def takes(wanted: list[Part], folder: Path, out: Path, user: int | None = None, marker: str = "") -> None:
    """In a process of its own: take parts, say so, and keep them; with a server that ignores TERM where there is a
    marker for it."""
    os.environ[locks.FOLDER] = str(folder)
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    if user is not None:
        os.setuid(user)
    with ExitStack() as until, locks.held(wanted, Path("/runs") / out.name):
        if marker:
            until.enter_context(stubborn(out.parent, marker))
        print("has it", flush=True)
        time.sleep(600)


def stubborn(folder: Path, marker: str):
    words = [sys.executable, "-I", "-S", str(FAKE), "--marker", marker, "--stubborn"]
    told = folder / guard_log.name(1)
    code = f"import time; open({str(told)!r}, 'w').close(); time.sleep(600)"
    watches = [sys.executable, "-S", "-c", code, marker]

    def command(port: int, key: str) -> server.Command:
        return server.Command([*words, "--port", str(port), "--key", key], {"PATH": os.environ["PATH"]})

    return server.boot(command, folder=folder, number=1, ready=READY, grace_s=1.5, sampler=watches)


class Other:
    """A process that takes parts."""

    def __init__(self, folder: Path, tmp_path: Path, wanted: list[Part], **more):
        self.out = tmp_path / f"run-{uuid.uuid4().hex}"
        self.process = FORKS.Process(target=takes, args=(wanted, folder, self.out), kwargs=more)
        self.process.start()

    def waits(self) -> bool:
        return soon(lambda: "waiting" in self.said()) and not self.has()

    def has(self) -> bool:
        return "has it" in self.said()

    def gets(self) -> bool:
        return soon(self.has)

    def said(self) -> str:
        return self.out.read_text() if self.out.exists() else ""


@pytest.fixture
def other(folder, tmp_path):
    """Processes that take parts; they are given what they want."""
    began: list[Other] = []

    def make(wanted: list[Part], **more) -> Other:
        began.append(Other(folder, tmp_path, wanted, **more))
        return began[-1]

    yield make
    for one in began:
        one.process.kill()
        one.process.join()


@pytest.mark.parametrize(
    ("first", "second"),
    [(CPU, CPU), (CARD, CARD), (CARD, CPU), (CPU, CARD)],
    ids=["cpu", "card", "mixed", "mixed2"],
)
def test_a_second_waits_says_for_what_and_begins_when_the_first_is_over(other, first, second):
    with locks.held(first, Path("/runs/first")) as waited:
        assert not waited
        it = other(second)
        assert it.waits(), it.said()
        what = "the GPU GPU-a" if first == second == CARD else "the CPU"
        assert it.said() == f"waiting: {what} is taken by process {os.getpid()} (/runs/first)\n"
    assert it.gets()


def test_two_cards_are_measured_beside_each_other_and_none_beside_the_cpu(other):
    with locks.held(CARD, Path("/runs/first")):
        it = other(OTHER_CARD)
        assert it.gets() and "waiting" not in it.said()
        third = other(CPU)
        assert third.waits()
    time.sleep(3 * locks.POLL_S)
    assert not third.has(), "one of two has let go of the CPU"
    it.process.kill()
    assert third.gets()


def test_whoever_is_killed_lets_go(other):
    first = other(CPU)
    assert first.gets()
    second = other(CPU)
    assert second.waits() and f"taken by process {first.process.pid} (/runs/{first.out.name})" in second.said()
    first.process.kill()
    assert second.gets()


def test_a_server_that_outlives_who_measured_keeps_the_machine(other):
    marker = f"marker-{uuid.uuid4().hex}"
    try:
        first = other(CPU, marker=marker)
        assert first.gets(), first.said()
        assert len(alive(marker)) >= 2, "the server and the sampler"
        first.process.kill()
        first.process.join()
        second = other(CPU)
        assert second.waits() and alive(marker), "the server was gone too soon for this test"
        assert f"taken by what process {first.process.pid} left running (/runs/{first.out.name})" in second.said()
        assert second.gets() and not alive(marker)
    finally:
        kill(alive(marker))


def holders(path: Path) -> set[int]:
    """The processes that have a file open."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path):
                found.add(int(link.parts[2]))
        except OSError:
            continue
    return found


def test_both_levels_of_the_supervisor_hold_the_locks_and_nothing_that_they_start(folder, tmp_path):
    marker = f"marker-{uuid.uuid4().hex}"
    path = folder / "llmrepro-cpu.lock"
    with locks.held(CPU, tmp_path), stubborn(tmp_path, marker):
        (supervisor, worker) = holders(path) - {os.getpid()}
        started = {p.pid for p in alive(marker)}
        assert len(started) >= 2 and not started & {supervisor, worker}
    assert gone(marker) and free(path) and not holders(path)


def test_it_is_taken_once_in_a_process_however_often_it_is_asked_for(folder):
    path = folder / "llmrepro-cpu.lock"
    with locks.held(CPU, Path("/runs/study")):
        with locks.held(CPU, Path("/runs/arm")) as waited:
            assert not waited
        with pytest.raises(KeyError), locks.held([CARD[1]], Path("/runs/arm")):
            raise KeyError
        assert not free(path) and free(folder / "llmrepro-gpu-GPU-a.lock")
        assert path.read_text() == f"process {os.getpid()}, /runs/study\n"
    assert free(path) and locks.descriptors() == []


def test_an_interrupt_ends_the_wait_and_keeps_nothing(other, folder):
    it = other([CARD[1]])
    assert it.gets()
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with locks.held(CARD, Path("/runs/second")):
            pytest.fail("it was held by another")
    assert locks.descriptors() == [] and free(folder / "llmrepro-cpu.lock")
    assert holders(folder / "llmrepro-gpu-GPU-a.lock") == {it.process.pid}


def test_a_lock_file_that_is_taken_away_is_no_lock(folder, monkeypatch):
    path, opened, times = folder / "llmrepro-cpu.lock", locks._opened, []

    def opens_and_loses_it(at):
        fd = opened(at)
        times.append(fd)
        if len(times) == 1:
            at.unlink()
        return fd

    monkeypatch.setattr(locks, "_opened", opens_and_loses_it)
    with locks.held(CPU, Path("/runs/first")):
        assert len(times) == 2 and not free(path)


def test_others_may_open_the_file_whatever_the_umask(folder):
    umask = os.umask(0o077)
    try:
        with locks.held(CPU, Path("/runs/first")):
            assert (folder / "llmrepro-cpu.lock").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(umask)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.parametrize(("owner", "user"), [(65534, 0), (0, 65534)])
def test_another_users_lock_file_is_held_and_not_written(other, folder, owner, user):
    path = folder / "llmrepro-cpu.lock"
    path.write_text("process 4711, /runs/x\n")
    os.chown(path, owner, owner)
    first = other(CPU, user=user)
    assert first.gets(), first.said()
    assert path.read_text() == "process 4711, /runs/x\n" and path.stat().st_uid == owner
    second = other(CPU)
    assert second.waits() and second.said().endswith(f"taken by process {first.process.pid}\n")
    path.write_text(f"process {first.process.pid}, /runs/\x1b[2J\x07x\n")
    third = other(CPU)
    assert third.waits() and third.said().endswith(f"process {first.process.pid} (/runs/\ufffdx)\n")


@pytest.mark.parametrize("planted", ["link", "dangling link", "pipe", "folder"])
def test_what_lies_at_a_locks_place_and_is_no_lock_is_told_and_not_followed(folder, tmp_path, planted):
    path, mine = folder / "llmrepro-cpu.lock", tmp_path / "mine.txt"
    mine.write_text("my own words\n")
    make = {
        "link": lambda: path.symlink_to(mine),
        "dangling link": lambda: path.symlink_to(tmp_path / "nothing"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }
    make[planted]()
    said = "it is a link; remove it" if "link" in planted else "it is no regular file; remove it"
    with pytest.raises(RunError, match=said), locks.held(CPU, tmp_path):
        pytest.fail("it was held")
    assert mine.read_text() == "my own words\n" and not (tmp_path / "nothing").exists()


def test_a_file_with_a_second_name_is_held_and_not_written(folder, tmp_path):
    mine = tmp_path / "mine.txt"
    mine.write_text("my own words\n")
    try:
        os.link(mine, folder / "llmrepro-cpu.lock")
    except OSError as error:
        pytest.skip(f"a second name cannot be made here: {error}")
    with locks.held(CPU, tmp_path):
        assert not free(mine) and mine.read_text() == "my own words\n"


def test_without_a_place_for_locks_it_goes_on_and_says_so_once(monkeypatch, capsys):
    monkeypatch.setattr(locks, "_said", set())
    monkeypatch.setenv(locks.FOLDER, "/proc/not/there")
    for _ in range(2):
        with locks.held(CPU, Path("/runs/first")) as waited:
            assert not waited and locks.descriptors() == []
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("/proc/not/there/llmrepro-cpu.lock cannot be locked (")
    assert line.endswith("): see that nothing else is measured")


def test_a_disk_without_locks_stops_nothing(monkeypatch, folder, capsys):
    def refused(_fd, _how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    with locks.held(CPU, Path("/runs/first")):
        assert locks.descriptors() == []
    assert "No locks available" in capsys.readouterr().out
    assert not holders(folder / "llmrepro-cpu.lock")


def test_a_measurement_on_gpus_takes_every_card_that_it_sees(tmp_path, monkeypatch):
    run = made(tmp_path, recipe="qwen3.8-27b/vllm-dflash2--cmp-170hx")
    cards = [Card(uuid="GPU-b"), Card(uuid="GPU-a", parts=[Card(uuid="MIG-c")])]
    library = Library(monkeypatch, cards)
    monkeypatch.delenv(gpus.VISIBLE, raising=False)
    assert {*occupancy.of(run)} == {*CARD, *OTHER_CARD}
    monkeypatch.setenv(gpus.VISIBLE, "0")
    assert occupancy.of(run) == OTHER_CARD
    monkeypatch.setenv(gpus.VISIBLE, "MIG-c")
    assert occupancy.of(run) == CARD, "a part has its card's power and clocks"
    cards[1].uuid = None
    monkeypatch.setenv(gpus.VISIBLE, "0,1")
    assert occupancy.of(run) == [CARD[0], Part("gpu-1", True), Part("gpu-GPU-b", True)]
    library.cards = []
    assert occupancy.of(run) == CPU, "nothing beside what cannot be told"


# ---- the stages ---------------------------------------------------------------------------------------------


def made(tmp_path, **values):
    return runs.create(checked({"runs_dir": str(tmp_path), **values}))


def test_a_run_takes_what_it_measures_on_and_nothing_when_it_does_not(tmp_path, monkeypatch):
    assert occupancy.of(made(tmp_path)) == CPU
    assert occupancy.of(made(tmp_path, server_url="http://127.0.0.1:8080")) == CPU
    assert occupancy.of(made(tmp_path, server_url="http://192.0.2.1:8080")) == []
    monkeypatch.setattr(jobs, "missing", lambda run: [])
    assert occupancy.of(made(tmp_path)) == [], "all of it was measured"


def test_looking_at_the_machine_waits_for_memory_and_for_nothing_that_does_not_come(tmp_path):
    def looks_at(available_gib, disk_gib=100.0, **values):
        run = made(tmp_path, **values)
        facts = {"cpu": {"architecture": "x86_64"}, "gpus": [], "other_gpus": None, "disk_free_gib": disk_gib}
        run.write_json("machine.json", {**facts, "memory": {"total_gib": 64.0, "available_gib": available_gib}})
        return stages.looks_at(run)

    assert looks_at(8.0) == looks_at(0.01) == CPU
    assert looks_at(0.01, disk_gib=0.0) == looks_at(8.0, mode="published") == []
    assert looks_at(8.0, recipe="qwen3.8-27b/vllm-dflash2--cmp-170hx") == []


def test_the_machine_is_looked_at_once_others_have_measured(tmp_path, folder, other, monkeypatch):
    first, looks = other(CPU), []
    assert first.gets()
    describe = stages.machine_.describe

    def facts(at):
        """Of a machine whose memory another has, and who then ends."""
        known = describe(at)
        known["memory"]["available_gib"] = 8.0 if looks else 0.01
        if not looks:
            threading.Timer(0.5, first.process.kill).start()
        looks.append(known)
        return known

    def bandwidth(_earlier):
        assert not free(folder / "llmrepro-cpu.lock"), "another may measure meanwhile"
        return {}

    monkeypatch.setattr(stages.machine_, "describe", facts)
    monkeypatch.setattr(stages.machine_, "measured_bandwidth", bandwidth)
    run = made(tmp_path)
    stages.machine(run)
    assert len(looks) == 2 and stages.lacks(run) == []


def test_two_runs_are_measured_one_after_the_other(tmp_path, folder):
    rigs = [Rig(tmp_path / name) for name in ("first", "second")]
    for rig in rigs:
        rig.locks, rig.temporary = folder, str(folder)
    began = [begin(measures, rig) for rig in rigs]
    for process in began:
        process.join(120)
        assert process.exitcode == 0
    spans = sorted((rig.told("up")[0]["at_ns"], rig.told("ended")[-1]["at_ns"]) for rig in rigs)
    assert spans[0][1] < spans[1][0], spans


def test_an_interrupt_while_it_waits_stops_the_run_in_order(tmp_path, folder):
    rig = Rig(tmp_path / "rig")
    rig.locks, rig.temporary = folder, str(folder)
    with locks.held(CPU, Path("/runs/first")):
        process = begin(measures, rig)
        out = rig.folder / "out.log"
        assert soon(lambda: out.exists() and "waiting" in out.read_text(), 60)
        os.kill(process.pid, signal.SIGINT)
        process.join(20)
        (path,) = rig.runs.glob("*/*/*")
        told = run_folder.status(path)
        assert (told["outcome"], told["stopped_by"]) == ("stopped", "person") and rig.server() is None


def test_a_study_takes_the_machine_for_all_its_turns(tmp_path, folder, monkeypatch):
    given = {"study": str(written(tmp_path, claim())), "runs_dir": str(tmp_path / "runs"), "trust": True}
    compared = comparison.create(checked(given, StudyParameters))
    monkeypatch.setattr(stages, "lacks", lambda run: [])
    held = []

    def turns(arms, boots, turn):
        held.append(free(folder / "llmrepro-cpu.lock"))
        raise KeyboardInterrupt

    monkeypatch.setattr(comparison, "take_turns", turns)
    with pytest.raises(KeyboardInterrupt):
        compare_stages.measure(compared)
    assert held == [False] and free(folder / "llmrepro-cpu.lock")
    ends = {run_folder.status(run.path)["outcome"] for run in (compared, *compared.arms.values())}
    assert ends == {"stopped"}
