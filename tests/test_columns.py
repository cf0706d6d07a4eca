"""Columns: what goes in comes out, whatever is sliced, gathered or joined in between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from policies.columns import JAGGED, Column, bytes_rows, plain_rows, rows_of
from policies.errors import WireError

DTYPES = st.sampled_from(["bool", "int8", "uint8", "int32", "int64", "float16", "float32", "float64"])


@st.composite
def row_lists(draw: st.DrawFn) -> list[NDArray[Any]]:
    """Rows of one dtype that differ in at most one dimension, zero-length and 0-d rows included."""
    dtype = np.dtype(draw(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    at = draw(st.integers(0, len(shape) - 1)) if shape and draw(st.booleans()) else None
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        own = [draw(st.integers(0, 5)) if i == at else n for i, n in enumerate(shape)]
        rows.append(draw(hnp.arrays(dtype, tuple(own), elements=st.integers(0, 1))))
    return rows


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())


@given(row_lists())
def test_rows_round_trip(rows: list[NDArray[Any]]) -> None:
    """A column gives back exactly the rows it was made from: dtype, shape and values."""
    column = rows_of(rows)
    assert column.rows == len(rows)
    assert all(same(column.row(i), row) for i, row in enumerate(rows))
    assert column.row_bytes().tolist() == [row.nbytes for row in rows]


@given(row_lists(), st.data())
def test_take_equals_indexing(rows: list[NDArray[Any]], data: st.DataObject) -> None:
    """`take` is list indexing, with repeats and in any order; `slice` is list slicing."""
    column = rows_of(rows)
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    taken = column.take(np.array(picked, np.int64))
    assert taken.rows == len(picked)
    assert all(same(taken.row(i), rows[p]) for i, p in enumerate(picked))
    begin = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(begin, len(rows)))
    assert all(same(a, b) for a, b in zip(column.slice(begin, end), rows[begin:end], strict=True))


@given(row_lists(), st.data())
def test_concat_undoes_any_split(rows: list[NDArray[Any]], data: st.DataObject) -> None:
    column = rows_of(rows)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [p for p in (column.slice(0, cut), column.slice(cut, len(rows))) if p.rows]
    joined = Column.concat(parts)
    assert all(same(joined.row(i), row) for i, row in enumerate(rows))


@given(row_lists())
def test_padded_holds_every_row_and_the_pad_value_elsewhere(rows: list[NDArray[Any]]) -> None:
    column = rows_of(rows)
    padded = column.padded(1)
    assert padded.shape[0] == len(rows)
    for filled, row in zip(padded, rows, strict=True):
        region = tuple(slice(0, n) for n in row.shape)
        assert same(np.asarray(filled[region]), row)
        if row.shape:
            rest = filled.copy()
            rest[region] = 1
            assert (rest == 1).all()


def test_adjacent_rows_are_taken_without_a_copy() -> None:
    column = Column.jagged(np.arange(10), [3, 3, 4])
    assert np.shares_memory(column.take(np.array([1, 2])).values, column.values)
    assert not np.shares_memory(column.take(np.array([2, 1])).values, column.values)


@pytest.mark.parametrize("lengths", [(5, 5), (5, 6), (5,), (0, 5), (0, 0)])
def test_jagged_columns_stay_jagged_when_the_lengths_agree(lengths: tuple[int, ...]) -> None:
    joined = Column.jagged(np.arange(sum(lengths), dtype=np.int64), lengths)
    listed = rows_of([np.arange(n) for n in lengths])
    for column in (joined, listed):
        assert column.shape == (JAGGED,)
        assert [len(row) for row in column] == list(lengths)


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "float64"])
def test_scalars_per_row_have_no_dimension(dtype: str) -> None:
    column = Column.dense(np.ones(8, dtype))
    assert column.shape == ()
    assert column.row(3).shape == ()
    assert column.padded().shape == (8,)


def test_bytes_and_plain_values() -> None:
    assert list(bytes_rows([b"", b"ab", b"\0"])) == [b"", b"ab", b"\0"]
    values = [None, True, 3, 1.5, "🌶", b"x", [1, [2]], {"a": {"b": []}, 7: "seven"}]
    assert list(plain_rows(values)) == values


@pytest.mark.parametrize("value", [(1, 2), np.float32(1.5), {1.5: 2}, {(1,): 2}, object(), [np.int64(3)]])
def test_values_that_would_change_on_the_way_are_refused(value: object) -> None:
    with pytest.raises(WireError):
        plain_rows([value])


def test_errors_say_what_does_not_fit() -> None:
    with pytest.raises(WireError, match="add up to 3"):
        Column.jagged(np.arange(4), [1, 2])
    with pytest.raises(WireError, match="float32, int64"):
        rows_of([np.zeros(1, np.float32), np.zeros(1, np.int64)])
    with pytest.raises(WireError, match="one dimension only"):
        rows_of([np.zeros((1, 2)), np.zeros((2, 1))])
    with pytest.raises(IndexError):
        Column.dense(np.zeros(2)).row(2)
