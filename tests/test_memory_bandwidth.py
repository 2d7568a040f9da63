"""Measured bandwidth: bytes that were really moved over time that really passed, within bounds of memory."""

import itertools

import numpy as np
import pytest

from llmrepro import memory_bandwidth
from llmrepro.memory_bandwidth import MIB, array_bytes, measure

PLENTY = 1024 * MIB  # an eighth of it is two arrays of 64 MiB


def test_a_rate_is_the_bytes_counted_over_the_seconds_of_a_pass():
    ticks = itertools.count()
    found = measure(8, PLENTY, 2, clock=lambda: next(ticks) / 8)  # every pass takes an eighth of a second
    assert found["array_mib"] == 64
    assert found["counted_bytes"] == 2 * 64 * MIB
    rate = round(2 * 64 * MIB / 0.125 / 1e9, 1)
    assert (found["copy_gb_s"], found["read_gb_s"], found["fastest_gb_s"]) == (rate, rate, rate)
    assert found["passes"] == {"copy": 3, "read": 3}
    assert found["seconds"] == pytest.approx(13 / 8, abs=0.01)  # 14 looks at the clock


def test_it_is_the_median_of_the_passes():
    passes_s = (1.0, 0.5, 2.0, 4.0, 4.0, 0.25)
    ends = list(itertools.accumulate(passes_s))
    looks = [0.0, *itertools.chain(*zip([0.0, *ends], ends, strict=False)), ends[-1]]
    found = measure(8, PLENTY, 1, clock=iter(looks).__next__)
    counted = found["counted_bytes"]
    assert found["copy_gb_s"] == round(counted / 1.0 / 1e9, 1)
    assert found["read_gb_s"] == round(counted / 4.0 / 1e9, 1)
    assert found["fastest_gb_s"] == round(counted / 0.25 / 1e9, 1)


def test_every_pass_moves_all_the_bytes_that_are_counted(monkeypatch):
    moved = []

    def copyto(to, source):
        assert not np.shares_memory(to, source)
        moved.append(to.nbytes + source.nbytes)
        to[:] = source

    monkeypatch.setattr(np, "copyto", copyto)
    found = measure(8, PLENTY, 3)
    assert sum(moved) == found["counted_bytes"] * found["passes"]["copy"]
    assert len(moved) == 3 * found["passes"]["copy"]
    assert found["copy_gb_s"] > 0
    assert found["read_gb_s"] > 0
    assert found["fastest_gb_s"] >= max(found["copy_gb_s"], found["read_gb_s"])


@pytest.mark.parametrize("threads", [1, 2, 16, 128])
@pytest.mark.parametrize("l3_mib", [None, 8, 32, 512, 1152])
@pytest.mark.parametrize("available_gib", [0.1, 1, 24, 768])
def test_arrays_take_an_eighth_of_the_memory_at_most_and_outgrow_the_cache(threads, l3_mib, available_gib):
    available = int(available_gib * 1024 * MIB)
    size = array_bytes(l3_mib, available, threads)
    if size is None:
        assert min(available // 16, threads * memory_bandwidth.PER_THREAD) < max(l3_mib or 64, 32) * MIB
    else:
        assert 2 * size <= available / 8
        assert 2 * size >= 2 * (l3_mib or 64) * MIB
        assert size >= 32 * MIB


def test_with_too_little_memory_nothing_is_measured():
    assert measure(32, 256 * MIB, 2) is None
