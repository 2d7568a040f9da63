"""Containers: what podman and docker are told, and that nothing of one is left, however it ends."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import uuid
from pathlib import Path

import psutil
import pytest
from test_server import READY
from test_supervisor import FAKE, alive, gone, kill, soon

from llmrepro import containers, engines, environment, machine, numa, processor, server
from llmrepro.containers import ContainerFailure
from llmrepro.engines import llama_cpp, vllm
from llmrepro.environment import EnvironmentFailure
from llmrepro.install import Engine, Fix
from llmrepro.recipe import Server

IMAGE = f"ghcr.io/ggml-org/llama.cpp@sha256:{'a' * 64}"
TESTS = Path(__file__).parent
NODES = [{"node": 0, "cpus": "0-15", "memory_gib": 384.0}, {"node": 1, "cpus": None, "memory_gib": 384.0}]


def engine(name: str = "llama-cpp", fixes: list[Fix] = (), **container) -> Engine:
    install = {"kind": "container", "container": {"image": IMAGE, **container}}
    return Engine.model_validate({"name": name, "version": "b1", "install": install, "fixes": list(fixes)})


class Standin:
    """podman or docker on the PATH, and what it holds."""

    def __init__(self, folder: Path, name: str, marker: str):
        self.marker, self.state = marker, folder / f"{name}-state"
        self.state.mkdir()
        program = folder / name
        program.write_text(f"#!{sys.executable} -IS\n{(TESTS / 'fake_podman.py').read_text()}")
        program.chmod(0o755)
        for needed in (FAKE, TESTS / "fake_llama_server.py"):
            shutil.copy(needed, folder)
        serve = [sys.executable, "-IS", str(folder / "fake_llama_server.py"), marker]
        image = {"id": "f" * 64, "programs": {"/app/llama-server": serve}}
        (self.state / "registry.json").write_text(json.dumps({IMAGE: image}))

    def say(self, file: str, text: str = "") -> None:
        (self.state / file).write_text(text)

    def calls(self, command: str) -> list[list[str]]:
        said = (self.state / "calls").read_text().splitlines() if (self.state / "calls").exists() else []
        return [argv for argv in map(json.loads, said) if argv[0] == command]

    def containers(self) -> list[str]:
        return [p.stem for p in self.state.glob("llmrepro-*.json")]


@pytest.fixture
def bin_(tmp_path, monkeypatch):
    """A folder of programs that is the whole PATH, beside the system's without podman and docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("rm", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("LLMREPRO_CONTAINER", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@pytest.fixture
def marker():
    name = f"marker-{uuid.uuid4().hex}"
    yield name
    kill(alive(name))


@pytest.fixture
def podman(bin_, marker):
    return Standin(bin_, "podman", marker)


@pytest.fixture
def docker(bin_, marker):
    made = Standin(bin_, "docker", marker)
    daemon = subprocess.Popen([bin_ / "docker", "daemon"])
    assert soon((made.state / "socket").exists)
    yield made
    daemon.kill()
    daemon.wait()


@pytest.fixture(params=["podman", "docker"])
def runtime(request):
    return request.getfixturevalue(request.param)


def prepared(tmp_path, which: Engine | None = None) -> environment.Environment:
    return environment.prepare(which or engine(), Path("none"), tmp_path / "install.log", tmp_path / "cache")


def launched(tmp_path, one: Server | None = None, module=llama_cpp, port=4711, weights=None, **container):
    """The launch of a recipe that is not prepared."""
    weights = weights or tmp_path / "model.gguf"
    install = engine(**container).install
    one = one or Server(id="s", args=["--ctx-size", "8192", "--threads", "{threads}"])
    return module.launch(tmp_path, install, one, weights, alias="r/m", port=port, api_key="kKEY", threads=4)


def split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the image."""
    at = argv.index(IMAGE)
    return argv[:at], argv[at + 1 :]


class TestCommand:
    def test_a_server_is_published_on_loopback_alone_and_everything_has_its_place(self, tmp_path, podman):
        launch = launched(tmp_path, shm_size="16g", cap_add=["SYS_NICE"], port=4711)
        before, after = split(launch.argv)
        assert before[:2] == [str(tmp_path / "bin/podman"), "run"]
        assert [w for w in before if w.startswith("--publish")] == ["--publish=127.0.0.1:4711:8080"]
        for word in ("--rm", "--pull=never", "--shm-size=16g", "--cap-add=SYS_NICE", "--read-only"):
            assert word in before
        mount = f"--mount=type=bind,source={tmp_path}/model.gguf,target=/models/model.gguf,readonly"
        assert [w for w in before if w.startswith("--mount")] == [mount]
        assert not [w for w in before if w.startswith(("--net", "--privileged", "--volume", "--gpus", "--device"))]
        own = ["--model", "/models/model.gguf", "--alias", "r/m", "--host", "0.0.0.0", "--port", "8080"]
        assert after == [*own, "--ctx-size", "8192", "--threads", "4"]

    def test_the_key_is_in_the_environment_and_in_no_command(self, tmp_path, runtime):
        one = Server(id="s", env={"GGML_NUMA": "1"})
        launch = launched(tmp_path, one)
        named = [w for w in launch.argv if w.startswith("--env")]
        assert named == ["--env=LLAMA_API_KEY", "--env=GGML_NUMA"]
        assert launch.env["LLAMA_API_KEY"] == "kKEY" and launch.env["GGML_NUMA"] == "1"
        assert not [w for argv in (launch.argv, *launch.cleanup) for w in argv if "kKEY" in w]

    def test_nothing_that_a_recipe_says_becomes_an_option_of_podman(self, tmp_path, podman):
        hostile = ["--privileged", "-v", "etc:host", "--network=host"]
        before, after = split(launched(tmp_path, Server(id="s", args=hostile)).argv)
        assert after[-len(hostile) :] == hostile
        assert not set(hostile) & set(before)
        assert all(word.startswith("-") for word in before[2:]), "a first word without - would be the image"

    def test_each_start_has_a_name_of_its_own_and_goes_by_that_name(self, tmp_path, runtime):
        one, two = launched(tmp_path), launched(tmp_path)
        names = [next(w for w in x.argv if w.startswith("--name=")).removeprefix("--name=") for x in (one, two)]
        assert names[0] != names[1]
        for name, launch in zip(names, (one, two), strict=True):
            assert all(name in argv[-1] for argv in launch.cleanup)
            assert f"--cidfile={launch.cidfile}" in launch.argv

    def test_gpus_are_given_as_each_runtime_wants_it(self, tmp_path, bin_, marker):
        Standin(bin_, "docker", marker)
        assert "--gpus=all" in launched(tmp_path, gpus=True).argv
        Standin(bin_, "podman", marker)
        assert "--device=nvidia.com/gpu=all" in launched(tmp_path, gpus=True).argv

    def test_vllm_gets_the_model_first_and_the_kits_own_last(self, tmp_path, podman):
        weights = tmp_path / "model"
        weights.mkdir()
        one = Server(id="s", args=["--max-model-len", "4096"], env={"VLLM_LOGGING_LEVEL": "DEBUG"})
        launch = launched(tmp_path, one, vllm, weights=weights, name="vllm", port=5, shm_size="8g")
        before, after = split(launch.argv)
        assert "--entrypoint=vllm" in before and "--read-only" not in before
        assert f"--mount=type=bind,source={weights},target=/models,readonly" in before
        own = ["--served-model-name", "r/m", "--host", "0.0.0.0", "--port", "8080"]
        assert after == ["serve", "/models", "--max-model-len", "4096", *own]
        for name in ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "HF_HUB_OFFLINE"):
            assert f"--env={name}" in before and name in launch.env
        assert "compiles" in launch.adaptations[0]

    def test_a_drafter_is_mounted_beside_the_model(self, tmp_path, podman):
        install, one = engine().install, Server(id="s", args=["-md", "{draft}"])
        paths = {"weights": tmp_path / "m.gguf", "draft": tmp_path / "d.gguf"}
        launch = llama_cpp.launch(tmp_path, install, one, **paths, alias="m", port=1, api_key="k", threads=1)
        before, after = split(launch.argv)
        assert after[-2:] == ["-md", "/draft/d.gguf"]
        assert f"--mount=type=bind,source={tmp_path}/d.gguf,target=/draft/d.gguf,readonly" in before

    def test_only_a_kept_prompt_cache_may_be_written(self, tmp_path, podman):
        one = Server(id="s")
        one = one.model_copy(update={"args": llama_cpp.slot_arguments(tmp_path / "slots")})
        before, after = split(launched(tmp_path, one).argv)
        writable = [w for w in before if w.startswith("--mount") and not w.endswith(",readonly")]
        assert writable == [f"--mount=type=bind,source={tmp_path}/slots,target=/slots"]
        assert after[-2:] == ["--slot-save-path", "/slots/"]


class TestWeights:
    def test_of_a_split_file_its_own_parts_are_mounted_and_nothing_beside_them(self, tmp_path):
        names = [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
        for name in [*names, "m-00001-of-00002.gguf", "private.txt", "mm-00001-of-00003.gguf"]:
            (tmp_path / name).touch()
        mounts, inside = containers.models(tmp_path / names[0])
        assert inside == f"/models/{names[0]}"
        assert [(m.source, m.target) for m in mounts] == [(tmp_path / n, f"/models/{n}") for n in names]
        assert not [m for m in mounts if m.writable]

    def test_links_are_followed_since_what_they_name_is_not_inside(self, tmp_path):
        blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
        blobs.mkdir(), (snapshot / "sub").mkdir(parents=True)
        for name in ("one", "two"):
            (blobs / name).touch()
        (snapshot / "config.json").symlink_to("../blobs/one")
        (snapshot / "sub/model.safetensors").symlink_to("../../blobs/two")
        mounts, inside = containers.models(snapshot)
        assert inside == "/models"
        assert [(m.source.name, m.target) for m in mounts] == [
            ("one", "/models/config.json"),
            ("two", "/models/sub/model.safetensors"),
        ]

    def test_a_name_that_would_be_read_as_more_options_is_refused(self, tmp_path, podman):
        with pytest.raises(ContainerFailure, match="comma"):
            launched(tmp_path, weights=tmp_path / "a,target=/etc,b.gguf")


class TestNuma:
    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch):
        monkeypatch.setattr(processor, "numa_nodes", lambda: NODES)

    def test_podman_is_started_on_the_node(self, tmp_path, bin_, podman):
        (bin_ / "numactl").symlink_to("/bin/true")
        one = Server(id="s", numa_node=0)
        argv = engines.placed(launched(tmp_path, one), one)
        assert argv[:4] == [str(bin_ / "numactl"), "--cpunodebind=0", "--membind=0", "--"]
        assert argv[4:6] == [str(bin_ / "podman"), "run"] and not [w for w in argv if "cpuset" in w]

    def test_docker_is_told_of_the_node(self, tmp_path, docker):
        one, env = Server(id="s", numa_node=0), prepared(tmp_path).path
        launch = llama_cpp.launch(
            env, engine().install, one, tmp_path / "m.gguf", alias="m", port=1, api_key="k", threads=1
        )
        assert engines.placed(launch, one) == launch.argv, "numactl would bind docker's client, not the server"
        assert {"--cpuset-cpus=0-15", "--cpuset-mems=0"} <= set(split(launch.argv)[0])

    def test_without_numactl_the_package_is_named(self, bin_):
        with pytest.raises(numa.NumaError, match=r"numactl is not installed.*Install the package numactl"):
            numa.checked(0)

    @pytest.mark.parametrize("node", [1, 7])
    def test_a_node_that_has_no_cpus_here_is_refused_and_the_others_named(self, bin_, node):
        (bin_ / "numactl").symlink_to("/bin/true")
        with pytest.raises(numa.NumaError, match=rf"node {node}.*0 \(CPUs 0-15\), 1 \(CPUs none\)"):
            numa.checked(node)

    def test_a_server_without_a_node_is_started_as_it_is(self, tmp_path, podman):
        launch = launched(tmp_path)
        assert engines.placed(launch, Server(id="s")) is launch.argv

    def test_where_the_server_runs_is_read_back_and_else_unknown(self):
        assert numa.allowed(os.getpid()) and numa.allowed(None) is None


class TestPreparing:
    def test_podman_is_taken_before_docker_unless_the_other_is_named(self, podman, docker, monkeypatch):
        assert containers.find().name == "podman"
        monkeypatch.setenv("LLMREPRO_CONTAINER", "docker")
        assert containers.find()[::2] == ("docker", "28.2.2")

    def test_what_is_called_docker_and_is_podman_is_used_as_podman(self, podman, bin_, monkeypatch):
        (bin_ / "docker").write_text(f'#!/bin/sh\nexec {bin_}/podman "$@"\n')
        (bin_ / "docker").chmod(0o755)
        monkeypatch.setenv("LLMREPRO_CONTAINER", "docker")
        assert containers.find() == ("podman", str(bin_ / "docker"), "4.9.3")

    @pytest.mark.parametrize(
        ("which", "said", "found", "next_step"),
        [
            (None, "", "neither podman nor docker is installed", "install podman"),
            (
                "docker",
                "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?",
                "its daemon does not answer",
                "systemctl start docker",
            ),
            (
                "docker",
                "permission denied while trying to connect to the Docker daemon socket",
                "may not use docker's daemon",
                "usermod -aG docker",
            ),
            (
                "podman",
                'Error: cannot find UID/GID for user: no subuid ranges found for user "u" in /etc/subuid',
                "podman is installed and does not work",
                "/etc/subuid",
            ),
        ],
    )
    def test_a_runtime_that_is_missing_or_does_not_work_is_told(
        self, tmp_path, bin_, marker, which, said, found, next_step
    ):
        if which:
            Standin(bin_, which, marker).say("told", said)
        with pytest.raises(EnvironmentFailure, match=found) as caught:
            prepared(tmp_path)
        assert next_step in caught.value.next_step and said in str(caught.value)

    def test_a_runtime_on_another_machine_is_refused(self, runtime):
        runtime.say("remote")
        with pytest.raises(ContainerFailure, match=r"on another machine.*unset DOCKER_HOST"):
            containers.find()

    def test_a_name_that_is_neither_is_refused(self, podman, monkeypatch):
        monkeypatch.setenv("LLMREPRO_CONTAINER", "nerdctl")
        with pytest.raises(ContainerFailure, match="'nerdctl'; set it to podman or docker"):
            containers.find()

    def test_an_image_is_pulled_once_by_its_digest_and_told_of(self, tmp_path, runtime):
        env = prepared(tmp_path)
        assert runtime.calls("pull") == [["pull", IMAGE]] and env.fixes == []
        assert IMAGE in env.freeze and "f" * 64 in env.freeze
        assert "Copying blob" in (tmp_path / "install.log").read_text()
        again = prepared(tmp_path)
        assert len(runtime.calls("pull")) == 1 and again.seconds == 0.0 and again.path == env.path
        assert environment.complete(env.path, engine()) == again

    def test_an_image_that_was_removed_since_is_pulled_again(self, tmp_path, podman):
        env = prepared(tmp_path)
        (podman.state / "images.json").unlink()
        assert environment.complete(env.path, engine()) is None
        prepared(tmp_path)
        assert len(podman.calls("pull")) == 2

    @pytest.mark.parametrize(
        ("said", "found", "next_step"),
        [
            ("dial tcp: lookup ghcr.io on 10.0.0.1:53: no such host", "could not be reached", "network"),
            ("reading manifest sha256:aa in ghcr.io/x: manifest unknown", "does not have", "check the digest"),
            ("Error response from daemon: denied: denied", "does not have", "check the digest"),
            ("writing blob: write /var/lib/x: no space left on device", "not enough disk space", "system df"),
            ("toomanyrequests: You have reached your pull rate limit", "no more for now", "login"),
            ("copying layer: lchown /etc/gshadow: operation not permitted", "may not store", "/etc/subuid"),
            ("something new", "could not pull", "read the log"),
        ],
    )
    def test_a_pull_that_fails_says_why_and_what_to_do(self, tmp_path, podman, said, found, next_step):
        podman.say("pull", said)
        with pytest.raises(EnvironmentFailure, match=found) as caught:
            prepared(tmp_path)
        assert said in str(caught.value) and next_step in caught.value.next_step
        assert not list((tmp_path / "cache/environments").glob("*/*")), "nothing says that it is there"

    def test_an_image_is_not_repaired(self, tmp_path, podman):
        fixed = engine(fixes=[{"name": "cu13-nvcc"}])
        with pytest.raises(EnvironmentFailure, match="a fix would make another one"):
            prepared(tmp_path, fixed)

    def test_flags_are_held_against_the_images_own_help_once_it_is_here(self, tmp_path, podman):
        one = Server(id="s", args=["--load-mode", "mmap+mlock"])
        assert launched(tmp_path, one).adaptations == [], "nothing is known of an image that is not here"
        env = prepared(tmp_path).path
        told = {"alias": "m", "port": 1, "api_key": "k", "threads": 1}
        launch = llama_cpp.launch(env, engine().install, one, tmp_path / "m.gguf", **told)
        assert launch.argv[-1] == "--mlock"
        assert launch.adaptations == ["--load-mode mmap+mlock is --mlock in this build"]
        with pytest.raises(engines.EngineError, match="--flash-atn"):
            bad = Server(id="s", args=["--flash-atn"])
            llama_cpp.launch(env, engine().install, bad, tmp_path / "m.gguf", **told)
        (asked,) = podman.calls("run")
        assert "--network=none" in asked and asked[-1] == "--help"


class Started:
    """The kit's way to a server in a container, up to its `boot`."""

    def __init__(self, folder: Path, env: dict[str, str] | None = None):
        self.folder, self.launch = folder, None
        self.inner = server.free_port()
        self.engine = engine(port=self.inner)
        self.environment = prepared(folder, self.engine).path
        self.one = Server(id="s", args=["--ctx-size", "512"], env=env or {})

    def command(self, port: int, api_key: str) -> server.Command:
        self.launch = llama_cpp.launch(
            self.environment,
            self.engine.install,
            self.one,
            self.folder / "model.gguf",
            alias="m",
            port=port,
            api_key=api_key,
            threads=1,
        )
        env = {**machine.minimal_environment(), **self.launch.env}
        return server.Command(self.launch.argv, env, cleanup=[*self.launch.cleanup])

    def boot(self, **more):
        told = {"folder": self.folder, "number": 1, "ready": READY, "timeout_s": 20, "grace_s": 0.5}
        return server.boot(self.command, **{**told, **more})


def nothing_left(runtime: Standin, launch) -> bool:
    return gone(runtime.marker) and soon(lambda: not runtime.containers() and not launch.cidfile.exists())


class TestLife:
    def test_a_container_serves_and_leaves_nothing(self, tmp_path, runtime, monkeypatch):
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        it = Started(tmp_path, {"GGML_TEST": "1"})
        with it.boot() as running:
            assert running.ended() is None and len(runtime.containers()) == 1
            assert re.fullmatch("[0-9a-f]{64}", it.launch.cidfile.read_text())
            inside = re.search("environment: (.*)", running.log.read_text())[1].split()
            assert (
                {"GGML_TEST", "LLAMA_API_KEY"} <= set(inside) <= {"GGML_TEST", "LLAMA_API_KEY", "PATH", "LC_CTYPE"}
            )
        assert nothing_left(runtime, it.launch)
        assert "stopped in order" in running.ended()
        files = [p for p in (tmp_path / "boots").iterdir() if running.api_key in p.read_text()]
        assert not files

    def test_a_server_that_does_not_listen_to_term_is_killed(self, tmp_path, runtime, monkeypatch):
        monkeypatch.setattr(containers, "STOP_S", 1)
        it = Started(tmp_path, {"LLAMA_TEST_STUBBORN": "1"})
        with it.boot():
            pass
        assert nothing_left(runtime, it.launch)

    @pytest.mark.parametrize("victim", ["worker", "guard", "client", "server"])
    def test_nothing_is_left_when_one_of_them_is_killed(self, tmp_path, runtime, victim):
        it = Started(tmp_path)
        with it.boot() as running:
            guard = psutil.Process(running._supervisor.pid)
            (worker,) = guard.children()
            (inside,) = alive(runtime.marker)
            pids = {"worker": worker.pid, "guard": guard.pid, "client": running.pid, "server": inside.pid}
            os.kill(pids[victim], signal.SIGKILL)
            assert nothing_left(runtime, it.launch)
            assert soon(lambda: running.ended() is not None)

    def test_nothing_is_left_when_the_kit_is_killed(self, tmp_path, runtime):
        it = Started(tmp_path)
        code = (
            "import json, os, sys, time; from pathlib import Path; from llmrepro import server; "
            "from test_server import READY; argv, env, cleanup, port, key = json.load(sys.stdin)\n"
            "server.free_port = lambda: port\nserver.secrets.token_urlsafe = lambda n: key\n"
            "with server.boot(lambda p, k: server.Command(argv, env, cleanup=cleanup), folder=Path(sys.argv[1]), "
            "number=1, ready=READY, timeout_s=20, grace_s=0.5): print('ready', flush=True); time.sleep(600)"
        )
        port, key = server.free_port(), "w" * 20
        command = it.command(port, f"k{key}")
        kit = subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        )
        kit.stdin.write(json.dumps([command.argv, command.env, command.cleanup, port, key]))
        kit.stdin.close()
        assert kit.stdout.readline() == "ready\n"
        assert len(runtime.containers()) == 1
        kit.kill()
        kit.wait()
        assert nothing_left(runtime, it.launch)

    def test_a_container_that_comes_to_be_while_it_is_ended_goes_too(self, tmp_path, runtime, monkeypatch):
        monkeypatch.setattr(containers, "STOP_S", 1)
        it = Started(tmp_path, {"LLAMA_TEST_CREATE_S": "1", "LLAMA_TEST_STUBBORN": "1"})

        def interrupted(seconds, what):
            if seconds > 0.2:
                assert not runtime.containers(), "it is there already"
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), it.boot(on_wait=interrupted, grace_s=3):
            pytest.fail("it was called ready")
        assert nothing_left(runtime, it.launch)

    def test_the_clean_up_may_run_before_and_again(self, tmp_path, runtime):
        it = Started(tmp_path)
        with it.boot():
            for _ in range(2):
                for argv in it.launch.cleanup:
                    subprocess.run(argv, capture_output=True)
            assert not runtime.containers() and not it.launch.cidfile.exists()

    def test_a_port_that_was_taken_is_tried_again_on_another(self, tmp_path, podman, monkeypatch):
        it = Started(tmp_path)
        with socket.create_server(("127.0.0.1", 0)) as taken:
            ports = iter([taken.getsockname()[1], server.free_port()])
            monkeypatch.setattr(server, "free_port", lambda: next(ports))
            with it.boot() as running:
                assert running.ended() is None
        assert (tmp_path / "boots/1.port-taken.log").exists() and nothing_left(podman, it.launch)

    def test_an_image_that_is_gone_ends_the_boot_with_podmans_words(self, tmp_path, podman):
        it = Started(tmp_path)
        with it.boot():
            pass
        (podman.state / "images.json").unlink()
        with pytest.raises(server.ServerFailure, match="image not known") as caught, it.boot():
            pass
        assert caught.value.reason == "died"


class TestMainProcess:
    CID = "3f" * 32

    def test_it_is_the_eldest_in_the_containers_group_and_not_podmans_monitor(self, tmp_path, monkeypatch):
        (tmp_path / "cid").write_text(self.CID)
        child = subprocess.Popen(["sleep", "60"])
        groups = {
            os.getppid(): f"0::/user.slice/libpod-conmon-{self.CID}.scope\n",
            os.getpid(): f"0::/user.slice/libpod-{self.CID}.scope/container\n",
            child.pid: f"0::/user.slice/libpod-{self.CID}.scope/container\n",
        }
        monkeypatch.setattr(containers, "_groups", lambda pid: groups.get(pid, "0::/\n"))
        try:
            assert containers.main_pid(tmp_path / "cid") == os.getpid()
        finally:
            child.kill()
            child.wait()

    @pytest.mark.parametrize("text", [None, "", "not an id", "3f" * 32])
    def test_what_cannot_be_told_is_unknown(self, tmp_path, text):
        if text is not None:
            (tmp_path / "cid").write_text(text)
        assert containers.main_pid(tmp_path / "cid") is None


@pytest.fixture(scope="module")
def real_image(tmp_path_factory):
    """An image made here without a network: this Python and the scripted engine. Skips where podman cannot run."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    try:
        containers.find()
    except ContainerFailure as failure:
        pytest.skip(str(failure))
    root = tmp_path_factory.mktemp("rootfs")
    python = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    needing = [python, *library.glob("lib-dynload/*.so")]
    shared = subprocess.run(["ldd", *needing], capture_output=True, text=True).stdout
    for file in {python, *map(Path, re.findall(r"(?:=> |^\t)(/\S+) \(", shared, re.MULTILINE))}:
        (root / str(file)[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, root / str(file)[1:])
    skipped = shutil.ignore_patterns("site-packages", "test", "__pycache__", "config-*", "idlelib", "*.a")
    shutil.copytree(library, root / str(library)[1:], ignore=skipped)
    (root / "app").mkdir()
    for name in ("fake_engine.py", "fake_llama_server.py"):
        shutil.copy(TESTS / name, root / "app" / name)
    start = root / "app/llama-server"
    start.write_text(f"#!{python} -IS\nimport sys; sys.argv.insert(1, 'marker-real')\n" + _REAL)
    start.chmod(0o755)
    name = f"localhost/llmrepro-test-{uuid.uuid4().hex[:8]}"
    packed = subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["podman", "import", "-", f"{name}:1"], stdin=packed.stdout, check=True, capture_output=True)
    packed.wait()
    try:
        tried = subprocess.run(
            ["podman", "run", "--rm", "--entrypoint=/app/llama-server", f"{name}:1", "--help"],
            capture_output=True,
            text=True,
        )
        if tried.returncode in (125, 126):  # podman's own; what runs inside has others
            pytest.skip(f"podman runs no container here: {tried.stderr.strip()}")
        assert tried.returncode == 0, tried.stderr
        asked = ["podman", "image", "inspect", "--format", "{{.Digest}}", f"{name}:1"]
        yield f"{name}@{subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()}"
    finally:
        subprocess.run(["podman", "rmi", "--force", f"{name}:1"], capture_output=True)


# Inside, the published port leads to the container's own address, so the scripted engine listens there.
_REAL = """
import os, runpy
sys.path.insert(0, "/app")
import http.server, fake_engine
if "--help" in sys.argv:
    runpy.run_path("/app/fake_llama_server.py", run_name="__main__")
class Everywhere(http.server.ThreadingHTTPServer):
    def __init__(self, address, handler):
        super().__init__(("0.0.0.0", address[1]), handler)
fake_engine.ThreadingHTTPServer = Everywhere
port = sys.argv[sys.argv.index("--port") + 1]
sys.argv = ["", "--marker", "marker-real", "--port", port, "--key", os.environ["LLAMA_API_KEY"]]
fake_engine.main()
"""


@pytest.mark.parametrize("end", ["stop", "worker", "guard", "client"])
def test_podman_itself_does_so_too(tmp_path, real_image, end, monkeypatch):
    monkeypatch.setattr(containers, "STOP_S", 2)  # Python as process 1 ignores TERM
    install = engine().install
    there = install.container.model_copy(update={"image": real_image, "shm_size": "64m"})
    which = engine().model_copy(update={"install": install.model_copy(update={"container": there})})
    (tmp_path / "model.gguf").write_text("weights")
    it = Started.__new__(Started)
    it.folder, it.engine, it.one = tmp_path, which, Server(id="s", args=["--ctx-size", "512"])
    it.environment = prepared(tmp_path, which).path
    assert "marker" not in " ".join(subprocess.run(["podman", "ps", "-a"], capture_output=True, text=True).stdout)
    with it.boot() as running:
        pid = containers.main_pid(it.launch.cidfile)
        assert pid is not None and "llama-server" in Path(f"/proc/{pid}/cmdline").read_text()
        assert pid != running.pid and f"--publish={running.url[7:]}:8080" in it.launch.argv
        (worker,) = psutil.Process(running._supervisor.pid).children()
        if end != "stop":
            pids = {"worker": worker.pid, "guard": running._supervisor.pid, "client": running.pid}
            os.kill(pids[end], signal.SIGKILL)
            assert soon(lambda: running.ended() is not None)
    name = next(w for w in it.launch.argv if w.startswith("--name=")).removeprefix("--name=")
    shown = ["podman", "ps", "-a", "--quiet", "--filter", f"name={name}"]
    assert soon(lambda: not subprocess.run(shown, capture_output=True).stdout)
    assert soon(lambda: not psutil.pid_exists(pid)) and soon(lambda: not it.launch.cidfile.exists())
    with contextlib.suppress(FileNotFoundError):
        assert running.api_key not in (tmp_path / "boots/1.spec.json").read_text()
