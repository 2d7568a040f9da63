"""Numbers on a page: as many digits as were measured, published values in their own form."""

import pytest

from llmrepro import notation
from llmrepro.claim import Value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "–"),
        (98362432, "98,362,432"),
        (0.87, "0.87"),
        (125.244866, "125.2"),
        (12345.6, "12,350"),
        (1234.5, "1,234"),
        (0.0, "0"),
        (True, "yes"),
        ("mmap", "mmap"),
        (-0.25, "-0.25"),
    ],
)
def test_numbers_are_rounded_to_four_digits_and_whole_ones_kept(value, shown):
    assert notation.number(value) == shown


@pytest.mark.parametrize(
    ("value", "low", "high", "shown"),
    [
        (125.2449, 117.144, 133.3457, ("125.2", "117.1 to 133.3")),
        (118.18, 83.9, 152.4, ("118", "84 to 152")),
        (0.26023, 0.15739, 0.36306, ("0.260", "0.157 to 0.363")),
        (100.0, None, None, ("100", "")),
        (100.0, 100.0, 100.0, ("100.00", "100.00 to 100.00")),
        (2500.0, 2400.0, 2600.0, ("2,500", "2,400 to 2,600")),
        (0.0, -1.0, 1.0, ("0.00", "-1.00 to 1.00")),
    ],
)
def test_a_mean_has_the_digits_that_its_interval_leaves_it(value, low, high, shown):
    assert notation.measured(value, low, high) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (Value(range=(117.9, 124.8)), "117.9 to 124.8 tok/s"),
        (Value(about=180.0), "about 180 tok/s"),
        (Value(peak=200.5), "peak of 200.5 tok/s"),
        (Value(at_least=90.0), "at least 90 tok/s"),
        (Value(completed_to=32768), "completes to 32,768 tok/s"),
        (Value(failed_at=9472), "fails at 9,472 tok/s"),
        (Value(point=181.8), "181.8 tok/s"),
        (Value(exact=30), "30 tok/s"),
    ],
)
def test_a_published_value_is_written_in_the_form_in_which_it_was_published(value, shown):
    assert notation.published(value, "tok/s") == shown


@pytest.mark.parametrize("value", [5e-324, 1e-320, 1e308, float("inf"), float("nan")])
def test_no_number_is_too_odd_to_be_written(value):
    said = (notation.number(value), notation.measured(value, 0.0, value)[0], *notation.beside([value]))
    assert all(said)
