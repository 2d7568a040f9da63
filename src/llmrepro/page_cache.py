"""How much of the weights the kernel holds in memory: the difference between a cold and a warm start."""

import contextlib
import ctypes
import mmap
import os
from glob import escape
from pathlib import Path

import numpy as np

from llmrepro.model import PART

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value
READ_BYTES = 16 << 20
COLD, WARM = 0.01, 0.99  # shares up to and from which weights count as out of the page cache, and in it


def resident_share(path: Path) -> float | None:
    """Share (0 to 1) of the pages of a file, or of all files of a folder, that are in the page cache.

    By mincore(2); reading it brings none in. None where it cannot be known: for a file that this user neither
    owns nor may write, the kernel calls every page resident (CVE-2019-5489).
    """
    resident = pages = 0
    for file in _files(path):
        found = _resident(file)
        if found is None:
            return None
        resident, pages = resident + found[0], pages + found[1]
    return resident / pages if pages else None


def evict(path: Path) -> None:
    """Put a file, or all files of a folder, out of the page cache: fsync(2), then posix_fadvise(DONTNEED).

    The kernel keeps what a living process has mapped, and so does a file system in memory: `resident_share`
    tells what stayed.
    """
    for file in _files(path):
        with contextlib.suppress(OSError), _opened(file) as fd:
            os.fsync(fd)  # dirty pages stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def bring_in(path: Path) -> None:
    """Read a file, or all files of a folder, into the page cache, unless they are there already."""
    if (resident_share(path) or 0) >= WARM:
        return
    for file in _files(path):
        with contextlib.suppress(OSError), open(file, "rb", buffering=0) as source:
            while source.read(READ_BYTES):
                pass


def _files(path: Path) -> list[Path]:
    """A file, all files of a folder, or every part of a GGUF of which an engine is given the first."""
    if path.is_dir():
        return sorted(f for f in path.rglob("*") if f.is_file())
    part = PART.fullmatch(path.name)
    return sorted(path.parent.glob(f"{escape(part['stem'])}-*-of-{part['of']}.gguf")) if part else [path]


@contextlib.contextmanager
def _opened(path: Path):
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def _resident(path: Path) -> tuple[int, int] | None:
    """(pages in the page cache, pages) of one file, or None."""
    try:
        with _opened(path) as fd:
            found = os.fstat(fd)
            if not found.st_size:
                return 0, 0
            if not (found.st_uid == os.geteuid() or os.access(path, os.W_OK)):
                return None
            pages = -(-found.st_size // mmap.PAGESIZE)
            start = _LIBC.mmap(None, found.st_size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            if start in (None, _FAILED):
                return None
            try:
                flags = np.zeros(pages, np.uint8)
                if _LIBC.mincore(start, found.st_size, flags.ctypes.data):
                    return None
                return int(np.count_nonzero(flags & 1)), pages
            finally:
                _LIBC.munmap(start, found.st_size)
    except OSError:
        return None
