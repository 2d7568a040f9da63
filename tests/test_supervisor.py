"""Whatever ends, and however: no process of the server's tree is left, and the files say how it ended."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from llmrepro import supervisor

FAKE = Path(__file__).with_name("fake_engine.py")
# Stands for the notebook's kernel: starts the supervisor, says its pid and what it says, then obeys stdin.
PARENT = """
import json, os, subprocess, sys
supervisor, spec_file, secret, forks = sys.argv[1:]
with open(spec_file) as file: spec = json.load(file)
spec["parent_pid"] = os.getpid()
with open(spec_file, "w") as file: json.dump(spec, file)
process = subprocess.Popen([sys.executable, "-I", supervisor, spec_file], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
if secret: process.stdin.write(secret.encode() + b"\\n")
print(process.pid, flush=True)
print(process.stdout.readline().decode(), end="", flush=True)
if forks == "forks" and os.fork() == 0:           # it holds the pipe's write end open
    os.close(0)
    os.close(1)
    import time; time.sleep(600)
for line in sys.stdin:
    if line == "stop\\n":
        process.stdin.write(b"stop\\n")
        process.stdin.close()
        print(process.wait(), flush=True)
    if line == "drop\\n":
        process.stdin.close()
        print(process.wait(), flush=True)
    if line == "wait\\n":
        print(process.wait(), flush=True)
"""

# A clean-up command that writes down how many processes with the marker live.
LOOKS = """
import os, sys
from pathlib import Path
lives = 0
for process in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        lives += process.parent.name != str(os.getpid()) and sys.argv[2].encode() in process.read_bytes()
    except OSError:
        pass
with open(sys.argv[1], "a") as file: print(lives, file=file)
"""


# A sampler that tells that it watches, then lives as the scripted server does, or ends with the code in a file.
SAMPLES = """
import os, sys, time
folder, *words = sys.argv[1:]
time.sleep(0.2)
with open(folder + "/1.guard.jsonl", "a") as file: print('{"t_ns": %d}' % time.perf_counter_ns(), file=file)
while not os.path.exists(folder + "/code"): time.sleep(0.02)
with open(folder + "/1.guard.jsonl", "a") as file: print('{"kind": "stop", "reason": "it was hot"}', file=file)
with open(folder + "/code") as file: sys.exit(int(file.read()))
"""


def alive(marker: str) -> list[psutil.Process]:
    """Processes with the marker in their command line; a zombie has none, and is no longer a process."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(marker in word for word in process.info["cmdline"] or []):
            found.append(process)
    return found


def soon(true, within_s: float = 20) -> bool:
    """Whether `true()` comes about."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return False


def gone(marker: str) -> bool:
    return soon(lambda: not alive(marker))


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class Scene:
    """A parent process, the supervisor below it, and the scripted server with its family."""

    def __init__(
        self,
        folder: Path,
        python: list[str],
        *options: str,
        argv: list[str] | None = None,
        sampler: bool = False,
        secret: str = "",
        forks: bool = False,
        family: int = 4,
        cleanup: tuple = (),
    ):
        self.folder, self.marker = folder, f"marker-{uuid.uuid4().hex}"
        self.log, self.exit_file = folder / "1.log", folder / "1.exit.json"
        self.status = folder / "status.json"
        self.status.write_text(json.dumps({"outcome": "running", "stage": "measure", "kept": 1}))
        here = {"env": {"PATH": os.environ["PATH"]}, "cwd": str(folder)}
        fake = shutil.copy(FAKE, folder)
        spec = {
            "grace_s": 0.5,
            "exit_file": str(self.exit_file),
            "status_file": str(self.status),
            "secret": "<secret>" if secret else None,
            "cleanup": [
                [word.replace("FOLDER", str(folder)).replace("MARKER", self.marker) for word in argv]
                for argv in cleanup
            ],
            "server": {
                **here,
                "log": str(self.log),
                "argv": argv or [python[-1], "-I", "-S", str(fake), "--marker", self.marker, *options],
            },
            "sampler": {
                **here,
                "log": str(folder / "1.sampler.log"),
                "tells": str(folder / "1.guard.jsonl"),
                "argv": [python[-1], "-I", "-S", "-c", SAMPLES, str(folder), str(fake), "--marker", self.marker],
            }
            if sampler
            else None,
        }
        (folder / "1.spec.json").write_text(json.dumps(spec))
        for path in (folder, *folder.iterdir()):
            path.chmod(0o777)
        self.parent = subprocess.Popen(
            [
                *python,
                "-c",
                PARENT,
                shutil.copy(supervisor.__file__, folder),
                str(folder / "1.spec.json"),
                secret,
                "forks" if forks else "",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.guard = int(self.parent.stdout.readline())
        self.said = json.loads(self.parent.stdout.readline())
        assert soon(lambda: len(alive(self.marker)) == family + sampler), [p.info for p in alive(self.marker)]

    @property
    def worker(self) -> int:
        return psutil.Process(self.guard).children()[0].pid

    def tell(self, word: str) -> int:
        self.parent.stdin.write(f"{word}\n")
        self.parent.stdin.flush()
        return int(self.parent.stdout.readline())

    def ended(self) -> dict:
        return json.loads(self.exit_file.read_text())

    def over(self) -> bool:
        """Whether both levels of the supervisor end soon."""
        spec = str(self.folder / "1.spec.json")
        return soon(lambda: not [p for p in alive(spec) if "-I" in p.info["cmdline"]])

    def outcome(self) -> str:
        """What status.json says in the end."""
        assert self.over()
        return json.loads(self.status.read_text())["outcome"]

    def close(self) -> None:
        kill(alive(self.marker))
        self.parent.kill()
        self.parent.wait()
        self.parent.stdin.close()
        self.parent.stdout.close()
        assert self.over()


@pytest.fixture(params=["me", "ordinary user"])
def python(request):
    """The words that start Python as oneself, and, for root, as an ordinary user as well."""
    if request.param == "me":
        return [sys.executable]
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    if os.geteuid() == 0 and shutil.which("setpriv"):
        for interpreter in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
            # Through a shell: setpriv itself may still start what the user may not.
            asked = [*words, "sh", "-c", f"exec {interpreter} -c 'import tomllib'"]
            if subprocess.run(asked, capture_output=True).returncode == 0:
                return [*words, interpreter]
    pytest.skip("not root, or no interpreter here that an ordinary user may run")


@pytest.fixture
def scene(python):
    scenes, folders = [], []

    def make(*options, **more):
        folders.append(Path(tempfile.mkdtemp(prefix="llmrepro-")))  # pytest's own is closed to others
        scenes.append(Scene(folders[-1], python, *options, **more))
        return scenes[-1]

    yield make
    for made in scenes:
        made.close()
    for folder in folders:
        shutil.rmtree(folder)


def test_an_orderly_stop_ends_a_stubborn_family(scene):
    it = scene("--stubborn", "--family", sampler=True)
    assert it.tell("stop") == 0
    assert not alive(it.marker)
    assert it.ended()["signal"] == signal.SIGKILL and it.ended()["reason"] == "it was stopped in order"
    assert it.outcome() == "running", "whoever asked for the stop writes its own end"


def test_a_server_that_obeys_term_is_not_killed(scene):
    it = scene(family=1)
    assert it.tell("stop") == 0
    assert it.ended()["signal"] == signal.SIGTERM
    assert set(it.ended()) == {"code", "signal", "at", "reason"}


@pytest.mark.parametrize("victim", ["parent", "worker", "guard"])
def test_nothing_is_left_when_one_of_them_is_killed(scene, victim):
    it = scene("--stubborn", "--family", sampler=True)
    os.kill({"parent": it.parent.pid, "worker": it.worker, "guard": it.guard}[victim], signal.SIGKILL)
    assert gone(it.marker)
    if victim == "parent":
        assert it.outcome() == "interrupted"
        status = json.loads(it.status.read_text())
        assert str(it.parent.pid) in status["reason"] and "measure" in status["reason"]
        assert status["kept"] == 1 and status["at"] and str(it.folder) in status["next_step"]
    else:
        assert soon(it.exit_file.exists) and it.ended()["reason"]
        assert it.outcome() == "running", "the parent lives and has its own word to say"


class TestAsOneself:
    @pytest.fixture
    def python(self):
        return [sys.executable]

    def test_the_end_of_the_pipe_alone_means_that_the_parent_died(self, scene):
        it = scene("--family")
        assert it.tell("drop") == 0
        assert not alive(it.marker) and it.outcome() == "interrupted"

    def test_a_forked_child_that_keeps_the_pipe_open_does_not_keep_the_server(self, scene):
        it = scene("--family", forks=True)
        parent = psutil.Process(it.parent.pid)
        assert soon(lambda: len(parent.children()) == 2)
        forked = [process for process in parent.children() if process.pid != it.guard]
        parent.kill()
        try:
            assert gone(it.marker) and it.outcome() == "interrupted"
            assert forked[0].is_running()
        finally:
            kill(forked)

    def test_a_server_that_ends_by_itself_takes_its_family_along(self, scene):
        it = scene("--family", "--exit", "3", family=0)
        assert it.tell("wait") == 0
        assert not alive(it.marker)
        assert it.ended()["code"] == 3 and it.ended()["reason"] == "it ended by itself"
        assert it.outcome() == "running"

    def test_a_finished_run_is_not_called_interrupted(self, scene):
        it = scene(family=1)
        it.status.write_text(json.dumps({"outcome": "completed"}))
        it.parent.kill()
        assert gone(it.marker) and it.outcome() == "completed"

    def test_a_program_that_cannot_be_started_is_told(self, scene):
        it = scene(argv=["/nowhere/engine"], family=0)
        assert it.said["errno"] == 2 and "/nowhere/engine" in it.said["failed"]
        assert it.tell("wait") == 0
        assert it.ended()["code"] is None and "could not be started" in it.ended()["reason"]

    def test_a_program_that_may_not_be_run_is_told(self, scene):
        it = scene(argv=["/etc/passwd"], family=0)
        assert it.said["errno"] == 13

    def test_the_secret_reaches_the_server_and_stays_in_no_file(self, scene):
        it = scene("--say", "args: --api-key <secret> --port 1", secret="s3cret-s3cret", family=1)
        assert soon(lambda: "s3cret-s3cret" in it.log.read_text())
        it.tell("stop")
        assert it.log.read_text() == f"args: --api-key {'*' * 13} --port 1\n"
        assert not [path for path in it.folder.iterdir() if b"s3cret-s3cret" in path.read_bytes()]

    def test_a_sampler_that_forbids_it_ends_the_server_and_its_reason_is_kept(self, scene):
        it = scene("--family", "--stubborn", sampler=True)
        (it.folder / "code").write_text("3")
        assert gone(it.marker) and it.over()
        assert (
            it.ended()["reason"] == "the guard stopped it: it was hot" and it.ended()["signal"] == signal.SIGKILL
        )
        assert it.outcome() == "running", "whoever measures has its own word to say"

    @pytest.mark.parametrize("how", ["killed", "ended"])
    def test_a_sampler_that_ends_otherwise_is_missed_and_the_server_lives_on(self, scene, how):
        it = scene(sampler=True, family=1)
        (sampler,) = [p for p in alive(it.marker) if p.pid != it.said["pid"]]
        if how == "killed":
            sampler.kill()
        else:
            (it.folder / "code").write_text("1")
        assert soon(lambda: not [p for p in alive(it.marker) if p.pid == sampler.pid])
        time.sleep(0.3)
        assert [p.pid for p in alive(it.marker)] == [it.said["pid"]] and not it.exit_file.exists()
        assert it.tell("stop") == 0 and it.ended()["reason"] == "it was stopped in order"

    def test_the_server_is_started_once_the_sampler_watches(self, scene):
        it = scene(sampler=True, family=1)
        watch = json.loads((it.folder / "1.guard.jsonl").read_text())
        assert watch["t_ns"] - 0.05e9 < it.said["started_ns"]  # the file is there a moment before its line

    def test_interrupts_are_not_for_the_supervisor(self, scene):
        it = scene(family=1)
        for pid in (it.guard, it.worker):
            os.kill(pid, signal.SIGINT)
        time.sleep(0.3)
        assert len(alive(it.marker)) == 1
        assert os.getsid(it.guard) != os.getsid(it.parent.pid) and os.getsid(it.said["pid"]) == it.said["pid"]

    def test_short_of_memory_the_server_goes_first(self, scene):
        it = scene(family=1)
        assert int(Path(f"/proc/{it.said['pid']}/oom_score_adj").read_text()) >= 500

    @pytest.mark.parametrize("victim", [None, "parent", "worker", "guard"])
    def test_the_clean_up_runs_whoever_ends_and_the_monitor_of_a_container_still_lives_then(self, scene, victim):
        """podman's monitor is a descendant; once it is dead its container cannot be removed any more."""
        looks = [sys.executable, "-c", LOOKS, "FOLDER/seen", "MARKER"]
        it = scene("--family", cleanup=(looks, ["/nowhere/podman"], ["touch", "FOLDER/second"]))
        if victim is None:
            it.tell("stop")
        else:
            os.kill({"parent": it.parent.pid, "worker": it.worker, "guard": it.guard}[victim], signal.SIGKILL)
        assert gone(it.marker) and it.over()
        assert (it.folder / "second").exists(), "one that cannot be started does not stop the others"
        assert int((it.folder / "seen").read_text().split()[0]) >= 3, "the family was killed before"

    def test_a_server_that_was_never_started_is_cleaned_up_after(self, scene):
        it = scene(argv=["/nowhere/engine"], family=0, cleanup=(["touch", "FOLDER/seen"],))
        assert it.tell("wait") == 0 and (it.folder / "seen").exists()

    def test_a_clean_up_that_hangs_is_ended_and_the_next_one_runs(self, scene, monkeypatch):
        changed = Path(supervisor.__file__).read_text().replace("CLEANUP_S = 30.0", "CLEANUP_S = 0.3")
        assert "CLEANUP_S = 0.3" in changed
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "supervisor.py"
            path.write_text(changed)
            monkeypatch.setattr(supervisor, "__file__", str(path))
            hangs = ["sh", "-c", "trap '' TERM; sleep 600 & echo $! > FOLDER/hangs; wait; wait"]
            it = scene("--family", cleanup=(hangs, ["touch", "FOLDER/second"]))
        assert it.tell("stop") == 0
        assert not alive(it.marker) and (it.folder / "second").exists()
        assert not psutil.pid_exists(int((it.folder / "hangs").read_text()))

    def test_a_supervisor_whose_parent_is_gone_starts_nothing(self, tmp_path):
        spec = {"parent_pid": os.getppid(), "secret": None, "server": {"argv": ["touch", str(tmp_path / "no")]}}
        (tmp_path / "spec.json").write_text(json.dumps(spec))
        done = subprocess.run(
            [sys.executable, "-I", supervisor.__file__, str(tmp_path / "spec.json")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert done.returncode == 1 and not done.stdout and not (tmp_path / "no").exists()
