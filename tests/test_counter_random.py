"""The random numbers of a call depend on (seed, position) and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.counter_random import SEED_LIMIT, uniform

seeds = st.integers(0, SEED_LIMIT - 1)
positions = st.integers(0, 1 << 40)


@settings(max_examples=50)
@given(seeds, st.lists(positions, min_size=2, max_size=20))
def test_value_does_not_depend_on_order_or_history(seed: int, wanted: list[int]) -> None:
    """Asking for positions in any order, after any other draws, gives each the same value in [0, 1)."""
    forward = {p: uniform(seed, p) for p in wanted}
    assert {p: uniform(seed, p) for p in reversed(wanted)} == forward
    assert all(0 <= value < 1 for value in forward.values())


@settings(max_examples=50)
@given(seeds, seeds, positions, positions)
def test_distinct_seeds_and_positions_give_distinct_values(a: int, b: int, p: int, q: int) -> None:
    """With 53 bits, two of these streams' values coincide once in 9e15 tries."""
    assert (uniform(a, p) == uniform(b, q)) == ((a, p) == (b, q))


def test_values_are_roughly_uniform_along_positions_and_along_seeds() -> None:
    """Counts in 16 bins: chi-squared with 15 degrees of freedom stays under its 99.99 % quantile (44.3)."""
    for values in ([uniform(7, p) for p in range(4000)], [uniform(s, 3) for s in range(4000)]):
        counts, _ = np.histogram(values, bins=16, range=(0, 1))
        assert ((counts - 250) ** 2 / 250).sum() < 44.3


def test_neighbouring_streams_are_uncorrelated() -> None:
    a, b = ([uniform(seed, p) for p in range(3000)] for seed in (41, 42))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.08
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.08


def test_values_are_those_of_earlier_releases() -> None:
    """A checkpoint outlives a release: these numbers may never change."""
    assert [uniform(0, 0), uniform(1, 0), uniform(0, 1)] == [
        0.011546754286331562,
        0.3035680343067586,
        0.5023796042735054,
    ]


@pytest.mark.parametrize(("seed", "position"), [(-1, 0), (SEED_LIMIT, 0), (0, -1)])
def test_impossible_arguments_are_refused(seed: int, position: int) -> None:
    with pytest.raises(ValueError, match=str(seed if position == 0 else position)):
        uniform(seed, position)
