"""A server is ready when it has generated, says in a sentence why it is not, and leaves nothing behind."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest
from ipykernel.kernelspec import get_kernel_dict
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import KernelManager
from test_supervisor import FAKE, alive, gone, kill, soon

from llmrepro import earlier_boots
from llmrepro.client import Question
from llmrepro.server import Command, ServerFailure, boot, free_port

READY = Question("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})


def inline(code: str, env: dict | None = None):
    """A server that is these lines of Python."""
    return lambda _port, _key: Command([sys.executable, "-c", code], env or {})


def program(path):
    return lambda _port, _key: Command([str(path)], {})


@pytest.fixture
def marker():
    name = f"marker-{uuid.uuid4().hex}"
    yield name
    kill(alive(name))


@pytest.fixture
def start(tmp_path, marker):
    """Boots the scripted server with these options; `more` goes to boot."""

    def begin(*options, **more):
        def command(port, api_key):
            return Command(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    str(FAKE),
                    "--marker",
                    marker,
                    "--port",
                    str(port),
                    "--key",
                    api_key,
                    *options,
                ],
                {"PATH": os.environ["PATH"]},
            )

        return boot(
            **{
                "command": command,
                "folder": tmp_path,
                "number": 1,
                "ready": READY,
                "timeout_s": 20,
                "grace_s": 0.5,
                **more,
            }
        )

    return begin


def failure(context) -> ServerFailure:
    with pytest.raises(ServerFailure) as caught, context:
        pytest.fail("it was called ready")
    text = str(caught.value)
    assert caught.value.sentence in text and caught.value.next_step in text
    assert all(line in text for line in caught.value.log_tail)
    return caught.value


def test_a_ready_server_has_completed_a_generation(start, marker, tmp_path):
    waits = []
    with start(on_wait=lambda seconds, what: waits.append((seconds, what))) as it:
        assert it.ended() is None and it.number == 1
        assert 0 < it.startup["startup.port_s"] <= it.startup["startup.models_s"]
        assert it.startup["startup.port_s"] <= it.startup["startup.health_s"]
        assert it.startup["startup.health_s"] < it.startup["startup.first_completion_s"] < 20
        assert it.started_ns + it.startup["startup.first_completion_s"] * 1e9 < time.perf_counter_ns()
        assert [p.pid for p in alive(marker)] == [it.pid]
        assert waits and "closed" in waits[0][1]
    assert not alive(marker)
    assert "stopped in order" in it.ended()
    ended = json.loads((tmp_path / "boots" / "1.exit.json").read_text())
    assert ended["signal"] == signal.SIGTERM and ended["code"] is None


def test_the_key_is_new_for_every_boot_and_stays_in_no_file(start, tmp_path):
    keys = set()
    for number in (1, 2):
        with start("--say", "started", number=number) as it:
            keys.add(it.api_key)
            assert it.api_key not in repr(it)
            assert it.api_key in Path(f"/proc/{it.pid}/cmdline").read_text(), "the server has to have it"
            during = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(keys) == 2 and len(files) >= 8
    assert not [text for text in files + during for key in keys if key in text]


def test_a_key_is_never_taken_for_an_option(start, monkeypatch):
    monkeypatch.setattr("secrets.token_urlsafe", lambda _bytes: "-looks-like-an-option")
    with start() as it:
        assert it.ended() is None


def test_a_server_that_logs_its_key_does_not_leave_it_there(tmp_path):
    keys = []

    def command(_port, api_key):
        keys.append(api_key)
        return Command([sys.executable, "-c", f"print('--api-key {api_key}.', flush=True); exit(1)"], {})

    error = failure(boot(command, folder=tmp_path, number=1, ready=READY))
    log = (tmp_path / "boots" / "1.log").read_text()
    assert keys[0] not in str(error) and keys[0] not in log
    assert log.startswith("--api-key *") and log.endswith("*.\n")


def test_the_server_gets_the_environment_it_is_given_and_no_more(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "mine")
    show = "import json, os; print(json.dumps(dict(os.environ)), os.getcwd(), flush=True); exit(1)"
    error = failure(boot(inline(show, {"ONLY": "this"}), folder=tmp_path, number=1, ready=READY))
    environment, _, folder = error.log_tail[0].rpartition(" ")
    assert {"ONLY": "this"}.items() <= json.loads(environment).items()
    assert not {"HF_TOKEN", "PATH", "HOME"} & set(json.loads(environment))
    assert folder == str(tmp_path)


def test_a_proxy_variable_does_not_catch_loopback(start, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with start() as it:
        assert it.ended() is None


def test_health_that_lies_is_not_ready(start, marker):
    error = failure(start("--completions", "500", timeout_s=1.5))
    assert error.reason == "never_ready"
    assert "a completion ends as http_error" in str(error) and "1.5 s" in str(error)
    assert not alive(marker)


def test_a_completion_that_never_comes_back_is_never_ready(start, marker):
    error = failure(start("--think-s", "30", timeout_s=1.5))
    assert error.reason == "never_ready" and "timeout" in str(error)
    assert not alive(marker)


@pytest.mark.parametrize(
    ("options", "seen"), [(["--health", "503"], "/health answers 503"), (["--loading"], "/v1/models answers 503")]
)
def test_a_server_that_loads_for_ever_says_what_was_waited_for(start, options, seen):
    error = failure(start("--say", "loading tensors", *options, timeout_s=1.5))
    assert error.reason == "never_ready" and seen in str(error) and error.log_tail == ["loading tensors"]


def test_a_path_that_a_server_does_not_have_is_not_waited_for(start):
    with start(health_path="/nowhere") as it:
        assert it.startup["startup.health_s"] is None and it.startup["startup.models_s"] > 0


def test_dying_while_loading_is_told_with_code_and_log(start, marker):
    error = failure(start("--family", "--say", "no such tensor: blk.3", "--exit", "7"))
    assert error.reason == "died" and "code 7" in str(error) and "no such tensor: blk.3" in str(error)
    assert gone(marker)


def test_being_killed_while_loading_is_told_with_the_signal(tmp_path):
    end = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    error = failure(boot(inline(end), folder=tmp_path, number=1, ready=READY))
    assert error.reason == "died" and "SIGKILL" in str(error) and "memory" in str(error)


def test_an_engine_that_dies_of_the_first_question_is_told_though_it_exits_with_0(start):
    error = failure(start("--die-when-asked"))
    assert error.reason == "died" and "code 0" in str(error) and error.log_tail == ["engine core died"]


def test_a_missing_program_is_named(tmp_path):
    error = failure(boot(program("/nowhere/llama-server"), folder=tmp_path, number=1, ready=READY))
    assert error.reason == "binary_missing" and "/nowhere/llama-server" in str(error)
    assert "prepare it again" in error.next_step


def test_a_program_without_permission_is_named(tmp_path):
    path = tmp_path / "engine"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o400)
    error = failure(boot(program(path), folder=tmp_path, number=1, ready=READY))
    assert error.reason == "permission_denied" and "chmod +x" in str(error)


def test_a_program_of_another_kind_of_machine_is_named(tmp_path):
    path = tmp_path / "engine"
    path.write_bytes(b"\x7fELF\x00 not for this machine")
    path.chmod(0o700)
    error = failure(boot(program(path), folder=tmp_path, number=1, ready=READY))
    assert error.reason == "not_started" and str(path) in str(error)


@pytest.mark.parametrize("times", [1, 2])
def test_a_port_taken_meanwhile_is_tried_again_once_on_another(tmp_path, marker, times):
    holders, ports = [], []

    def command(port, api_key):
        ports.append(port)
        if len(ports) <= times:  # another program binds it just now
            holders.append(socket.create_server(("127.0.0.1", port)))
        return Command([sys.executable, "-I", "-S", str(FAKE), "--marker", marker, "--port", str(port)], {})

    context = boot(command, folder=tmp_path, number=1, ready=READY, timeout_s=20)
    if times == 1:
        with context as it:
            assert it.url.endswith(str(ports[1])) and ports[0] != ports[1]
        assert "Address already in use" in (tmp_path / "boots" / "1.port-taken.log").read_text()
    else:
        error = failure(context)
        assert error.reason == "port_taken" and "ss -ltnp" in str(error) and len(ports) == 2
    for holder in holders:
        holder.close()


def test_free_port_can_be_bound():
    socket.create_server(("127.0.0.1", free_port())).close()


def test_a_server_that_dies_later_says_how(start):
    with start("--say", "last words") as it:
        os.kill(it.pid, signal.SIGSEGV)
        assert soon(it.ended)
        assert "SIGSEGV" in it.ended() and "last words" in it.ended()


def test_a_killed_supervisor_is_told_too(start, marker):
    with start("--family", "--stubborn") as it:
        supervisor = it._supervisor.pid
        os.kill(supervisor, signal.SIGKILL)
        assert soon(it.ended)
    assert not alive(marker), "leaving waits for the level that still works"


@pytest.mark.parametrize("when", ["waiting", "measuring"])
def test_an_interrupt_passes_through_and_leaves_nothing(start, marker, when):
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), start(*(["--loading"] if when == "waiting" else [])):
        assert when == "measuring"
        time.sleep(20)
    assert not alive(marker)


def test_an_interrupt_while_stopping_skips_the_grace(start, marker):
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), start("--stubborn", grace_s=60):
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert not alive(marker) and time.monotonic() - begun < 40


def test_an_error_inside_leaves_nothing(start, marker):
    with pytest.raises(ZeroDivisionError), start("--family"):
        1 / 0  # noqa: B018
    assert not alive(marker)


def test_a_sampler_lives_as_long_as_the_server(start, marker, tmp_path):
    note = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(print('told', flush=True)));"
        "open('boots/1.guard.jsonl', 'w').close();"
        "print('sampling', flush=True); time.sleep(600)"
    )
    with start(sampler=[sys.executable, "-c", note, marker]):
        assert soon(lambda: len(alive(marker)) == 2)
        log = tmp_path / "boots" / "1.sampler.log"
        assert soon(lambda: log.read_text() == "sampling\n")
    assert not alive(marker) and log.read_text() == "sampling\ntold\n"


def test_a_boot_waits_for_the_server_of_a_run_that_was_killed_and_keeps_what_it_says_of_itself(start, tmp_path):
    status = tmp_path / "status.json"
    status.write_text(json.dumps({"outcome": "running", "stage": "measure"}))
    before = f"marker-{uuid.uuid4().hex}"
    holds = HOLDS.format(folder=str(tmp_path), fake=str(FAKE), marker=before).replace("grace_s=0.5", "grace_s=1.5")
    killed = subprocess.Popen([sys.executable, "-c", holds])
    try:
        assert soon((tmp_path / "up").exists)
        killed.kill()
        killed.wait()
        time.sleep(0.3)
        assert alive(before), "it has its grace"
        status.write_text(json.dumps({"outcome": "running", "stage": "prepare"}))
        with start(number=2, status_file=status):
            assert not alive(before)
            assert json.loads(status.read_text()) == {"outcome": "running", "stage": "prepare"}
    finally:
        killed.kill()
        kill(alive(before))


def test_a_boot_does_not_wait_for_ever_for_an_earlier_server(start, tmp_path, monkeypatch):
    monkeypatch.setattr(earlier_boots, "PATIENCE_S", 0.2)
    with start():
        error = failure(start(number=2))
    assert error.reason == "supervisor" and "an earlier boot has still not ended" in str(error)


# ---- inside a notebook's kernel --------------------------------------------------------------------------

HOLDS = """
import os, sys, time
from pathlib import Path
from llmrepro.client import Question
from llmrepro.server import Command, boot
folder = Path({folder!r})
with boot(lambda port, key: Command([sys.executable, "-I", "-S", {fake!r}, "--marker", {marker!r}, "--family",
                                     "--stubborn", "--port", str(port)], {{}}),
          folder=folder, number=1, grace_s=0.5, status_file=folder / "status.json",
          ready=Question("/v1/chat/completions", {{"messages": []}})):
    (folder / "up").touch()
    time.sleep(600)
"""


def outcome(folder: Path) -> str:
    return json.loads((folder / "status.json").read_text())["outcome"]


@pytest.mark.engine
@pytest.mark.parametrize("how", ["restart", "interrupt", "shutdown", "shut down now", "kill"])
def test_whatever_is_done_to_a_kernel_no_server_is_left(tmp_path, marker, how):
    (tmp_path / "status.json").write_text(json.dumps({"outcome": "running", "stage": "measure"}))
    sockets = tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp")  # their paths have to be short
    manager = KernelManager(transport="ipc", ip=f"{sockets}/s", connection_file=f"{sockets}/kernel.json")
    manager._kernel_spec = KernelSpec(**get_kernel_dict())  # this interpreter, whatever is installed
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=60)
        client.execute(HOLDS.format(folder=str(tmp_path), fake=str(FAKE), marker=marker))
        assert soon((tmp_path / "up").exists) and soon(lambda: len(alive(marker)) == 4)
        {
            "restart": manager.restart_kernel,
            "interrupt": manager.interrupt_kernel,
            "shutdown": manager.shutdown_kernel,
            "shut down now": lambda: manager.shutdown_kernel(now=True),
            "kill": lambda: os.kill(manager.provisioner.pid, signal.SIGKILL),
        }[how]()
        assert gone(marker)
        if how in ("restart", "interrupt"):
            assert manager.is_alive()
        if how == "kill":
            assert soon(lambda: outcome(tmp_path) == "interrupted")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        shutil.rmtree(sockets, ignore_errors=True)
