"""From what a user holds to columns: what `put` takes, and what it refuses.

What is read equals what was put in dtype, row shape and bits (`actors.ragged` is the way back):

| a field's value, one row per key                   | kept as                | read back, for each row             |
| -------------------------------------------------- | ---------------------- | ----------------------------------- |
| tensor or array ``(rows, …)``                      | rows of one shape ``…``| ``…``; ``()`` for scalars per row   |
| nested tensor, of either layout                    | a jagged column        | the component                       |
| list of tensors or arrays                          | a jagged column        | the item                            |
| list of ``bytes``                                  | byte strings           | the ``bytes``                       |
| list of other Python values                        | msgpack, each for itself| the value, of the same type        |
| `RaggedTensor` or `Column`, from a get             | what it is             | the same                            |

- *Tensors:* every dtype of torch (quantised ones excepted), any strides, conjugated or not, with or without gradient
  (which is left behind), on any device (`actors.host_copy`). *Arrays:* every dtype of numpy that means the same on
  every machine and is no object, in either byte order; times keep their unit.
- *Rows* of a list may differ in one dimension, the first or another, and may have length zero. A list of tensors is
  jagged also when all lengths agree; 0-d items become scalars per row.
- *Python values* come back as they went: a list of floats, ints or bools is no tensor, since guessing a dtype from
  values would make a field's dtype depend on what is in the batch. Give ``np.asarray(scores)`` for a numeric field.
  Plain are None, bool, int (64 bits), float, str, bytes, list, and dict with str, int or bytes keys.
- *All rows* of a field are of one kind (tensor, array, bytes, plain) and of one dtype.
- *Refused*, naming the field and the key: whatever would come back as less than it was. So tuples, numpy scalars,
  objects, subclasses of tensor and array (masked arrays, tensors with attributes of their own), sparse and quantised
  tensors.

Costs: no copy of a contiguous tensor or array on the host or of the values of a jagged nested tensor; for a list one
pass that joins the rows. Per row, Python only looks at type and shape.

torch is used only where the user's process has imported it: nothing here imports it, so processes that handle numpy
only stay free of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actors.host_copy import host_array, joined_on_host
from actors.ragged import RaggedTensor
from actors.tensordicts import flat_items, is_tensordict
from policies.columns import JAGGED, Column, bytes_rows, plain_rows, rows_of
from policies.errors import WireError

if TYPE_CHECKING:
    import torch


def as_columns(fields: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Column]:
    """The columns of a put of ``keys``: see the table above for what a field's value may be.

    ``fields`` may be a ``TensorDict`` whose first batch dimension is the keys'. Its nested ``TensorDict``s become
    fields named by their path (``"a.b"``), its ``NonTensorData`` and ``NonTensorStack`` plain values.

    Raises `WireError` naming the field, and the key where it is one row's fault.
    """
    if is_tensordict(fields):
        return {name: as_column(name, value, keys) for name, value in flat_items(fields, len(keys))}
    return {name: as_column(name, value, keys) for name, value in fields.items()}


def as_column(name: str, value: Any, keys: Sequence[str] = ()) -> Column:
    """The column that a field's value means, by the table above. Raises `WireError` naming the field, and the key
    (without ``keys``, the number) of a row that does not fit."""
    try:
        return _as_column(value)
    except WireError as error:
        row = error.details.get("row")
        if row is None:
            raise WireError(f"field {name!r}: {error.message}", field=name) from None
        if row < len(keys):
            raise WireError(f"field {name!r}, key {keys[row]!r}: {error.message}", field=name, key=keys[row]) from None
        raise WireError(f"field {name!r}, row {row}: {error.message}", field=name, row=row) from None


def _as_column(value: Any) -> Column:
    if isinstance(value, Column):
        return value
    if isinstance(value, RaggedTensor):
        return value.column
    if isinstance(value, list | tuple):
        return _rows(value)
    kind = _kind(value)
    if kind == TENSOR:
        return _nested(value) if value.is_nested else _dense(*host_array(value))
    if kind == ARRAY:
        return _dense(None, value)
    raise WireError(f"a {type(value).__name__} is no column: give an array, a tensor, or a list with one item per key")


def _dense(dtype: str | None, array: NDArray[Any]) -> Column:
    if array.ndim == 0:
        raise WireError("a tensor or array without dimensions has no rows; give one entry per key")
    return Column.dense(array, dtype)


def _nested(value: Any) -> Column:
    """Of a jagged nested tensor the buffers as they are, where they are laid out as a column is; else row by row."""
    import torch

    value = value.detach()
    if value.layout == torch.jagged and value.lengths() is None and not isinstance(value.shape[1], int):
        dtype, values = host_array(value.values())
        offsets = value.offsets().to("cpu", torch.int64).numpy()
        if offsets[0] == 0 and offsets[-1] == len(values):
            shape = (JAGGED, *values.shape[1:])
            return Column(dtype, shape, len(offsets) - 1, values.reshape(-1), offsets)
    return _tensor_rows(value.unbind())


def _rows(items: Sequence[Any]) -> Column:
    if not items:
        raise WireError("an empty list has no rows")
    kind = _kind(items[0], 0)
    if len(set(map(type, items))) > 1:
        for row, item in enumerate(items):
            if (other := _kind(item, row)) != kind:
                raise WireError(f"a {other} ({type(item).__name__}), while the rows before it are {kind}s", row=row)
    if kind == TENSOR:
        return _tensor_rows(items)
    if kind == ARRAY:
        return rows_of(items)
    return bytes_rows(items) if kind == BYTE_STRING else plain_rows(items)


def _tensor_rows(tensors: Sequence[torch.Tensor]) -> Column:
    dtype, values, shapes = joined_on_host(tensors)
    return Column.joined(values, shapes, dtype)


TENSOR, ARRAY, BYTE_STRING, PLAIN = "tensor", "array", "byte string", "plain value"


def _kind(value: Any, row: int | None = None) -> str:
    """Which kind of value this is; `WireError` for a tensor or array that is more than its elements."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return TENSOR
    if isinstance(value, np.ndarray):
        if type(value) not in (np.ndarray, np.memmap):
            raise WireError(f"a {type(value).__name__} is more than its elements; give np.asarray(…) of it", row=row)
        return ARRAY
    return BYTE_STRING if type(value) is bytes else PLAIN
