"""Cells on other machines: each goes to a worker that declares what it needs, comes back whole, and outlives its
worker once. Two real workers and a real scheduler, all on loopback; locks of their own, as on two machines."""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
from kill_rig import Rig
from test_notebook import left_below
from test_supervisor import soon

from llmrepro import cluster, folder_archive, matrix, run_folder, worker
from llmrepro.run_folder import RunError

LLMREPRO = Path(__file__).with_name("dying_matrix.py")  # whose cells are quick
GIB = {"small": 8, "large": 64}  # what the workers declare of memory
LARGE_GIB = 20  # what only one of the workers declares
LONG = 25  # rounds: some seconds


class Cluster:
    """A scheduler and two workers, one of them with more memory."""

    def __init__(self, folder: Path, *tls: str):
        self.folder, self.tls = folder, tls
        self.temporary = tempfile.mkdtemp(prefix="llmrepro-", dir="/tmp")  # short enough for sockets
        self.cache = folder / "cache"
        told = folder / "scheduler.json"
        files = dict(zip(("--tls-ca-file", "--tls-cert", "--tls-key"), tls, strict=True)) if tls else {}
        self.options = [word for pair in files.items() for word in pair]
        listens = ["--protocol", "tls"] if tls else []
        self.processes = {
            "scheduler": self.start(
                "-m",
                "dask",
                "scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                "0",
                "--no-dashboard",
                "--no-show",
                "--scheduler-file",
                str(told),
                *listens,
                *self.options,
            )
        }
        assert soon(told.exists, 60) and soon(lambda: told.read_text().strip().endswith("}"), 10)
        self.address = json.loads(told.read_text())["address"]
        for name in GIB:
            self.work(name)
        assert soon(lambda: all("works for" in self.said(name) for name in GIB), 60), self.said("small")

    def start(self, *words: str, name: str = "scheduler") -> subprocess.Popen:
        env = {
            "TMPDIR": self.temporary,
            "LLMREPRO_CACHE": str(self.cache),
            "LLMREPRO_LOCKS": str(self.folder / name),
        }
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *words], stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **env}
            )

    def work(self, name: str) -> None:
        runs = ["--runs-dir", str(self.folder / name), "--declare", f"MEMORY_GIB={GIB[name]}"]
        self.processes[name] = self.start(str(LLMREPRO), "worker", self.address, *self.options, *runs, name=name)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def matrix(self, *rigs: Rig) -> subprocess.Popen:
        recipes = [str(rig.recipe) for rig in rigs]
        options = ["--trust", "--runs-dir", str(self.folder / "runs"), "--scheduler", self.address, *self.options]
        return self.start(str(LLMREPRO), "matrix", *recipes, *options, name="matrix")

    def rows(self) -> list[dict]:
        rows = json.loads((self.folder / "runs/summary.json").read_text())["rows"]
        return [row for row in rows if row["did"] != "there before"]

    def end(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        left = left_below(self.folder)
        for process in left:
            process.kill()
        shutil.rmtree(self.temporary)
        assert not left, left


def rig(folder: Path, cluster: Cluster, number: int, repeats: int = 2, **needs) -> Rig:
    made = Rig(folder, cluster.cache, number, ("chat",), repeats)
    recipe = json.loads((made.recipe / "recipe.json").read_text())
    (made.recipe / "recipe.json").write_text(json.dumps(recipe | {"needs": {**recipe["needs"], **needs}}))
    return made


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.end()


@pytest.mark.engine
def test_each_cell_goes_to_a_worker_that_declares_what_it_needs_and_comes_back_whole(two, tmp_path):
    rigs = [rig(tmp_path / "1", two, 1), rig(tmp_path / "2", two, 2, memory_gib=LARGE_GIB)]
    assert two.matrix(*rigs).wait(120) == 0, two.said("matrix")
    assert [(row["did"], row["outcome"]) for row in two.rows()] == [("measured", "completed")] * 2
    assert list((two.folder / "large/truth/llama-cpp--here-2").glob("*")), (
        "it needs more memory than the other has"
    )
    for row in two.rows():
        here = two.folder / "runs" / row["folder"]
        (there,) = [p for p in two.folder.glob(f"*/{row['folder']}") if p != here]
        for name in ("records.jsonl", "status.json", "report.html", "reproduce.ipynb"):
            assert (here / name).read_bytes() == (there / name).read_bytes(), name
    assert two.matrix(*rigs).wait(60) == 0
    assert [row["did"] for row in two.rows()] == ["skipped", "skipped"]


@pytest.mark.engine
def test_the_cell_of_a_worker_that_is_lost_is_tried_once_more_elsewhere(two, tmp_path):
    one = rig(tmp_path / "3", two, 3, LONG)
    process = two.matrix(one)
    where = "truth/llama-cpp--here-3/*/records.jsonl"
    assert soon(lambda: list(two.folder.glob(f"small/{where}")) + list(two.folder.glob(f"large/{where}")), 60)
    name = next(name for name in ("small", "large") if list((two.folder / name).glob(where)))
    two.processes[name].kill()
    assert process.wait(120) == 0, two.said("matrix")
    other = {"small": "large", "large": "small"}[name]
    assert list((two.folder / other).glob(where)), "the other has run it"
    (lost,) = (two.folder / name).glob("truth/llama-cpp--here-3/*")
    assert soon(lambda: not run_folder.held(lost), 30) and run_folder.status(lost)["outcome"] == "stopped"
    (row,) = two.rows()
    assert (row["did"], row["outcome"]) == ("measured", "completed")
    two.processes[name].wait()
    two.work(name)  # for whoever comes next


@pytest.mark.engine
def test_a_matrix_that_is_stopped_stops_its_cells_in_order_and_gets_what_they_have(two, tmp_path):
    rigs = [rig(tmp_path / str(n), two, n, 10 * LONG) for n in (4, 5, 6)]
    process = two.matrix(*rigs)
    assert soon(lambda: len([*two.folder.glob("*/truth/llama-cpp--here-[456]/*/records.jsonl")]) == 2, 60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, two.said("matrix")
    ends = sorted((row["did"], row["outcome"]) for row in two.rows())
    assert ends == [("measured", "stopped"), ("measured", "stopped"), ("not reached", "")]
    for row in two.rows():
        if row["folder"]:
            assert (two.folder / "runs" / row["folder"] / "records.jsonl").stat().st_size


def planned(cluster: Cluster, one: Rig) -> matrix.Cell:
    given = {"trust": True, "runs_dir": str(cluster.folder / "runs")}
    (cell,) = matrix.plan(matrix.Choice((str(one.recipe),)), given, elsewhere=True)
    return cell


def begun(cluster: Cluster, worker: str, number: int) -> Path:
    """The folder of a cell of which that worker has answers."""
    where = f"{worker}/truth/llama-cpp--here-{number}/*/records.jsonl"
    assert soon(lambda: [*cluster.folder.glob(where)], 60)
    (records,) = cluster.folder.glob(where)
    return records.parent


def stopped_in_order(folder: Path) -> bool:
    return not run_folder.held(folder) and run_folder.status(folder)["outcome"] == "stopped"


@pytest.mark.engine
def test_a_worker_that_is_ended_stops_its_cell_and_leaves_the_others_to_whoever_comes(two, tmp_path):
    rigs = [rig(tmp_path / str(n), two, n, 10 * LONG, memory_gib=LARGE_GIB) for n in (9, 10)]
    for one in rigs[1:]:  # the second is quick, wherever it runs
        recipe = json.loads((one.recipe / "recipe.json").read_text())
        recipe["workloads"][0]["repeats"] = 1
        (one.recipe / "recipe.json").write_text(json.dumps(recipe))
    process = two.matrix(*rigs)
    begun(two, "large", 9)
    two.processes["large"].terminate()
    assert two.processes["large"].wait(60) == 0, two.said("large")
    assert not [*two.folder.glob("large/truth/llama-cpp--here-10/*")], "it began another cell while it ended"
    two.work("large")
    assert process.wait(120) == 12, two.said("matrix")
    assert [(row["recipe"][-2:], row["outcome"]) for row in two.rows()] == [("-9", "stopped"), ("10", "completed")]


@pytest.mark.engine
def test_a_cell_that_nobody_waits_for_any_more_is_stopped_in_order(two, tmp_path):
    process = two.matrix(rig(tmp_path / "11", two, 11, 10 * LONG, memory_gib=LARGE_GIB))
    folder = begun(two, "large", 11)
    process.kill()
    process.wait()
    assert soon(lambda: stopped_in_order(folder), 60), run_folder.status(folder)
    assert "nobody waits for truth/llama-cpp--here-11" in two.said("large")


@pytest.mark.engine
def test_a_cell_that_no_worker_is_left_for_does_not_wait_for_ever(two, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "WORKERS_S", 3.0)
    cell, done = planned(two, rig(tmp_path / "12", two, 12, 10 * LONG, memory_gib=LARGE_GIB)), []

    def kill(_cell) -> None:
        if two.processes["large"].poll() is None and [
            *two.folder.glob("large/*/llama-cpp--here-12/*/records.jsonl")
        ]:
            two.processes["large"].kill()

    assert cluster.run([cell], [], two.address, worker.Tls(), on_end=done.append, on_tick=kill) is None
    assert two.processes["large"].wait() == -signal.SIGKILL
    assert done[0].act == "refuse" and "none has declared what it asks for, MEMORY_GIB=20" in done[0].why, done
    two.work("large")  # for whoever comes next


@pytest.mark.engine
def test_a_cell_that_has_lost_two_workers_is_not_tried_again(two, tmp_path):
    from distributed import Client, Variable

    with Client(two.address, set_as_default=False) as client:
        Variable("llmrepro-k", client=client).set(worker.ATTEMPTS)
        future = client.submit(worker.run_cell, "k", {}, {}, None, key="k", pure=False)
        with pytest.raises(RunError, match="lost 2 times, so it is not tried again"):
            future.result(30)


@pytest.mark.engine
def test_another_version_or_another_lock_is_refused(two, tmp_path, monkeypatch):
    one = rig(tmp_path / "7", two, 7)
    cell, done = planned(two, one), []
    monkeypatch.setattr(worker, "pinned", lambda recipe, folder: {"engine.lock": "another"})
    cluster.run([cell], [], two.address, worker.Tls(), on_end=done.append)
    assert done[0].act == "refuse" and "on a worker and another at the matrix" in done[0].why, done
    monkeypatch.setattr(cluster, "__version__", "9.9")
    with pytest.raises(RunError, match=r"has llmrepro 0\.1\.0, and this machine 9\.9"):
        cluster.run([cell], [], two.address, worker.Tls())
    assert not list((two.folder / "runs").glob("truth/llama-cpp--here-7/*"))


@pytest.mark.engine
def test_with_certificates_all_of_it_is_encrypted_until_the_scheduler_is_lost(tmp_path):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    whole = Cluster(tmp_path, str(cert), str(cert), str(key))
    try:
        assert whole.address.startswith("tls://")
        one = rig(tmp_path / "8", whole, 8)
        assert whole.matrix(one).wait(120) == 0, whole.said("matrix")
        assert whole.rows()[0]["outcome"] == "completed"
        with pytest.raises(RunError, match="no scheduler answers"):
            cluster.run([], [], whole.address.replace("tls", "tcp"), worker.Tls())
        listening = [
            c for c in psutil.Process(whole.processes["small"].pid).net_connections() if c.status == "LISTEN"
        ]
        assert len({c.laddr.port for c in listening if c.laddr.ip != "127.0.0.1"}) == 1, (
            "only what is encrypted leaves here"
        )
        process = whole.matrix(rig(tmp_path / "13", whole, 13, 10 * LONG, memory_gib=LARGE_GIB))
        folder = begun(whole, "large", 13)
        whole.processes["scheduler"].kill()
        assert process.wait(60) == 12, whole.said("matrix")
        assert "was lost" in whole.rows()[0]["reason"] and "Traceback" not in whole.said("matrix")
        assert soon(lambda: stopped_in_order(folder), 60), run_folder.status(folder)
        assert [whole.processes[name].wait(60) for name in ("small", "large")] == [0, 0]
    finally:
        whole.end()


@pytest.mark.parametrize(
    "address", ["tcp://10.0.0.5:8786", "10.0.0.5:8786", "tcp://example.org:8786", "tls://10.0.0.5:1"]
)
def test_without_certificates_it_stays_on_this_machine(address):
    with pytest.raises(RunError, match="is not on this machine"):
        worker.security(address, worker.Tls())


def test_of_certificates_all_three_files_are_needed():
    with pytest.raises(RunError, match="three files"):
        worker.security("tls://10.0.0.5:8786", worker.Tls("ca.pem"))


@pytest.mark.parametrize(
    ("address", "file", "sentence"),
    [
        ("tls://10.0.0.5:8786", "is-not-there.pem", "is no file"),
        ("tcp://10.0.0.5:8786", __file__, "is not encrypted"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(address, file, sentence):
    with pytest.raises(RunError, match=sentence):
        worker.security(address, worker.Tls(file, file, file))


def test_an_address_without_a_protocol_has_that_of_its_certificates():
    files = worker.Tls("ca.pem", "cert.pem", "key.pem")
    assert worker.located("10.0.0.5:8786", files) == "tls://10.0.0.5:8786"
    assert worker.located("127.0.0.1:8786", worker.Tls()) == "tcp://127.0.0.1:8786"
    assert worker.located("tls://10.0.0.5:8786", files) == "tls://10.0.0.5:8786"


def test_being_told_to_stop_again_adds_no_signal(monkeypatch):
    monkeypatch.setattr(worker, "_signals", signals := defaultdict(list))
    for times in (1, 1, 2, 2):
        worker.stop(["a", "b"], times)
    assert signals == {"a": [signal.SIGTERM] * 2, "b": [signal.SIGTERM] * 2}


GPU = {"memory_gib": 48.0, "compute_capability": "8.9"}
FACTS = {"cpu": {"architecture": "x86_64"}, "memory": {"total_gib": 64.0}, "disk_free_gib": 500.0, "gpus": None}


@pytest.mark.parametrize(
    ("gpus", "declared"),
    [
        (None, {"GPUS": 0, "VRAM_GIB": 0, "COMPUTE_CAPABILITY": 0}),
        ([GPU, {**GPU, "memory_gib": 24.0}], {"GPUS": 2, "VRAM_GIB": 24.0, "COMPUTE_CAPABILITY": 89}),
        ([{**GPU, "compute_capability": "12.0"}], {"GPUS": 1, "VRAM_GIB": 48.0, "COMPUTE_CAPABILITY": 120}),
    ],
)
def test_a_worker_declares_what_was_found(gpus, declared):
    found = worker.declared({**FACTS, "gpus": gpus})
    assert found == {"CPU_x86_64": 1, "MEMORY_GIB": 64.0, "DISK_GIB": 500.0, **declared}


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "run"
    (made / "boots").mkdir(parents=True)
    (made / "records.jsonl").write_text("{}\n" * 1000)
    (made / "boots/1.log").write_text("a log")
    (made / ".lock").touch()
    (made / "link").symlink_to("/etc/passwd")
    return made


def test_a_folder_is_packed_and_unpacked_whole_and_without_links(folder, tmp_path):
    folder_archive.unpack(folder_archive.pack(folder), tmp_path / "there")
    came = {
        p.relative_to(tmp_path / "there").as_posix(): p.read_text()
        for p in (tmp_path / "there").rglob("*")
        if p.is_file()
    }
    assert came == {"records.jsonl": "{}\n" * 1000, "boots/1.log": "a log"}


def altered(packed: bytes, change) -> bytes:
    """The archive with its members as `change` makes them."""
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = [(one, tar.extractfile(one).read()) for one in tar]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for one, data in change(members):
            one.size = len(data)
            tar.addfile(one, io.BytesIO(data))
    return out.getvalue()


def renamed(members, name: str):
    for one, _ in members[1:2]:
        one.name = name
    told = json.loads(members[0][1])
    told[name] = told.pop("boots/1.log")
    return [(members[0][0], json.dumps(told).encode()), *members[1:]]


DAMAGES = {
    "cut": lambda packed: packed[:-40],
    "a bit": lambda packed: (
        packed[: len(packed) // 2] + bytes([packed[len(packed) // 2] ^ 1]) + packed[len(packed) // 2 + 1 :]
    ),
    "a file changed": lambda packed: altered(packed, lambda m: [*m[:1], (m[1][0], b"a lie"), *m[2:]]),
    "a file missing": lambda packed: altered(packed, lambda m: m[:-1]),
    "a file more": lambda packed: altered(packed, lambda m: [*m, (tarfile.TarInfo("more"), b"x")]),
    "a path outside": lambda packed: altered(packed, lambda m: renamed(m, "../outside")),
    "an absolute path": lambda packed: altered(packed, lambda m: renamed(m, "/tmp/outside")),
    "nothing": lambda packed: b"",
    "no archive": lambda packed: b"x" * 1000,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_and_leaves_nothing(folder, tmp_path, damage):
    with pytest.raises(RunError, match="came damaged and is not taken"):
        folder_archive.unpack(DAMAGES[damage](folder_archive.pack(folder)), tmp_path / "x" / "there")
    assert not list(tmp_path.glob("x/*")) and not (tmp_path / "outside").exists()
