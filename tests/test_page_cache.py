"""What is in the page cache is found out, put out of it and read into it; what cannot be known is not guessed."""

import os
import subprocess
import sys

import pytest

from llmrepro import page_cache
from llmrepro.page_cache import bring_in, evict, resident_share

HOLD = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(held[i] for i in range(0, len(held), 4096))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def weights(tmp_path):
    """A file of 4 MiB; without it where a file system keeps its files in memory, for then nothing can leave."""
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 << 20))
    evict(path)
    if resident_share(path) == 1.0:
        pytest.skip("this file system keeps its files in memory")
    return path


def test_a_file_is_warm_when_written_and_cold_when_put_out(tmp_path, weights):
    assert resident_share(weights) <= page_cache.COLD
    with open(weights, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond what is asked
        file.seek(2 << 20)
        file.read(1 << 20)
    assert 0.2 < resident_share(weights) < 0.8
    (tmp_path / "new").write_bytes(os.urandom(1 << 20))
    assert resident_share(tmp_path / "new") == 1.0


def test_a_file_is_read_into_it_again(weights):
    bring_in(weights)
    assert resident_share(weights) == 1.0


def test_a_folder_is_all_its_files_by_their_pages(tmp_path, weights):
    other = tmp_path / "more" / "part"
    other.parent.mkdir()
    other.write_bytes(os.urandom(12 << 20))
    (tmp_path / "config.json").write_bytes(b"")
    assert resident_share(tmp_path) == pytest.approx(0.75, abs=0.01)
    evict(tmp_path)
    assert resident_share(tmp_path) <= page_cache.COLD
    bring_in(tmp_path)
    assert resident_share(tmp_path) == 1.0


def test_what_another_process_has_mapped_stays_and_is_told(weights):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        evict(weights)
        assert resident_share(weights) > 0.9
        holder.stdin.close()
    evict(weights)
    assert resident_share(weights) <= page_cache.COLD


def test_what_cannot_be_known_is_not_said(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert resident_share(tmp_path / "empty") is None
    assert resident_share(tmp_path / "none") is None
    assert resident_share(tmp_path) is None
    evict(tmp_path / "none")
    bring_in(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file, and is told the truth about it")
def test_a_file_of_another_is_unknown():
    from pathlib import Path

    assert resident_share(Path("/etc/passwd")) is None
