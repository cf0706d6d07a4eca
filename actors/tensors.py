"""Between what a user holds (torch tensors, numpy arrays, bytes, plain values) and columns.

torch is used only where the user's process has imported it: nothing here imports it on the way in, so processes that
handle numpy only stay free of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from policies.columns import Column, bytes_rows, plain_rows, rows_of
from policies.dtypes import BYTES, MSGPACK, storage_dtype
from policies.errors import RegraftError, WireError

if TYPE_CHECKING:
    import torch


def as_column(name: str, value: Any) -> Column:
    """The column that a field's value means.

    A `Column` stays as it is. An array or tensor ``(rows, …)`` is one row per entry of its first dimension; a nested
    tensor one row per component. A list or tuple is one row per item: arrays or tensors (they may differ in one
    dimension), byte strings, or msgpack-plain values. Raises `WireError` naming the field for anything else.
    """
    try:
        return _as_column(value)
    except WireError as error:
        raise WireError(f"field {name!r}: {error.message}", field=name) from None


def _as_column(value: Any) -> Column:
    if isinstance(value, Column):
        return value
    if _is_tensor(value):
        if value.is_nested:
            return _tensor_rows(list(value.unbind()))
        if value.dim() == 0:
            raise WireError("a tensor without dimensions has no rows; give one entry per key")
        dtype, array = _host_array(value)
        return Column.dense(array, dtype)
    if isinstance(value, np.ndarray):
        if value.ndim == 0:
            raise WireError("an array without dimensions has no rows; give one entry per key")
        storage_dtype(value.dtype.name)
        return Column.dense(value.astype(value.dtype.newbyteorder("<"), copy=False))
    if isinstance(value, list | tuple):
        return _rows(value)
    raise WireError(f"a {type(value).__name__} is no column: give an array, a tensor, or a list with one item per key")


def _rows(items: Sequence[Any]) -> Column:
    if not items:
        raise WireError("an empty list has no rows")
    if all(_is_tensor(item) for item in items):
        return _tensor_rows(items)
    if all(isinstance(item, np.ndarray) for item in items):
        for item in items:
            storage_dtype(item.dtype.name)
        return rows_of([item.astype(item.dtype.newbyteorder("<"), copy=False) for item in items])
    if all(isinstance(item, bytes) for item in items):
        return bytes_rows(items)
    return plain_rows(items)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_rows(tensors: Sequence[torch.Tensor]) -> Column:
    pairs = [_host_array(tensor) for tensor in tensors]
    dtypes = sorted({dtype for dtype, _ in pairs})
    if len(dtypes) != 1:
        raise WireError(f"the rows of a field must have one dtype, these have {', '.join(dtypes)}")
    return rows_of([array for _, array in pairs], dtypes[0])


def _host_array(tensor: torch.Tensor) -> tuple[str, NDArray[Any]]:
    """(dtype name, contiguous host array of its storage dtype)."""
    import torch

    name = str(tensor.dtype).removeprefix("torch.")
    stored = storage_dtype(name)
    host = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    if stored.name == name:
        return name, host.numpy()
    width = {1: torch.uint8, 2: torch.uint16}[stored.itemsize]
    return name, host.view(width).numpy()


def to_tensor(column: Column, index: int) -> torch.Tensor:
    """Row ``index`` as a tensor with memory of its own (a copy), in its own dtype; needs torch."""
    import torch

    if column.dtype in (BYTES, MSGPACK):
        raise RegraftError(f"rows of dtype {column.dtype!r} are not tensors; column.row({index}) gives the value")
    tensor = torch.from_numpy(np.array(column.bits(index)))
    dtype = getattr(torch, column.dtype)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)
