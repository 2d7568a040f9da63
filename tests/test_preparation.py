"""What an engine is given: fetched, prepared by a publication's scripts, overlaid; its cost is said before."""

import json
import os
import random
import shutil
import subprocess
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import serving, sha256

from llmrepro import checkouts, engines, hashes, parameters, preparation, server, workloads
from llmrepro import run as runs
from llmrepro.environment import Environment
from llmrepro.model import Model
from llmrepro.weights import WeightsFailure

BASE = random.Random(1).randbytes(300_000)
DRAFT = random.Random(2).randbytes(200_000)
CONFIG = {"num_hidden_layers": 2, "max_position_embeddings": 128}
FILES = {"model.safetensors": BASE, "config.json": json.dumps(CONFIG).encode()}
SCRIPTS = {
    "prepare/one.py": """
import pathlib, sys
from beside import shout
folder = pathlib.Path(sys.argv[1])
with open(folder / "model.safetensors", "r+b") as file:
    file.write(b"PREPARED")
shout("first done")
""",
    "prepare/two.py": """
import os, pathlib, sys
folder = pathlib.Path(sys.argv[1])
assert (folder / "model.safetensors").read_bytes()[:8] == b"PREPARED"
(folder / "extra.json").write_text(str("HF_TOKEN" in os.environ) + os.environ["HF_HUB_OFFLINE"])
""",
    "prepare/bad.py": "print('about to fail'); raise SystemExit('tensor 7 is missing')",
    "prepare/beside.py": "shout = print",
}


@pytest.fixture
def site(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path) as made:
        made.add("toy/model", FILES)
        made.add("toy/draft", {"model.safetensors": DRAFT, "config.json": b"{}"})
        made.add("toy/over", {"config.json": json.dumps({**CONFIG, "over": True}).encode(), "new.json": b"{}"})
        yield made


@pytest.fixture
def publication(tmp_path, monkeypatch) -> tuple[str, str]:
    """(address, commit) of a repository with SCRIPTS, fetched by git as it is from a forge, but from this disk."""
    folder = tmp_path / "publication"
    for path, text in SCRIPTS.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "scripts"]):
        subprocess.run([*git, *argv], check=True, capture_output=True)
    subprocess.run([*git, "config", "uploadpack.allowAnySHA1InWant", "true"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(checkouts, "PROTOCOL", "file")
    return f"file://{folder}", commit


class Kit:
    """`ready` with an environment whose Python is this one, and everything below one folder."""

    def __init__(self, folder: Path):
        self.cache, self.log = folder / "cache", folder / "install.log"
        self.python = folder / "environment" / "bin" / "python"
        self.python.parent.mkdir(parents=True)
        self.python.symlink_to(shutil.which("python3"))

    def ready(self, model: Model, own=None, before=None, key="k1"):
        environment = Environment(self.python.parent.parent, key, "", 0.0)
        return preparation.ready(model, environment, self.log, own, before, self.cache)


@pytest.fixture
def kit(tmp_path, monkeypatch) -> Kit:
    monkeypatch.setenv("LLMREPRO_CACHE", str(tmp_path / "cache"))
    return Kit(tmp_path)


def weights_of(repo: str, *files: str, **more) -> dict:
    listed = [{"path": f} for f in files]
    return {"source": "huggingface", "repo": repo, "format": "safetensors", "files": listed, **more}


def model(publication=None, scripts=("prepare/one.py", "prepare/two.py"), **more) -> Model:
    made = Model.model_validate(weights_of("toy/model", *FILES, **more))
    if publication is None:
        return made
    asked = {"repo": "https://forge/x", "commit": publication[1], "scripts": list(scripts)}
    prepared = Model.model_validate({**made.model_dump(exclude_unset=True), "prepare": asked})
    where = prepared.prepare.model_copy(update={"repo": publication[0]})
    return prepared.model_copy(update={"prepare": where})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_what_is_had_is_told(site, kit):
    ready = kit.ready(model())
    commit = list(site.commits["toy/model"])[-1]
    assert contents(ready.path) == FILES
    told = ready.told
    assert (told["repo"], told["revision"], told["path"]) == (
        "toy/model",
        commit,
        f"{{cache}}/{ready.path.relative_to(kit.cache)}",
    )
    assert told["files"] == [{"path": p, "sha256": sha256(c), "bytes": len(c)} for p, c in FILES.items()]
    assert told["facts"]["model.layers"] == 2
    assert "served_sha256" not in told and ready.draft is None
    assert ("weights from", f"toy/model, commit {commit}, which was its main when it was fetched") in (
        preparation.described(told, model())
    )


def test_a_drafter_is_had_beside_it(site, kit):
    ready = kit.ready(model(draft=weights_of("toy/draft", "model.safetensors", "config.json")))
    assert (ready.draft / "model.safetensors").read_bytes() == DRAFT
    assert ready.told["draft"]["repo"] == "toy/draft"
    assert ready.told["draft"]["path"].startswith("{cache}/weights/")
    assert ready.told["sha256"] != ready.told["draft"]["sha256"]


def test_an_overlay_lies_over_the_models_files(site, kit):
    ready = kit.ready(model(overlay=weights_of("toy/over", "config.json", "new.json")))
    assert json.loads((ready.path / "config.json").read_text())["over"] is True
    assert sorted(contents(ready.path)) == ["config.json", "model.safetensors", "new.json"]
    assert ready.told["facts"]["model.sha256"] == ready.told["sha256"] != ready.told["served_sha256"]


# ---- a publication's scripts ---------------------------------------------------------------------------------


def test_scripts_prepare_a_copy_in_their_order_and_before_the_overlay(site, kit, publication):
    ready = kit.ready(model(publication, overlay=weights_of("toy/over", "config.json", "new.json")))
    assert (ready.path / "model.safetensors").read_bytes() == b"PREPARED" + BASE[8:]
    assert json.loads((ready.path / "config.json").read_text())["over"] is True
    assert sorted(contents(ready.path)) == ["config.json", "extra.json", "model.safetensors", "new.json"]
    assert ready.told["facts"]["model.sha256"] == ready.told["sha256"] != ready.told["served_sha256"]
    assert ready.told["prepared"]["commit"] == publication[1]
    assert "first done" in kit.log.read_text()


def test_the_weights_that_were_fetched_stay_as_they_were(site, kit, publication):
    prepared = kit.ready(model(publication))
    assert contents(kit.ready(model()).path) == FILES
    assert contents(prepared.path) != FILES
    assert site.sent() == len(BASE)


def test_scripts_get_no_token_and_are_told_not_to_download(site, kit, publication, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    site.tokens.add("hf_secret")
    assert (kit.ready(model(publication)).path / "extra.json").read_text() == "False1"


def test_it_is_prepared_once_for_the_same_files_scripts_and_environment(site, kit, publication):
    first = kit.ready(model(publication))
    said = kit.log.read_text()
    assert kit.ready(model(publication)).path == first.path
    assert kit.log.read_text() == said
    kit.ready(model(publication), key="k2")
    kit.ready(model(publication, scripts=["prepare/one.py"]))
    assert kit.log.read_text().count("first done") == 3


def test_a_prepared_folder_that_was_changed_is_prepared_anew(site, kit, publication):
    first = kit.ready(model(publication))
    whole = contents(first.path)
    with open(first.path / "model.safetensors", "r+b") as file:
        file.write(b"!")
    assert contents(kit.ready(model(publication)).path) == whole
    assert kit.log.read_text().count("first done") == 2


def test_a_script_that_fails_is_a_sentence_with_its_last_words_and_leaves_nothing(site, kit, publication):
    with pytest.raises(WeightsFailure) as failed:
        kit.ready(model(publication, scripts=["prepare/one.py", "prepare/bad.py"]))
    assert "could not be prepared: prepare/bad.py (ended with 1)" in str(failed.value)
    assert "tensor 7 is missing" in str(failed.value) and str(kit.log) in str(failed.value)
    assert [p.suffix for p in (kit.cache / "prepared").iterdir()] == [".lock"]


def test_a_script_that_is_not_there_is_named(site, kit, publication):
    with pytest.raises(WeightsFailure, match=r"holds no prepare/none.py at .*; mend `prepare`"):
        kit.ready(model(publication, scripts=["prepare/none.py"]))


def test_a_script_that_leads_out_of_its_repository_is_not_run(site, kit, publication, tmp_path):
    folder = tmp_path / "publication"
    (tmp_path / "outside.py").write_text("raise SystemExit('ran')")
    (folder / "link.py").symlink_to(tmp_path / "outside.py")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "link"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    with pytest.raises(WeightsFailure, match="holds no link.py"):
        kit.ready(model((publication[0], commit), scripts=["link.py"]))


def test_a_commit_that_is_gone_is_a_sentence(site, kit, publication):
    with pytest.raises(WeightsFailure, match="the weights could not be prepared: .*" + "a" * 40):
        kit.ready(model((publication[0], "a" * 40)))
    assert [p.suffix for p in (kit.cache / "prepared").iterdir()] == [".lock"]


# ---- before anything is fetched ------------------------------------------------------------------------------


def free(monkeypatch, bytes_: int) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, bytes_))


def test_too_small_a_disk_is_said_before_a_byte_is_sent(site, kit, monkeypatch):
    needed = sum(map(len, FILES.values()))
    wanted = model(draft=weights_of("toy/draft", "model.safetensors"))
    free(monkeypatch, needed + len(DRAFT) - 1)
    with pytest.raises(WeightsFailure, match=r"need 0.00 GB still to fetch, and .* has 0.00 GB free: nothing was"):
        kit.ready(wanted)
    assert site.sent() == 0
    free(monkeypatch, needed + len(DRAFT))
    assert kit.ready(wanted)
    free(monkeypatch, 0)
    assert kit.ready(wanted)  # nothing more is needed


def test_the_copy_that_is_prepared_needs_room_too_until_it_is_there(site, kit, publication, monkeypatch):
    needed = sum(map(len, FILES.values()))
    free(monkeypatch, 2 * needed - 1)
    with pytest.raises(WeightsFailure, match="for the copy that is prepared"):
        kit.ready(model(publication))
    free(monkeypatch, 2 * needed)
    assert kit.ready(model(publication))
    free(monkeypatch, 0)
    assert kit.ready(model(publication))


# ---- one's own copy, and a run that is gone on with ----------------------------------------------------------


def test_ones_own_copy_is_served_as_it_is(site, kit, publication, tmp_path):
    own = tmp_path / "mine"
    shutil.copytree(kit.ready(model()).path, own)
    wanted = model(
        publication,
        overlay=weights_of("toy/over", "config.json"),
        draft=weights_of("toy/draft", "model.safetensors"),
    )
    ready = kit.ready(wanted, own=str(own))
    assert ready.path == own
    assert contents(own) == FILES
    assert (ready.told["repo"], ready.told["revision"]) == (None, None)
    assert ready.told["sha256"] == kit.ready(model()).told["sha256"]
    assert ready.draft is not None
    assert ("weights from", "your own copy, as it is: neither prepared nor overlaid") in preparation.described(
        ready.told, wanted
    )


def test_a_run_that_is_gone_on_with_keeps_to_its_commits(site, kit):
    wanted = model(draft=weights_of("toy/draft", "model.safetensors"))
    first = kit.ready(wanted)
    site.add("toy/model", {**FILES, "model.safetensors": b"newer"})
    site.add("toy/draft", {"model.safetensors": b"newer"})
    asked = len(site.asked)
    again = kit.ready(wanted, before=json.loads(json.dumps(first.told)))
    assert (again, len(site.asked)) == (first, asked)
    assert kit.ready(wanted).told["revision"] != first.told["revision"]


def test_large_files_are_hashed_once_and_not_at_every_run(site, kit, publication, monkeypatch):
    monkeypatch.setattr(hashes, "SMALL_BYTES", 100_000)
    wanted = model(publication, overlay=weights_of("toy/over", "config.json"))
    kit.ready(wanted)
    read, real = [], hashes._hashed
    monkeypatch.setattr(hashes, "_hashed", lambda path, size: read.append(size) or real(path, size))
    kit.ready(wanted)
    assert [size for size in read if size >= 100_000] == []
    assert os.environ["LLMREPRO_CACHE"] == str(kit.cache)


def test_the_drafter_reaches_the_engines_command(tmp_path, monkeypatch):
    class Launched(Exception):
        pass

    def launch(*_, draft, **__):
        raise Launched(draft)

    @contextmanager
    def boot(command, **_):
        yield command(1, "key")

    engine = SimpleNamespace(launch=launch, request=lambda body, cache: body)
    monkeypatch.setattr(engines, "load", lambda name: engine)
    monkeypatch.setattr(server, "boot", boot)
    run = runs.create(parameters.checked({"runs_dir": str(tmp_path)}))
    with pytest.raises(Launched, match="drafter"):
        workloads.measure(run, tmp_path, tmp_path, draft=Path("drafter"))
