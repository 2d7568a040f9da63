"""The bandwidth roofline: what bounds a decode rate, and what a rate above it means."""

import pytest
from test_capacity import QWEN, SCOUT, SMOLLM

from llmrepro import checkpoint, roofline
from llmrepro.shape import Parameters

MIB = 2**20


def test_the_bound_is_bandwidth_over_bytes():
    assert roofline.bound_tps(614.4, 16.7e9) == pytest.approx(36.79, abs=0.01)


def test_a_mixture_of_experts_reads_its_active_share():
    scout = Parameters(total_b=109, active_b=17, locator="x")
    assert roofline.weights_bytes(109_000, scout) == 17_000
    assert roofline.weights_bytes(109_000, Parameters(total_b=27, locator="x")) == 109_000


def test_a_token_reads_the_cache_that_it_attends_to():
    smollm, scout, qwen = (checkpoint.of_config(c) for c in (SMOLLM, SCOUT, QWEN))
    assert roofline.cache_bytes(smollm, 1000) == 1000 * 23_040
    assert roofline.cache_bytes(scout, 20_000) == (12 * 20_000 + 36 * 8192) * 4096
    states = roofline.cache_bytes(qwen, 0)
    assert roofline.cache_bytes(qwen, 100) == states + 100 * 65_536
    assert states == pytest.approx(146.8 * MIB, rel=1e-3)


def test_a_rate_below_its_roofline_is_said_as_a_share_of_it():
    found, said = roofline.check(50, 1e9, 100, 32 * MIB)
    assert found is None and "50% of the roofline, 100 tok/s" in said


@pytest.mark.parametrize(
    "rate,bytes_per_token,llc,found",
    [
        (100.0, 1e9, 32 * MIB, None),  # on it
        (101.0, 1e9, 32 * MIB, "bars"),
        (101.0, 1e9, 600 * MIB, "warning"),  # under two caches
        (101.0, 1e9, 1e9 / 2, "bars"),  # just two caches
        (101.0, 1e9, None, "warning"),  # nobody knows how large it is
    ],
)
def test_above_it_a_rate_bars_a_verdict_only_where_no_cache_explains_it(rate, bytes_per_token, llc, found):
    assert roofline.check(rate, bytes_per_token, 100, llc)[0] == found


def test_the_warning_says_what_it_may_be():
    assert "cache-resident, or a counting error" in roofline.check(101, 1e9, 100, 600 * MIB)[1]
    assert "the size of the last-level cache is not known" in roofline.check(101, 1e9, 100, None)[1]
    assert "a counting error" in roofline.check(101, 1e9, 100, 32 * MIB)[1]


def test_under_speculation_nothing_is_above_it():
    found, said = roofline.check(317, 16.7e9, 1769.5, 40 * MIB, speculative=True)
    assert found is None and "verification steps" in said


@pytest.mark.parametrize("given", [(0, 1e9, 100), (10, 0, 100), (10, 1e9, -1)])
def test_nothing_is_said_of_what_is_not_above_nought(given):
    with pytest.raises(ValueError, match="above nought"):
        roofline.check(*given, None)


def test_a_cache_as_large_as_half_of_it_may_hold_a_token():
    assert roofline.cache_resident(1e9, 600 * MIB) is True
    assert roofline.cache_resident(1e9, 32 * MIB) is False
    assert roofline.cache_resident(1e9, None) is None
