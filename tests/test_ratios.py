"""Ratios of pairs and the break-even: intervals that cover the truth, and none where the pairs carry none."""

import math
import random

import pytest

from llmrepro import break_even, ratios
from llmrepro.intervals import Interval


def test_a_ratio_is_the_geometric_mean_and_turns_over_without_a_change():
    pairs = [(2.0, 1.0), (8.0, 1.0), (4.0, 1.0)]
    found = ratios.of(pairs)
    turned = ratios.of([(b, a) for a, b in pairs])
    assert found.mean == pytest.approx(4.0)
    assert (turned.mean, turned.low, turned.high) == pytest.approx((1 / found.mean, 1 / found.high, 1 / found.low))


def test_its_interval_is_students_on_the_logarithms():
    logs = [0.1, 0.2, 0.3]
    found = ratios.of([(math.exp(x), 1.0) for x in logs])
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((0.2 - half, 0.2 + half), abs=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_pairs_have_no_interval(n):
    assert ratios.of([(2.0, 1.0)] * n) == Interval(2.0, None, None, n)
    assert ratios.place(ratios.of([(2.0, 1.0)] * n), 1.0, 3.0) is None


def test_a_nought_above_is_a_ratio_and_a_nought_below_is_none():
    assert ratios.of([(0.0, 5.0)] * 3) == Interval(0.0, 0.0, 0.0, 3)
    with pytest.raises(ValueError, match="nought or below has no ratio"):
        ratios.of([(5.0, 0.0)])
    with pytest.raises(ValueError, match="no samples"):
        ratios.of([])


@pytest.mark.parametrize(
    ("low", "high", "where"),
    [
        (1.0, 3.0, "inside"),
        (1.5, 2.5, "inside"),
        (1.6, 3.0, "across"),
        (2.6, 3.0, "outside"),
        (0.0, 1.4, "outside"),
    ],
)
def test_an_interval_is_inside_outside_or_across(low, high, where):
    assert ratios.place(Interval(2.0, 1.5, 2.5, 3), low, high) == where


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(4)
    covered = 0
    for _ in range(2000):
        pairs = [(2.0 * math.exp(rng.gauss(0, 0.1)), math.exp(rng.gauss(0, 0.1))) for _ in range(4)]
        found = ratios.of(pairs)
        covered += found.low <= 2.0 <= found.high
    assert 0.935 < covered / 2000 < 0.965


def test_more_pairs_are_counted_until_they_would_decide():
    pairs = [(1.02, 1.0), (1.10, 1.0), (1.06, 1.0)]
    more = ratios.more_pairs(pairs, 1.0, math.inf)
    logs = [math.log(a) for a, _ in pairs]
    grown = ratios.of([(math.exp(x), 1.0) for x in logs * 10][: 3 + more])
    assert ratios.place(ratios.of(pairs), 1.0, math.inf) == "across"
    assert ratios.place(grown, 1.0, math.inf) == "inside"


def test_a_ratio_on_the_border_is_decided_by_no_number():
    assert ratios.more_pairs([(1.1, 1.0), (1.0, 1.1), (1.0, 1.0)], 1.0, math.inf) is None


def test_the_break_even_is_the_difference_of_starts_over_that_of_requests():
    found = break_even.break_even([61.0] * 3, [1.0] * 3, [1.0] * 3, [1.5] * 3)
    assert (found.found, found.slow) == ("pays", "a")
    assert found.requests == pytest.approx((120.0, 120.0, 120.0, 3))


def test_which_of_the_two_is_called_a_makes_no_difference():
    a, b = ([60.0, 62.0, 61.0], [1.00, 1.01, 0.99]), ([1.0, 1.2, 0.9], [1.5, 1.52, 1.49])
    one = break_even.break_even(a[0], b[0], a[1], b[1])
    two = break_even.break_even(b[0], a[0], b[1], a[1])
    assert (one.slow, two.slow) == ("a", "b")
    assert one.requests == pytest.approx(two.requests)


def test_who_is_ahead_in_both_is_ahead_always():
    found = break_even.break_even([60.0] * 3, [1.0] * 3, [2.0] * 3, [1.0] * 3)
    assert (found.found, found.slow, found.requests) == ("never", "a", None)


def test_what_cannot_be_told_apart_is_open():
    assert break_even.break_even([5.0, 6.0, 4.0], [5.1, 4.9, 5.0], [1.0] * 3, [2.0] * 3).found == "open"
    assert break_even.break_even([60.0] * 3, [1.0] * 3, [1.0, 2.0, 1.5], [1.4, 1.6, 1.5]).found == "open"


def test_seconds_saved_that_vary_too_much_leave_the_interval_without_an_end():
    found = break_even.break_even([60.0] * 3, [1.0] * 3, [0.1, 1.0, 5.0], [0.2, 2.2, 13.0])
    assert found.found == "pays"
    assert found.requests.mean > 0
    assert (found.requests.low, found.requests.high) == (None, None)


def test_one_boot_decides_nothing():
    found = break_even.break_even([90.0], [30.0], [1.0], [1.5])
    assert (found.found, found.requests) == ("open", None)
    assert found.start_s.mean == 60.0
    with pytest.raises(ValueError, match="every boot"):
        break_even.break_even([61.0], [1.0], [1.0], [])


def test_fiellers_interval_covers_the_truth_as_often_as_it_says():
    rng = random.Random(7)
    covered = undecided = 0
    for _ in range(2000):
        starts = [70 + rng.gauss(0, 3) for _ in range(4)]
        saved = [rng.gauss(0.5, 0.05) for _ in range(4)]
        found = break_even.break_even(starts, [10.0] * 4, [2 - s for s in saved], [2.0] * 4)
        undecided += found.requests is None
        endless = found.requests is not None and found.requests.low is None
        covered += endless or (found.requests is not None and found.requests.low <= 120 <= found.requests.high)
    assert undecided < 20
    assert 0.935 < covered / (2000 - undecided) < 0.965
