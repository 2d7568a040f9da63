"""Measured memory bandwidth: how fast the CPU reads and copies arrays that its caches do not hold."""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

MIB = 2**20
UNKNOWN_L3_MIB = 64.0
LEAST, MOST, PER_THREAD = 64 * MIB, 2048 * MIB, 384 * MIB  # bytes of one array; the last is about 1 s of filling
PASSES, MOST_PASSES, PASSES_S = 3, 15, 0.3  # of one kernel


def measure(
    l3_mib: float | None, available_bytes: int, threads: int, clock: Callable[[], float] = time.perf_counter
) -> dict | None:
    """Two kernels over two arrays, each thread on its own part; None when memory is too little for that.

    `copy`, as in STREAM (McCalpin, https://www.cs.virginia.edu/stream/), counts the bytes of one array read and of
    the other written; what an ordinary store reads of its line before it writes (write-allocate) is not counted.
    `read` finds the largest number of both arrays, as decoding reads weights and writes next to nothing; it counts
    their bytes once. A GB is 1e9 bytes. Each value is the median of 3 to 15 passes over both arrays,
    `fastest_gb_s` the best pass of either kernel. They are what numpy's loops reach with this many threads,
    beside whatever else runs: the memory may be faster.

    The arrays together are at most an eighth of the memory available, and eight times the L3 cache where that and
    the time allow, never less than twice. On a machine at rest it takes half a second, and 2 s where caches are
    large and cores few; most of it is the first touch of the arrays.
    """
    start = clock()
    size = array_bytes(l3_mib, available_bytes, threads)
    if size is None:
        return None
    count = size // 8
    a, b = np.empty(count, np.int64), np.empty(count, np.int64)
    parts = [slice(i * count // threads, (i + 1) * count // threads) for i in range(threads)]

    def fill(part: slice) -> None:  # by the thread that will use it: so it lies in the memory near that thread
        a[part], b[part] = 1, 2

    def copy(part: slice) -> None:
        np.copyto(b[part], a[part])

    def read(part: slice) -> None:
        a[part].max()
        b[part].max()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(fill, parts))
        taken_s = {
            kernel.__name__: _passes(lambda kernel=kernel: list(pool.map(kernel, parts)), clock)
            for kernel in (copy, read)
        }
    counted = a.nbytes + b.nbytes
    return {
        **{f"{name}_gb_s": _rate(counted, statistics.median(s)) for name, s in taken_s.items()},
        "fastest_gb_s": _rate(counted, min(s for each in taken_s.values() for s in each)),
        "threads": threads,
        "array_mib": round(a.nbytes / MIB, 1),
        "counted_bytes": counted,
        "passes": {name: len(s) for name, s in taken_s.items()},
        "seconds": round(clock() - start, 2),
    }


def array_bytes(l3_mib: float | None, available_bytes: int, threads: int) -> int | None:
    """Bytes of each of the two arrays; None when the memory there is would not take the caches out of it."""
    l3 = (l3_mib or UNKNOWN_L3_MIB) * MIB
    size = min(max(LEAST, 4 * l3), MOST, threads * PER_THREAD, available_bytes // 16)
    return int(size) // 8 * 8 if size >= max(l3, LEAST / 2) else None


def _passes(run: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    """Seconds of each pass."""
    taken: list[float] = []
    while len(taken) < PASSES or (len(taken) < MOST_PASSES and sum(taken) < PASSES_S):
        before = clock()
        run()
        taken.append(clock() - before)
    return taken


def _rate(counted: int, seconds: float) -> float:
    return round(counted / seconds / 1e9, 1)
