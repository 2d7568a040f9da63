"""A large file is hashed once, and again as soon as anything about it moved."""

import os
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from llmrepro import hashes


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(hashes, "SMALL_BYTES", 0)
    (tmp_path / "file").write_bytes(b"weights")
    return tmp_path / "file"


@pytest.fixture
def hashed(monkeypatch) -> list[Path]:
    """The files whose content was read."""
    read, real = [], hashes._hashed
    monkeypatch.setattr(hashes, "_hashed", lambda path, size: read.append(path) or real(path, size))
    return read


def of(file: Path) -> str:
    return hashes.sha256_of(file, file.parent / "cache")


def test_it_is_hashed_once(file, hashed):
    assert of(file) == of(file) == sha256(b"weights").hexdigest()
    assert hashed == [file]


def written_in_place(file: Path) -> None:
    file.write_bytes(b"WEIGHTS")


def written_with_its_old_time(file: Path) -> None:
    times = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def replaced_with_its_old_time(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(b"WEIGHTS")
    subprocess.run(["touch", "-r", file, other], check=True)
    os.replace(other, file)


def one_byte_of_it_written(file: Path) -> None:
    with open(file, "r+b") as opened:
        opened.seek(0)
        opened.write(b"W")


@pytest.mark.parametrize(
    "change", [written_in_place, written_with_its_old_time, replaced_with_its_old_time, one_byte_of_it_written]
)
def test_what_was_changed_right_after_is_hashed_anew(file, change):
    of(file)
    change(file)
    assert of(file) == sha256(file.read_bytes()).hexdigest() != sha256(b"weights").hexdigest()


def test_nothing_is_recorded_within_the_clock_tick_of_a_write(file, monkeypatch):
    waited, now = [], hashes.time.time_ns
    monkeypatch.setattr(hashes.time, "sleep", waited.append)
    file.write_bytes(b"just now")
    of(file)
    monkeypatch.setattr(hashes.time, "time_ns", lambda: now() + 10**9)
    file.write_bytes(b"a second ago")
    of(file)
    assert waited == [hashes.TICK_S]


def test_a_link_shares_what_is_known_and_making_it_costs_no_reading(file, hashed):
    cache = file.parent / "cache"
    hashes.link(file, file.parent / "folder" / "link", of(file), cache)
    assert of(file) == hashes.sha256_of(file.parent / "folder" / "link", cache)
    assert hashed == [file]


@pytest.mark.parametrize("broken", ["", "{}", "[]", '{"sha256": "x"}'])
def test_a_broken_record_is_made_anew(file, hashed, broken):
    of(file)
    (record,) = (file.parent / "cache" / "hashes").iterdir()
    record.write_text(broken)
    assert of(file) == of(file) == sha256(b"weights").hexdigest()
    assert len(hashed) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(file):
    (file.parent / "cache").write_text("a file")
    assert of(file) == sha256(b"weights").hexdigest()


def test_small_files_leave_no_record(tmp_path):
    (tmp_path / "file").write_bytes(b"small")
    assert of(tmp_path / "file") == sha256(b"small").hexdigest()
    assert not (tmp_path / "cache").exists()
