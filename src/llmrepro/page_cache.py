"""How much of a file the kernel holds in memory: the difference between a cold and a warm start."""

import ctypes
import mmap
import os
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_FAILED = ctypes.c_void_p(-1).value


def resident_share(path: Path) -> float | None:
    """Share (0 to 1) of a file's pages in the page cache, by mincore(2); reading it brings none in.

    None where it cannot be known: for a file that this user neither owns nor may write, the kernel calls every
    page resident (CVE-2019-5489).
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        found = os.fstat(file)
        if not found.st_size or not (found.st_uid == os.geteuid() or os.access(path, os.W_OK)):
            return None
        pages = -(-found.st_size // mmap.PAGESIZE)
        start = _LIBC.mmap(None, found.st_size, mmap.PROT_READ, mmap.MAP_SHARED, file, 0)
        if start in (None, _FAILED):
            return None
        try:
            flags = (ctypes.c_ubyte * pages)()
            if _LIBC.mincore(start, found.st_size, flags):
                return None
            return sum(flag & 1 for flag in flags) / pages
        finally:
            _LIBC.munmap(start, found.st_size)
    finally:
        os.close(file)
