"""Weights from the hub lie here once, whole and checked, whoever was killed on the way; asked for only once."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub_server import serving, sha256
from huggingface_hub import constants

from llmrepro import weights, weights_store
from llmrepro.model import Weights, digest
from llmrepro.weights import Held, WeightsFailure

ONE, TWO, THREE = (random.Random(n).randbytes(700_001 + n) for n in (1, 2, 3))
CONFIG = b'{"num_hidden_layers": 2, "max_position_embeddings": 128}'
FILES = {"model-1.safetensors": ONE, "model-2.safetensors": TWO, "config.json": CONFIG}
TOKEN = "hf_" + "s3cret" * 5
FETCH = """
import sys
from pathlib import Path
from llmrepro import weights
from llmrepro.model import Weights
print(weights.complete(weights.plan(Weights.model_validate_json(sys.argv[1]), Path(sys.argv[2]))).path)
"""


@pytest.fixture
def site(monkeypatch, tmp_path):
    with serving(monkeypatch, tmp_path) as made:
        made.add("toy/model", FILES)
        yield made


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def wanted(*files: str | dict, **changes) -> Weights:
    listed = [f if isinstance(f, dict) else {"path": f} for f in files or FILES]
    form = "gguf" if listed[0]["path"].endswith(".gguf") else "safetensors"
    told = {"source": "huggingface", "repo": "toy/model", "format": form, "files": listed}
    return Weights.model_validate({**told, **changes})


def fetch(weights_: Weights, cache: Path) -> Held:
    return weights.complete(weights.plan(weights_, cache))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def process(weights_: Weights, cache: Path) -> subprocess.Popen:
    argv = [sys.executable, "-c", FETCH, weights_.model_dump_json(), str(cache)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


# ---- what is fetched, and where it lies ----------------------------------------------------------------------


def test_the_files_of_a_checkpoint_lie_in_one_folder_under_their_names(site, cache):
    held = fetch(wanted(), cache)
    assert contents(held.path) == FILES
    assert (held.repo, held.revision) == ("toy/model", list(site.commits["toy/model"])[-1])
    assert held.sha256 == digest({path: sha256(content) for path, content in FILES.items()})
    assert held.bytes == sum(map(len, FILES.values()))


def test_each_file_takes_its_room_once(site, cache):
    held = fetch(wanted(), cache)
    for piece in held.pieces:
        assert piece.place.parent.name == piece.sha256
        assert (held.path / piece.path).samefile(piece.place)
    assert not list((cache / "weights" / "hub" / "parts").glob("*.part"))


def test_a_single_gguf_is_given_as_a_file_and_several_parts_by_the_first_of_them(site, cache):
    files = {f"q/m-0000{n}-of-00003.gguf": content for n, content in enumerate((ONE, TWO, THREE), 1)}
    site.add("toy/model", {**files, "m.gguf": b"single"})
    assert fetch(wanted("m.gguf"), cache).path.read_bytes() == b"single"
    held = fetch(wanted("*0000[123]-of-00003.gguf"), cache)
    assert held.path.name == "m-00001-of-00003.gguf"
    assert contents(held.path.parent) == {path.removeprefix("q/"): content for path, content in files.items()}


def test_a_part_that_the_recipe_forgets_is_named(site, cache):
    site.add("toy/model", {f"m-0000{n}-of-00002.gguf": b"1" for n in (1, 2)})
    with pytest.raises(WeightsFailure, match="names m-00001-of-00002.gguf and not m-00002-of-00002.gguf"):
        fetch(wanted("m-00001-of-00002.gguf"), cache)


def test_a_pattern_takes_what_is_at_the_root_and_may_find_nothing(site, cache):
    site.add(
        "toy/model", {**FILES, "original/model-1.safetensors": b"in another format", "original/params.json": b""}
    )
    held = fetch(wanted("*.safetensors", "*.json", "*.jinja"), cache)
    assert contents(held.path) == FILES
    with pytest.raises(WeightsFailure, match=r"toy/model holds no \*\.gguf at commit"):
        fetch(wanted("*.gguf"), cache)


@pytest.mark.parametrize("path", ["../../escaped.gguf", "/escaped.gguf", "a/../../../escaped.gguf"])
def test_no_name_in_a_repository_leads_out_of_the_folder(site, cache, path):
    site.add("toy/model", {path: ONE, "inside/m.gguf": TWO})
    held = fetch(wanted("*.gguf"), cache)
    assert [p.path for p in held.pieces] == ["inside/m.gguf"]
    assert not list(cache.parent.rglob("escaped*"))


def test_an_empty_file_is_a_file(site, cache):
    site.add("toy/model", {**FILES, "empty.json": b""})
    assert contents(fetch(wanted(*FILES, "empty.json"), cache).path)["empty.json"] == b""


def test_what_a_mirror_told_without_hashes_is_not_remembered(site, cache):
    site.hashes = False
    commit = list(site.commits["toy/model"])[-1]
    with pytest.raises(WeightsFailure, match="tells neither size nor hash"):
        fetch(wanted(revision=commit), cache)
    pinned = [{"path": path, "sha256": sha256(content), "bytes": len(content)} for path, content in FILES.items()]
    assert contents(fetch(wanted(*pinned, revision=commit), cache).path) == FILES
    site.hashes = True
    assert contents(fetch(wanted(revision=commit), cache).path) == FILES


# ---- what is here is not asked for ---------------------------------------------------------------------------


def test_a_commit_that_is_here_whole_is_used_without_asking_anybody(site, cache, monkeypatch):
    commit = list(site.commits["toy/model"])[-1]
    first = fetch(wanted("*.safetensors", "*.json", revision=commit), cache)
    asked = len(site.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = fetch(wanted("*.safetensors", "*.json", revision=commit), cache)
    assert (again, len(site.asked)) == (first, asked)


def test_main_is_looked_up_and_only_what_is_new_is_sent(site, cache):
    first = fetch(wanted(), cache)
    commit = site.add("toy/model", {**FILES, "model-2.safetensors": THREE})
    sent = site.sent()
    second = fetch(wanted(), cache)
    assert (second.revision, site.sent() - sent) == (commit, len(THREE))
    assert contents(first.path) == FILES


def test_offline_main_is_not_guessed_but_the_commit_that_is_here_is_named(site, cache, monkeypatch):
    commit = fetch(wanted(), cache).revision
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsFailure, match=f"Commit {commit} is whole in the cache: pin it as `revision`"):
        fetch(wanted(), cache)
    with pytest.raises(WeightsFailure) as refused:
        fetch(wanted("other.safetensors"), cache)
    assert "Commit" not in str(refused.value)


def test_the_name_that_was_taken_is_recorded_and_taken_again(site, cache):
    site.commits["toy/now"] = site.commits.pop("toy/model")
    named = wanted(also_named=["toy/now"])
    held = fetch(named, cache)
    assert held.repo == "toy/now"
    site.commits.clear()
    assert fetch(named.model_copy(update={"revision": held.revision}), cache).repo == "toy/now"


@pytest.mark.parametrize("change", ["a byte", "the file", "one more", "a link"])
def test_what_somebody_changed_in_a_folder_is_made_right(site, cache, change):
    held = fetch(wanted(), cache)
    file = held.path / "model-1.safetensors"
    if change == "a byte":
        with open(file, "r+b") as opened:
            opened.write(b"!")
    elif change == "one more":
        (held.path / "more.safetensors").write_text("more")
    else:
        file.unlink()
        file.symlink_to(held.pieces[0].place) if change == "a link" else file.write_bytes(b"another")
    assert contents(fetch(wanted(), cache).path) == FILES


# ---- wrong, gone, gated --------------------------------------------------------------------------------------


def test_other_weights_than_the_recipe_pins_are_refused_before_a_byte_is_sent(site, cache):
    pinned = {"path": "model-1.safetensors", "sha256": "0" * 64}
    with pytest.raises(WeightsFailure, match=f"sha256 {sha256(ONE)}, the recipe pins 0000.*nothing was fetched"):
        fetch(wanted(pinned), cache)
    with pytest.raises(WeightsFailure, match="has bytes 700002, the recipe pins 3"):
        fetch(wanted({"path": "model-1.safetensors", "bytes": 3}), cache)
    assert site.sent() == 0


def test_a_small_file_that_the_recipe_pins_otherwise_is_not_kept(site, cache):
    with pytest.raises(
        WeightsFailure, match=f"has sha256 {sha256(CONFIG)}, the recipe pins 0000.*nothing was kept"
    ):
        fetch(wanted("model-1.safetensors", {"path": "config.json", "sha256": "0" * 64}), cache)
    assert not list(cache.rglob("config.json"))
    assert fetch(wanted("model-1.safetensors", {"path": "config.json", "sha256": sha256(CONFIG)}), cache)


def test_bytes_changed_on_their_way_are_not_kept_and_the_rest_is(site, cache):
    site.change = 5
    with pytest.raises(WeightsFailure, match="changed on its way, and nothing was kept"):
        fetch(wanted(), cache)
    assert not list(cache.rglob("*.safetensors")) and not list(cache.rglob("*.part"))
    site.change = None
    assert contents(fetch(wanted(), cache).path) == FILES


def test_a_file_gone_from_main_says_to_pin_the_commit_that_held_it(site, cache):
    old = list(site.commits["toy/model"])[-1]
    site.add("toy/model", {"README.md": b"moved"})
    with pytest.raises(WeightsFailure, match="which is its `main` now.*pin that as the recipe's `revision`"):
        fetch(wanted(), cache)
    assert contents(fetch(wanted(revision=old), cache).path) == FILES
    with pytest.raises(WeightsFailure, match=r"holds no none.safetensors .*; mend `files` or `revision`"):
        fetch(wanted("none.safetensors", revision=old), cache)


def test_what_the_hub_refuses_is_a_sentence_and_leaves_nothing(site, cache):
    site.gated.add("toy/model")
    for refused, changes in (
        ("is gated", {}),
        ("has no revision", {"revision": "a" * 40}),
        ("is not on", {"repo": "toy/no"}),
    ):
        with pytest.raises(WeightsFailure, match=refused):
            fetch(wanted(**changes), cache)
    assert not list(cache.rglob("*.safetensors"))


def test_the_token_is_in_no_file_and_in_no_output(site, cache, monkeypatch, capsys):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    site.tokens.add(TOKEN)
    site.allowed.add(TOKEN)
    site.gated.add("toy/model")
    site.cuts = [1000]
    fetch(wanted(), cache)
    site.change = 1
    site.add("toy/model", {"model-1.safetensors": THREE})
    with pytest.raises(WeightsFailure) as refused:
        fetch(wanted("model-1.safetensors"), cache)
    written = b"".join(p.read_bytes() for p in cache.parent.rglob("*") if p.is_file())
    shown = capsys.readouterr()
    assert TOKEN.encode() not in written
    assert TOKEN not in f"{refused.value}{shown.out}{shown.err}"
    assert any(a.headers.get("authorization") == f"Bearer {TOKEN}" for a in site.asked)


def test_a_cache_that_cannot_be_written_or_linked_in_is_a_sentence(site, cache, monkeypatch):
    cache.write_text("a file")
    with pytest.raises(WeightsFailure, match="name another cache in LLMREPRO_CACHE"):
        fetch(wanted(), cache)
    cache.unlink()

    def no_links(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(WeightsFailure, match="whose file system has hard links"):
        fetch(wanted(), cache)


# ---- killed, and two at once ---------------------------------------------------------------------------------


def until(true, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def part_bytes(cache: Path) -> int:
    with contextlib.suppress(StopIteration, OSError):
        return next((cache / "weights" / "hub" / "parts").glob("*.part")).stat().st_size
    return 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_download_is_gone_on_with_by_the_next_process(site, cache, how):
    site.pause_s = 0.05
    one = wanted("model-1.safetensors")
    killed = process(one, cache)
    until(lambda: part_bytes(cache) > 200_000, "nothing was written")
    killed.send_signal(how)
    assert killed.wait(timeout=30) != 0
    killed.communicate()
    kept, site.pause_s = part_bytes(cache), 0.0
    assert 200_000 < kept < len(ONE)
    before = len(site.asked)
    assert fetch(one, cache).pieces[0].place.read_bytes() == ONE
    (again,) = [a for a in site.asked[before:] if a.host == "store"]
    assert (again.headers["range"], again.sent) == (f"bytes={kept}-", len(ONE) - kept)


def test_two_processes_at_once_fetch_each_byte_once(site, cache):
    site.pause_s = 0.02
    running = [process(wanted(), cache) for _ in range(2)]
    said = [p.communicate(timeout=120) for p in running]
    assert [p.returncode for p in running] == [0, 0], said
    assert said[0][0].splitlines()[-1] == said[1][0].splitlines()[-1]
    assert site.sent() == len(ONE) + len(TWO)
    assert contents(Path(said[0][0].splitlines()[-1])) == FILES


def test_what_waits_for_a_killed_process_goes_on_with_its_part(site, cache):
    site.pause_s = 2.0  # long enough for another process to start meanwhile
    one = wanted("model-1.safetensors")
    first = process(one, cache)
    until(lambda: part_bytes(cache) > 0, "nothing was written")
    second = process(one, cache)
    until(lambda: sum("/api/models" in a.path for a in site.asked) == 2, "the second did not begin")
    assert first.poll() is None
    first.kill()
    first.communicate()
    site.pause_s = 0.0
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    begun, gone_on_with = [a.headers.get("range") for a in site.asked if a.host == "store"]
    assert begun is None and gone_on_with.startswith("bytes=")
    assert contents(Path(out.splitlines()[-1]))["model-1.safetensors"] == ONE


def test_what_is_still_to_fetch_is_known_before(site, cache):
    plan = weights.plan(wanted(), cache)
    assert plan.missing_bytes == sum(map(len, FILES.values()))
    part = cache / "weights" / "hub" / "parts" / f"{sha256(ONE)}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(ONE[:500_000])
    assert plan.missing_bytes == sum(map(len, FILES.values())) - 500_000
    weights.complete(plan)
    assert weights.plan(wanted(), cache).missing_bytes == 0


def test_a_listing_holds_nothing_of_the_address_that_was_asked(site, cache):
    fetch(wanted(), cache)
    (listing,) = (cache / "weights" / "hub" / "toy--model").glob("*.json")
    told = json.loads(listing.read_text())
    assert set(told) == {"repo", "files"}
    assert {f[2] for f in told["files"]} == {sha256(c) for c in FILES.values()}


def test_a_checkpoint_laid_out_twice_is_one_folder(site, cache):
    held = fetch(wanted(), cache)
    assert weights_store.laid_out(list(reversed(held.pieces)), cache) == held.path
