"""Grouping rows into PUTs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from policies.batching import plan_batches


@dataclass(frozen=True)
class Row:
    tokens: int
    nbytes: int


rows = st.lists(st.builds(Row, st.integers(0, 20), st.integers(0, 200)), max_size=30)
limits = st.tuples(st.integers(1, 6), st.integers(1, 30), st.integers(1, 300))


def fits(batch: tuple[Row, ...], max_rows: int, max_tokens: int, max_bytes: int) -> bool:
    return (
        len(batch) <= max_rows
        and sum(r.tokens for r in batch) <= max_tokens
        and sum(r.nbytes for r in batch) <= max_bytes
    )


@given(rows, limits)
def test_every_row_is_in_one_batch_and_in_order(records: list[Row], bounds: tuple[int, int, int]) -> None:
    batches = plan_batches(records, *bounds)
    assert [id(r) for batch in batches for r in batch] == [id(r) for r in records]
    assert all(batches)


@given(rows, limits)
def test_no_batch_breaks_a_limit_unless_one_row_does(records: list[Row], bounds: tuple[int, int, int]) -> None:
    assert all(len(batch) == 1 or fits(batch, *bounds) for batch in plan_batches(records, *bounds))


@given(rows, limits)
def test_no_batch_could_have_taken_the_next_row(records: list[Row], bounds: tuple[int, int, int]) -> None:
    batches = plan_batches(records, *bounds)
    assert not any(fits((*a, b[0]), *bounds) for a, b in itertools.pairwise(batches))


def test_bytes_bound_what_tokens_alone_would_not() -> None:
    """Rows with MoE routes: 48 layers, top-8, 2 bytes a token more."""
    heavy = [Row(1000, 1000 * (12 + 768))] * 4
    assert [len(b) for b in plan_batches(heavy, 256, 4_194_304, 2_000_000)] == [2, 2]
