"""Histograms of seconds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.histogram import SMALLEST_S, Histogram


@given(st.lists(st.floats(SMALLEST_S, 1000.0), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_known_within_a_factor_of_two(values: list[float], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = next(value for n, value in enumerate(sorted(values), 1) if n >= share * len(values))
    assert exact <= histogram.quantile(share) * (1 + 1e-9)
    assert histogram.quantile(share) <= max(2 * exact, SMALLEST_S) * (1 + 1e-9)


@given(st.lists(st.floats(-1.0, 1e9), max_size=50))
def test_every_value_is_counted_once_however_small_or_large(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    plain = histogram.to_plain()
    assert isinstance(plain["buckets"], list)
    assert plain["count"] == len(values) == sum(count for _, count in plain["buckets"])


def test_an_empty_histogram_has_no_quantiles() -> None:
    assert Histogram().quantile(0.99) == 0.0
