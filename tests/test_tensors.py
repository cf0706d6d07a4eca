"""Tensors, arrays and plain values become columns and come back with their dtype, shape and bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from actors.tensors import as_column, to_tensor
from policies.errors import WireError

DTYPES = [
    torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 2, 4)], ids=str)
def test_tensors_round_trip_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(24)[: math.prod(shape)].reshape(shape).to(dtype)
    column = as_column("x", tensor)
    for i in range(3):
        back = to_tensor(column, i)
        assert back.dtype == dtype and back.shape == tensor[i].shape
        assert bits(back) == bits(tensor[i])


def test_views_gradients_and_big_endian_arrays() -> None:
    base = torch.arange(12, dtype=torch.float32, requires_grad=True).reshape(3, 4).t()
    assert torch.equal(to_tensor(as_column("x", base), 1), base.detach()[1])
    big = np.arange(3, dtype=">i4")
    column = as_column("x", big)
    assert column.dtype == "int32" and [int(v) for v in column] == [0, 1, 2]


def test_a_batch_of_one_ragged_row_keeps_its_layout() -> None:
    for rows in ([torch.arange(7)], [torch.arange(7), torch.arange(3)]):
        column = as_column("ids", torch.nested.nested_tensor(rows, layout=torch.jagged))
        assert column.shape == (-1,) and column.rows == len(rows)
    column = as_column("experts", [torch.zeros((7, 4, 2), dtype=torch.uint8)])
    assert column.shape == (-1, 4, 2) and column.row_shape(0) == (7, 4, 2)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.tensor(1.0), "without dimensions"),
        (np.array(1.0), "without dimensions"),
        (3, "int is no column"),
        ([], "empty list"),
        ([torch.zeros(1), torch.zeros(1, dtype=torch.int64)], "one dtype"),
        ([np.zeros(1), "x"], "ndarray would not come back"),
        (np.array(["a"]), "unknown dtype"),
        (np.array([object()]), "unknown dtype 'object'"),
        ([(1, 2)], "tuple would not come back"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_field(value: Any, text: str) -> None:
    with pytest.raises(WireError, match=f"field 'odd'.*{text}"):
        as_column("odd", value)


def test_values_that_numpy_lacks_never_pass_for_integers() -> None:
    column = as_column("x", torch.arange(3).to(torch.bfloat16).reshape(1, 3))
    for read in (lambda: column.row(0), column.padded):
        with pytest.raises(WireError, match=r"numpy has no dtype 'bfloat16'.*to_tensor"):
            read()
    assert column.bits(0).tolist() == [0, 16256, 16384]
    assert to_tensor(column, 0).tolist() == [0.0, 1.0, 2.0]


def test_what_is_read_has_memory_of_its_own() -> None:
    source = torch.zeros(2, 3)
    tensor = to_tensor(as_column("x", source), 0)
    tensor += 1
    assert source.sum() == 0
