"""A field that was read: one container, whatever its rows are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.ragged import RaggedTensor, TensorBatch
from actors.tensors import as_column
from policies.answers import Batch
from policies.columns import Column
from policies.errors import WireError
from tests.tensor_bits import KEPT_DTYPES, bits, filled


@st.composite
def tensor_rows(draw: st.DrawFn) -> list[torch.Tensor]:
    """Rows of one dtype, any that torch has, that differ in at most one dimension; some with length zero."""
    dtype = draw(st.sampled_from(KEPT_DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    at = draw(st.integers(0, len(shape) - 1)) if shape else None
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    return [filled(tuple(n if i == at else m for i, m in enumerate(shape)), dtype, seed=n) for n in sizes]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)


@given(tensor_rows())
def test_every_way_to_the_rows_gives_the_rows(rows: list[torch.Tensor]) -> None:
    field = RaggedTensor(as_column("x", rows))
    assert len(field) == len(rows) and field.shape[0] == len(rows) and field.dtype == rows[0].dtype
    for ways in (field.rows(), list(field), [field[i] for i in range(len(rows))], field[:].rows()):
        assert all(same(got, row) for got, row in zip(ways, rows, strict=True))
    assert all(same(got, row) for got, row in zip(field[::-1], rows[::-1], strict=True))
    assert same(field[-1], rows[-1])
    with pytest.raises(IndexError):
        field[len(rows)]


@given(tensor_rows())
def test_nested_holds_every_row_and_can_be_put_again(rows: list[torch.Tensor]) -> None:
    field = RaggedTensor(as_column("x", rows))
    if not rows[0].dim():
        with pytest.raises(WireError, match="no nested tensor of scalars"):
            field.nested()
        return
    nested = field.nested()
    assert nested.layout == torch.jagged
    assert all(same(got, row) for got, row in zip(nested.unbind(), rows, strict=True))
    again = as_column("x", nested)
    assert all(same(got, row) for got, row in zip(RaggedTensor(again), rows, strict=True))


@given(tensor_rows())
def test_lengths_are_those_of_the_rows(rows: list[torch.Tensor]) -> None:
    field = RaggedTensor(as_column("x", rows))
    if not rows[0].dim():
        with pytest.raises(WireError, match="scalar per row has no length"):
            field.lengths()
        return
    at = field.column.shape.index(-1)
    assert field.lengths().dtype == torch.int64
    assert field.lengths().tolist() == [row.shape[at] for row in rows]


@given(tensor_rows().filter(lambda rows: rows[0].dtype.is_floating_point and rows[0].dtype.itemsize > 1))
def test_padded_holds_every_row_and_the_pad_value_elsewhere(rows: list[torch.Tensor]) -> None:
    padded = RaggedTensor(as_column("x", rows)).padded(1.5)
    assert padded.dtype == rows[0].dtype and padded.shape[0] == len(rows)
    for filled_row, row in zip(padded, rows, strict=True):
        region = tuple(slice(n) for n in row.shape)
        assert same(filled_row[region], row)
        if row.dim():
            rest = filled_row.clone()
            rest[region] = 1.5
            assert (rest == 1.5).all()


@pytest.mark.parametrize("lengths", [(5, 5), (5, 6), (5,), (0, 5), (0, 0)])
def test_one_container_whether_or_not_the_lengths_agree(lengths: tuple[int, ...]) -> None:
    rows = [torch.arange(n) for n in lengths]
    field = RaggedTensor(as_column("ids", rows))
    assert type(field) is RaggedTensor and field.shape == (len(lengths), -1)
    assert all(torch.equal(got, row) for got, row in zip(field, rows, strict=True))
    assert field.padded(-1).shape == (len(lengths), max(lengths))
    assert field.nested().is_nested and field.lengths().tolist() == list(lengths)


def test_a_tensor_of_equal_rows_reads_like_a_list_of_them() -> None:
    tensor = torch.arange(12).reshape(3, 4)
    dense, listed = RaggedTensor(as_column("x", tensor)), RaggedTensor(as_column("x", list(tensor)))
    for field in (dense, listed):
        assert torch.equal(field.padded(), tensor) and torch.equal(torch.stack(field.rows()), tensor)
        assert field.lengths().tolist() == [4, 4, 4]
        assert all(torch.equal(a, b) for a, b in zip(field.nested().unbind(), tensor, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.float64])
def test_scalars_per_row_have_no_dimension(dtype: torch.dtype) -> None:
    scores = torch.ones(8, dtype=dtype)
    for field in (RaggedTensor(as_column("score", scores)), RaggedTensor(as_column("score", list(scores)))):
        assert field.shape == (8,) and field[3].shape == () and field[3].dtype == dtype
        assert torch.equal(field.padded(), scores) and field[2:3].padded().shape == (1,)


def test_an_empty_selection_keeps_its_kind() -> None:
    for field in (RaggedTensor(as_column("x", [torch.ones(2, 3)])), RaggedTensor(as_column("x", torch.ones(1, 2, 3)))):
        none = field[:0]
        assert len(none) == 0 and none.rows() == [] and none.numpy() == []
        assert none.lengths().tolist() == [] and none.nested().shape[0] == 0 and len(none.padded()) == 0


@pytest.mark.parametrize(
    ("rows", "kind"), [([b"", b"ab"], "byte strings"), ([None, {"a": [1, b"x"], 7: "s"}], "plain values")]
)
def test_byte_strings_and_plain_values_are_rows_and_no_tensors(rows: list[object], kind: str) -> None:
    field = RaggedTensor(as_column("x", rows))
    assert field.rows() == list(field) == field.numpy() == [field[0], field[-1]] == rows
    assert field[1:].rows() == rows[1:]
    for ask in (field.padded, field.nested, field.lengths, lambda: field.dtype):
        with pytest.raises(WireError, match=kind):
            ask()


@pytest.mark.parametrize(
    ("dtype", "pad"), [(torch.uint8, -100), (torch.int64, 0.5), (torch.bool, 2), (torch.uint8, 300), (torch.uint4, 1)]
)
def test_a_pad_value_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, pad: float) -> None:
    field = RaggedTensor(as_column("x", [filled((1,), dtype), filled((2,), dtype)]))
    with pytest.raises(WireError, match="is no pad value for"):
        field.padded(pad)


def test_pad_values_are_rounded_and_may_be_not_a_number() -> None:
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.complex64):
        field = RaggedTensor(as_column("x", [torch.zeros(1).to(dtype), torch.zeros(2).to(dtype)]))
        assert bits(field.padded(0.3)[0, 1]) == bits(torch.tensor(0.3, dtype=dtype))
        assert field.padded(math.nan)[0, 1].isnan()


def test_values_that_numpy_lacks_never_pass_for_integers() -> None:
    field = RaggedTensor(as_column("x", torch.arange(3).to(torch.bfloat16).reshape(1, 3)))
    for read in (field.numpy, lambda: field.column.row(0), field.column.padded):
        with pytest.raises(WireError, match=r"numpy has no dtype 'bfloat16'.*RaggedTensor"):
            read()
    assert field.column.bits(0).tolist() == [0, 16256, 16384]
    assert field[0].tolist() == [0.0, 1.0, 2.0]


def test_memory_that_may_not_be_written_to_is_copied_once() -> None:
    received = np.frombuffer(bytes(range(8)), np.uint8)
    field = RaggedTensor(Column.jagged(received, [3, 5]))
    first = field[0]
    first += 100
    assert received.tolist() == list(range(8))
    assert field[0].tolist() == field.rows()[0].tolist() == field.nested()[0].tolist() == [100, 101, 102]
    assert not field.numpy()[0].flags.writeable


def test_memory_that_may_be_written_to_is_shared() -> None:
    own = np.arange(8)
    field = RaggedTensor(Column.jagged(own, [3, 5]))
    field[1][0] = -1
    assert own[3] == -1 and np.shares_memory(field.nested().values().numpy(), own)


def test_a_batch_gives_each_field_once() -> None:
    column = as_column("x", [torch.arange(3), torch.arange(1)])
    batch = TensorBatch.of(Batch(("a", "b", "c"), ("ok", "missing", "ok"), {"x": column}, {"b": "gone"}))
    assert batch["x"] is batch["x"] and [row.tolist() for row in batch["x"]] == [[0, 1, 2], [0]]
    assert list(batch.errors()) == ["b"] and batch.keys == ("a", "b", "c")
    with pytest.raises(KeyError):
        batch["y"]
    assert repr(batch["x"]) == "RaggedTensor(int64, 2 rows of shape (-1,))"
