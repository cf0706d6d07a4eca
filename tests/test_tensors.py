"""Tensors, arrays and plain values become columns and come back with their dtype, shape and bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from actors.ragged import RaggedTensor
from actors.tensors import as_column, as_columns
from policies.dtypes import storage_dtype
from policies.errors import WireError
from tests.tensor_bits import KEPT_DTYPES, QUANTISED, bits, filled


@pytest.mark.parametrize("dtype", KEPT_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 2, 4)], ids=str)
def test_tensors_of_every_dtype_round_trip_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = filled(shape, dtype)
    column = as_column("x", tensor)
    assert column.dtype == str(dtype).removeprefix("torch.") and column.values.dtype == storage_dtype(column.dtype)
    for back, row in zip(RaggedTensor(column), tensor, strict=True):
        assert back.dtype == dtype and back.shape == row.shape
        assert bits(back) == bits(row)


@pytest.mark.parametrize("dtype", KEPT_DTYPES, ids=str)
def test_lists_of_tensors_of_every_dtype_round_trip_bit_for_bit(dtype: torch.dtype) -> None:
    rows = [filled(shape, dtype) for shape in ((2, 3), (0, 3), (5, 3))]
    field = RaggedTensor(as_column("x", rows))
    assert [row.shape for row in field] == [row.shape for row in rows]
    assert [bits(row) for row in field] == [bits(row) for row in rows]


def test_every_torch_dtype_is_either_kept_or_quantised() -> None:
    known = {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert known == {*KEPT_DTYPES, *QUANTISED}


@pytest.mark.parametrize("time", ["M8[ns]", "m8[s]", ">M8[D]", "M8"])
def test_times_keep_their_unit(time: str) -> None:
    stamps = np.array(["NaT", "NaT"] if time == "M8" else [1, -5], time)
    for column in (as_column("t", stamps), as_column("t", [stamps[:1], stamps])):
        assert column.row(1).dtype == stamps.dtype.newbyteorder("<")
    assert np.array_equal(as_column("t", [stamps]).row(0), stamps, equal_nan=True)
    with pytest.raises(WireError, match=r"torch .* has no dtype '(date|time).*numpy\(\)"):
        RaggedTensor(as_column("t", stamps)).padded()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(3.0).expand(4, 3),
        torch.arange(12.0, requires_grad=True).reshape(3, 4),
        torch.nn.Parameter(torch.ones(2, 3)),
        torch.full((4,), 1 + 2j).conj(),
        torch.full((4,), 1 + 2j).conj().imag,
        torch.full((4,), 1 + 2j, dtype=torch.complex32).conj(),
    ],
    ids=["transposed", "strided", "expanded", "gradient", "parameter", "conjugated", "negated", "half conjugated"],
)
def test_any_layout_is_stored_as_the_values_it_means(tensor: torch.Tensor) -> None:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    for value in (tensor, list(tensor)):
        field = RaggedTensor(as_column("x", value))
        assert [bits(row) for row in field] == [bits(row) for row in plain]
        assert not field[0].requires_grad


def test_arrays_of_either_byte_order_and_of_any_strides() -> None:
    for big in (np.arange(3, dtype=">i4"), np.arange(3, dtype=">f8")):
        for value in (big, [big[i] for i in range(0)] + [big[:1], big[1:]]):
            column = as_column("x", value)
            assert column.dtype == big.dtype.name and column.values.tolist() == [0, 1, 2]
    mixed = as_column("x", [np.arange(2, dtype=">i4"), np.arange(3, dtype="<i4")])
    assert [row.tolist() for row in mixed] == [[0, 1], [0, 1, 2]]
    fortran = [np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(9).reshape(3, 3).T]
    assert all(np.array_equal(row, given) for row, given in zip(as_column("x", fortran), fortran, strict=True))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("count", [1, 2])
def test_a_nested_tensor_is_the_list_of_its_components(layout: torch.layout, count: int) -> None:
    """Also when it has but one, and whichever dimension is jagged."""
    for shapes in (((7,), (3,)), ((7, 4, 2), (0, 4, 2)), ((2, 3), (2, 5))):
        rows = [torch.arange(math.prod(shape)).reshape(shape) for shape in shapes[:count]]
        column = as_column("ids", torch.nested.nested_tensor(rows, layout=layout))
        assert column.rows == count and column.shape == as_column("ids", rows).shape
        assert all(torch.equal(back, row) for back, row in zip(RaggedTensor(column), rows, strict=True))


def test_a_nested_tensor_with_holes_gives_its_components() -> None:
    values, offsets, lengths = torch.arange(12), torch.tensor([0, 4, 8]), torch.tensor([2, 3])
    holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths)
    assert [row.tolist() for row in RaggedTensor(as_column("x", holes))] == [[0, 1], [4, 5, 6]]


def test_contiguous_memory_is_not_copied() -> None:
    tensor, array = torch.arange(12).reshape(3, 4), np.arange(12).reshape(3, 4)
    nested = torch.nested.nested_tensor([tensor[0], tensor[1]], layout=torch.jagged)
    assert np.shares_memory(as_column("x", tensor).values, tensor.numpy())
    assert np.shares_memory(as_column("x", array).values, array)
    assert np.shares_memory(as_column("x", nested).values, nested.values().numpy())


@pytest.mark.parametrize("values", [[0.5, 1.0], [1, 2], [True, False], [[1, 2], [3]], [1, 2.5], [None, {"a": [1]}]])
def test_python_values_are_no_tensors_and_come_back_as_they_went(values: list[Any]) -> None:
    field = RaggedTensor(as_column("x", values))
    assert field.rows() == field.numpy() == values
    assert [type(value) for value in field] == [type(value) for value in values]
    with pytest.raises(WireError, match="plain values and no tensors"):
        field.padded()


class Subclass(torch.Tensor):
    pass


def named(tensor: torch.Tensor) -> torch.Tensor:
    tensor.origin = "x"  # type: ignore[attr-defined]
    return tensor


class Span:
    def __init__(self) -> None:
        self.tensor, self.origin, self.spans = torch.zeros(2), "x", [(0, 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1.0), "without dimensions"),
        (np.array(1.0), "without dimensions"),
        (3, "int is no column"),
        (Span(), "Span is no column"),
        ({"a": 1}, "dict is no column"),
        ([], "empty list"),
        ([torch.nested.nested_tensor([torch.ones(1)], layout=torch.strided)] * 2, "row is a nested tensor"),
        (np.array(["a"]), "unknown dtype 'str32'.*list of str"),
        (np.array([b"a"]), "unknown dtype 'bytes8'.*list of bytes"),
        (np.array([object()]), "unknown dtype 'object'.*list with one item per key"),
        (np.zeros(2, [("a", "i4"), ("b", "f4")]), "unknown dtype 'void64'.*field of its own"),
        (np.zeros(2, "V2"), "unknown dtype 'void16'.*field of its own"),
        (np.zeros(2, np.longdouble), "depends on the machine"),
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray is more than its elements"),
        (torch.ones(2).as_subclass(Subclass), "Subclass is more than its elements"),
        (named(torch.ones(2)), "attributes that would be lost: origin"),
        (torch.ones(2).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), "meta device"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantised.*dequantize"),
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused_with_the_field(value: Any, text: str) -> None:
    with pytest.raises(WireError, match=f"^field 'odd'(, key 'a')?: .*{text}"):
        as_columns({"odd": value}, ["a", "b"])


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (torch.zeros(1), "one dtype, these have int64 and float32"),
        (torch.zeros(1, 1, dtype=torch.int64), "different numbers of dimensions"),
        (np.zeros(1, np.int64), "a array|array"),
        (b"x", "byte string"),
        (None, "plain value .NoneType."),
        (torch.zeros(1, dtype=torch.int64).as_subclass(Subclass), "more than its elements"),
        (named(torch.zeros(1, dtype=torch.int64)), "attributes"),
    ],
    ids=str,
)
def test_a_row_that_is_not_like_the_others_is_refused_by_key(second: Any, text: str) -> None:
    with pytest.raises(WireError, match=f"^field 'odd', key 'b': .*{text}") as raised:
        as_columns({"odd": [torch.zeros(1, dtype=torch.int64), second]}, ["a", "b"])
    assert raised.value.details == {"field": "odd", "key": "b"}


@pytest.mark.parametrize("value", [(1, 2), np.float32(1.5), {1.5: 2}, Span(), [(0, 1)], 1 << 64, "\ud800"], ids=str)
def test_a_plain_value_that_would_change_is_refused_by_key(value: Any) -> None:
    with pytest.raises(WireError, match=r"^field 'odd', key 'b': "):
        as_columns({"odd": [1, value]}, ["a", "b"])


@pytest.mark.parametrize("first", [b"x", "x"])
def test_bytes_and_other_plain_values_do_not_mix(first: Any) -> None:
    other: Any = "y" if first == b"x" else b"y"
    with pytest.raises(WireError, match="row 1"):
        as_column("x", [first, other])


def test_what_was_read_can_be_put() -> None:
    column = as_column("x", [torch.arange(3), torch.arange(2)])
    assert as_column("x", RaggedTensor(column)) is column and as_column("x", column) is column
