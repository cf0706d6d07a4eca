"""Grouping rows into PUTs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from policies.batching import Batching


@dataclass(frozen=True)
class Row:
    tokens: int
    nbytes: int
    layout: int = 0


Limits = tuple[int, int, int]
rows = st.lists(st.builds(Row, st.integers(0, 20), st.integers(0, 200), st.integers(0, 2)), max_size=30)
limits = st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(1, 300))


def batches_of(rows: list[Row], bounds: Limits) -> list[tuple[Row, ...]]:
    batching: Batching[Row] = Batching(*bounds)
    complete = [batch for row in rows if (batch := batching.add(row)) is not None]
    return [*complete, *iter(batching.rest, None)]


def fits(batch: tuple[Row, ...], max_rows: int, max_tokens: int, max_bytes: int) -> bool:
    return (
        len(batch) <= max_rows
        and sum(r.tokens for r in batch) <= max_tokens
        and sum(r.nbytes for r in batch) <= max_bytes
    )


@given(rows, limits)
def test_every_row_is_in_one_batch_and_in_the_order_of_its_layout(rows: list[Row], bounds: Limits) -> None:
    batches = batches_of(rows, bounds)
    assert all(batches) and all(len({row.layout for row in batch}) == 1 for batch in batches)
    for layout in range(3):
        together = [id(row) for batch in batches for row in batch if row.layout == layout]
        assert together == [id(row) for row in rows if row.layout == layout]


@given(rows, limits)
def test_no_batch_breaks_a_limit_unless_one_row_does(rows: list[Row], bounds: Limits) -> None:
    assert all(len(batch) == 1 or fits(batch, *bounds) for batch in batches_of(rows, bounds))


@given(rows, limits)
def test_no_batch_could_have_taken_the_next_row(rows: list[Row], bounds: Limits) -> None:
    for layout in range(3):
        batches = [batch for batch in batches_of(rows, bounds) if batch[0].layout == layout]
        assert not any(fits((*a, b[0]), *bounds) for a, b in itertools.pairwise(batches))


@given(rows, limits)
def test_a_full_batch_leaves_at_once(rows: list[Row], bounds: Limits) -> None:
    """No call stays frozen for a batch that can take no row any more."""
    batching: Batching[Row] = Batching(*bounds)
    for row in rows:
        batching.add(row)
    assert all(len(batch) < bounds[0] for batch in iter(batching.rest, None))


def test_bytes_bound_what_tokens_alone_would_not() -> None:
    """Rows with MoE routes: 48 layers, top-8, 2 bytes a token more."""
    heavy = [Row(1000, 1000 * (12 + 768))] * 4
    assert [len(b) for b in batches_of(heavy, (256, 4_194_304, 2_000_000))] == [2, 2]
