"""What a get returns: a batch of fields, each of them a `RaggedTensor`.

A field is a `RaggedTensor` whatever its rows are: of one length or of many, of one key or of a thousand, tensors, byte
strings or plain values. So no reader needs two paths. Row i of a field is ``field[i]``, and

| ask                                   | get                                                                       |
| ------------------------------------- | ------------------------------------------------------------------------- |
| ``len(field)``, ``field[i]``, ``for`` | the rows: a tensor of the row's own shape, ``bytes``, or the plain value  |
| ``field.rows()``                      | all of them, in a list                                                    |
| ``field[a:b]``                        | a `RaggedTensor` of these rows                                            |
| ``field.lengths()``                   | int64 ``(rows,)``: the size of each row in the dimension that is jagged   |
| ``field.padded(pad_value)``           | one tensor ``(rows, *longest shape)``                                     |
| ``field.nested()``                    | a nested tensor of layout ``torch.jagged``                                |
| ``field.numpy()``                     | the rows as arrays, without torch                                         |

A scalar per row has shape ``()``: ``field[i]`` is 0-d, ``field.padded()`` is ``(rows,)``, also for a single key.

Memory: ``field[i]``, ``rows`` and ``nested`` share one tensor that belongs to the field. Where the answer's own memory
may not be written to, that tensor is a copy, made once. ``padded`` shares it where no dimension is jagged, and
``numpy`` gives views of the answer's memory.

torch is imported when a tensor is asked for, and not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from policies.answers import Batch
from policies.columns import JAGGED, Column, require_exact_pad
from policies.dtypes import BYTES, MSGPACK
from policies.errors import WireError

if TYPE_CHECKING:
    import torch


class RaggedTensor:
    """The rows of one field. ``column`` holds them as they are stored."""

    __slots__ = ("_flat", "column")

    def __init__(self, column: Column) -> None:
        self.column = column
        self._flat: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """``(rows, *row shape)`` with -1 for a dimension in which rows may differ."""
        return (self.column.rows, *self.column.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows. `WireError` for byte strings, plain values, and times (which only numpy has)."""
        import torch

        self._require_tensors()
        name = self.column.dtype
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise WireError(f"torch {torch.__version__} has no dtype {name!r}; numpy() may give the rows as arrays")
        return dtype

    def __len__(self) -> int:
        return self.column.rows

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> RaggedTensor: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return RaggedTensor(self.column.take(np.arange(*index.indices(len(self)))))
        row = range(len(self))[index]
        if self.column.dtype in (BYTES, MSGPACK):
            return self.column.row(row)
        edges, column = self.column.offsets, self.column
        begin, end = (row, row + 1) if edges is None else (int(edges[row]), int(edges[row + 1]))
        return self._elements()[begin * column.unit : end * column.unit].view(column.row_shape(row))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows())

    def __repr__(self) -> str:
        return f"RaggedTensor({self.column.dtype}, {len(self)} rows of shape {self.column.shape})"

    def rows(self) -> list[Any]:
        """Every row: a tensor of its own shape, ``bytes``, or the plain value."""
        column = self.column
        if column.dtype in (BYTES, MSGPACK):
            return list(column)
        import torch

        if column.offsets is None:
            return list(self._elements().view(column.rows, *column.shape).unbind())
        if column.shape[0] != JAGGED:
            return [self[i] for i in range(len(self))]
        return list(torch.split(self._steps(), np.diff(column.offsets).tolist()))

    def lengths(self) -> torch.Tensor:
        """The size of each row in the jagged dimension (the first where none is), int64 ``(rows,)``. `WireError` for
        scalars per row, byte strings and plain values."""
        import torch

        self._require_tensors()
        column = self.column
        if not column.shape:
            raise WireError("a scalar per row has no length")
        if column.offsets is None:
            return torch.full((column.rows,), column.shape[0], dtype=torch.int64)
        return torch.from_numpy(np.diff(column.offsets))

    def padded(self, pad_value: Any = 0) -> torch.Tensor:
        """One tensor ``(rows, *longest shape)``, short rows filled up with ``pad_value`` at their end.

        `WireError` when a whole-number dtype cannot hold the pad value, and for rows that are no tensors.
        """
        import torch

        column, dtype = self.column, self.dtype
        if column.offsets is None:
            return self._elements().view(column.rows, *column.shape)
        try:
            pad = torch.tensor(pad_value, dtype=dtype)
        except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
            raise WireError(f"{pad_value!r} is no pad value for {column.dtype}: {error}") from None
        if not (dtype.is_floating_point or dtype.is_complex):
            require_exact_pad(pad.item(), pad_value, column.dtype)
        return _typed(torch.from_numpy(column.filled(_stored_scalar(pad, column))), dtype)

    def nested(self) -> torch.Tensor:
        """A nested tensor of layout ``torch.jagged``, component i being row i.

        A view where the first dimension of the rows is jagged (or none is); where another one is, one copy. `WireError`
        for scalars per row and for rows that are no tensors, of which torch has no nested form.
        """
        import torch

        column = self.column
        if not column.shape:
            raise WireError("torch has no nested tensor of scalars; padded() gives one entry per row")
        at = column.shape.index(JAGGED) if column.offsets is not None else 0
        offsets = torch.zeros(column.rows + 1, dtype=torch.int64)
        torch.cumsum(self.lengths(), 0, out=offsets[1:])
        if at == 0:
            return torch.nested.nested_tensor_from_jagged(self._steps(), offsets)
        empty = self._elements().new_empty([0 if n == JAGGED else n for n in column.shape])
        values = torch.cat([empty, *self.rows()], dim=at)
        return torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=at + 1)

    def numpy(self) -> list[Any]:
        """Every row as an array (``bytes`` and plain values as they are): views of the answer's memory, which may be
        read-only. `WireError` for a dtype that numpy lacks."""
        return list(self.column)

    def _require_tensors(self) -> None:
        if self.column.dtype in (BYTES, MSGPACK):
            kind = "byte strings" if self.column.dtype == BYTES else "plain values"
            raise WireError(f"the rows are {kind} and no tensors; rows() gives them. Put an array for a numeric field")

    def _elements(self) -> torch.Tensor:
        """All elements, flat."""
        import torch

        if self._flat is None:
            values = self.column.values
            self._flat = _typed(torch.from_numpy(values if values.flags.writeable else values.copy()), self.dtype)
        return self._flat

    def _steps(self) -> torch.Tensor:
        """All elements, one entry per step of the rows' first dimension."""
        column = self.column
        steps = column.rows * column.shape[0] if column.offsets is None else int(column.offsets[-1])
        return self._elements().view(steps, *column.shape[1:])


def _typed(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored if stored.dtype == dtype else stored.view(dtype)


def _stored_scalar(value: torch.Tensor, column: Column) -> np.ndarray[Any, Any]:
    import torch

    return value.view(getattr(torch, column.values.dtype.name)).numpy()


@dataclass(frozen=True, slots=True, eq=False)
class TensorBatch(Batch):
    """`Batch` as users read it: ``batch[field]`` is the field's `RaggedTensor`, with one row per key that is ok."""

    _fields: dict[str, RaggedTensor] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, batch: Batch) -> TensorBatch:
        return cls(batch.keys, batch.verdicts, batch.columns, batch.causes)

    def __getitem__(self, field: str) -> RaggedTensor:
        if field not in self._fields:
            self._fields[field] = RaggedTensor(self.columns[field])
        return self._fields[field]
