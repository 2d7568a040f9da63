"""What is in the page cache is found out, and what cannot be known is not guessed."""

import os

import pytest

from llmrepro.page_cache import resident_share


def test_a_file_is_warm_when_read_and_cold_when_dropped(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(4 << 20))
    assert resident_share(path) == 1.0
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cold = resident_share(path)
    if cold == 1.0:
        pytest.skip("this file system keeps its files in memory")
    assert cold < 0.05
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead beyond what is asked
        file.seek(2 << 20)
        file.read(1 << 20)
    assert 0.2 < resident_share(path) < 0.8


def test_what_cannot_be_known_is_not_said(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert resident_share(tmp_path / "empty") is None
    assert resident_share(tmp_path / "none") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write every file, and is told the truth about it")
def test_a_file_of_another_is_unknown():
    assert resident_share("/etc/passwd") is None
