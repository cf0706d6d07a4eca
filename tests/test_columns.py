"""Columns: what goes in comes out, whatever is sliced, gathered or joined in between."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from policies.columns import JAGGED, LONG_RUN, Column, bytes_rows, plain_rows, rows_of
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


@given(row_lists(), st.data())
def test_collect_is_concat_and_take(rows: list[NDArray[Any]], data: st.DataObject) -> None:
    """Rows of several parts, in any order, with repeats: as if the parts had been one column."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [rows_of(rows).slice(begin, end) for begin, end in bounds]
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8))
    collected = Column.collect(parts, np.array(order, np.int64))
    assert collected.rows == len(order)
    assert all(same(row, rows[p]) for row, p in zip(collected, order, strict=True))


@pytest.mark.parametrize("length", [3, 3 * LONG_RUN])
@pytest.mark.parametrize("trailing", [(), (2, 2)])
@pytest.mark.parametrize("order", [[3, 4, 5, 0, 1, 2], [0, 1, 2, 3, 4, 5], [5, 3, 3, 1], [2, 3, 0], []])
def test_short_and_long_rows_are_gathered_alike(length: int, trailing: tuple[int, ...], order: list[int]) -> None:
    """Long runs are copied as pieces, short ones by an index; nobody can tell."""
    rows = [np.arange((length + i) * math.prod(trailing)).reshape(length + i, *trailing) + i for i in range(6)]
    positions = np.array(order, np.int64)
    even = [row[:length] for row in rows]
    parts = [
        [rows_of(rows[:3]), rows_of(rows[3:])],
        [Column.dense(np.stack(even[:3])), Column.dense(np.stack(even[3:]))],
    ]
    for columns, wanted in zip(parts, (rows, even), strict=True):
        for taken in (Column.concat(columns).take(positions), Column.collect(columns, positions)):
            assert taken.rows == len(order)
            assert all(same(row, wanted[p]) for row, p in zip(taken, order, strict=True))


def test_parts_that_name_different_dimensions_jagged_join_where_their_rows_allow_it() -> None:
    """Rows that all agree call their first dimension jagged, others the one in which they differ."""
    agree, differ = [np.ones((2, 3)), np.zeros((2, 3))], [np.ones((2, 3)), np.ones((2, 5))]
    assert (rows_of(agree).shape, rows_of(differ).shape) == ((JAGGED, 3), (2, JAGGED))
    for parts in ([agree, differ], [differ, agree], [agree, differ, agree]):
        wanted = [row for part in parts for row in part]
        columns = [rows_of(part) for part in parts]
        order = np.arange(len(wanted))[::-1]
        assert all(same(a, b) for a, b in zip(Column.concat(columns), wanted, strict=True))
        assert all(same(a, wanted[i]) for a, i in zip(Column.collect(columns, order), order, strict=True))
    with pytest.raises(WireError, match="one dimension only"):
        Column.concat([rows_of(differ), rows_of([np.ones((2, 3)), np.ones((4, 3))])])


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


@pytest.mark.parametrize(
    ("dtype", "pad"), [("uint8", -100), ("int64", 0.5), ("bool", 2), ("uint8", 300), ("int8", "x")]
)
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(dtype: str, pad: object) -> None:
    with pytest.raises(WireError, match=f"no pad value for {dtype}"):
        Column.jagged(np.ones(3, dtype), [1, 2]).padded(pad)


def test_times_are_padded_with_a_time() -> None:
    for unit in ("M8[s]", "M8[ns]"):
        padded = Column.jagged(np.array([1, 2, 3], unit), [1, 2]).padded("NaT")
        assert padded.dtype == np.dtype(unit) and np.isnat(padded).tolist() == [[False, True], [False, False]]


def test_what_is_stored_of_a_dtype_must_have_its_width() -> None:
    assert Column.dense(np.ones(2, np.uint16), "bfloat16").dtype == "bfloat16"
    with pytest.raises(WireError, match="stored as uint16, and uint8 came"):
        Column.dense(np.ones(2, np.uint8), "bfloat16")


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
    with pytest.raises(WireError, match="float32 and int64"):
        rows_of([np.zeros(1, np.float32), np.zeros(1, np.int64)])
    with pytest.raises(WireError, match="one dimension only"):
        rows_of([np.zeros((1, 2)), np.zeros((2, 1))])
    with pytest.raises(IndexError):
        Column.dense(np.zeros(2)).row(2)
