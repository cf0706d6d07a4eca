"""Columns: the rows of one field, as one values buffer and one offsets buffer.

A column holds ``rows`` values of one dtype and one row shape in which at most one dimension is jagged. That covers a
batch of scalars ``()``, of fixed shapes ``(48, 8)``, and of token sequences with or without trailing dimensions
``(-1,)``, ``(-1, 48, 8)``. A row that is sliced out is a view; nothing here copies unless it says so.

Costs: `Column.slice` O(1); `Column.take` one gather over the bytes taken (O(1) when the positions are adjacent);
`Column.concat` one copy. None of them runs Python per row, except building a column from a list of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from policies.dtypes import BYTES, MSGPACK, storage_dtype
from policies.errors import WireError

JAGGED = -1
DEEPEST = 64
"""Levels of lists and mappings in a plain value: far below what msgpack and a Python stack can hold."""


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """``values``: flat 1-D array of all elements, row after row. ``shape``: the row shape, with `JAGGED` in the one
    dimension whose length differs from row to row. ``offsets``: int64 ``(rows + 1,)``, counted in units of the jagged
    dimension, ``None`` when no dimension is jagged. ``dtype``: a name from `policies.dtypes`.
    """

    dtype: str
    shape: tuple[int, ...]
    rows: int
    values: NDArray[Any]
    offsets: NDArray[np.int64] | None = None

    @classmethod
    def dense(cls, array: NDArray[Any], dtype: str | None = None) -> Column:
        """A column of ``len(array)`` rows of one shape from an array ``(rows, *shape)``."""
        array = np.ascontiguousarray(array)
        return cls(dtype or array.dtype.name, tuple(array.shape[1:]), array.shape[0], array.reshape(-1))

    @classmethod
    def jagged(cls, values: NDArray[Any], lengths: Sequence[int] | NDArray[Any], dtype: str | None = None) -> Column:
        """A column of rows ``(length, *trailing)`` from ``values`` ``(sum(lengths), *trailing)``."""
        values = np.ascontiguousarray(values)
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if int(offsets[-1]) != values.shape[0]:
            raise WireError(f"the lengths add up to {int(offsets[-1])} but the values have {values.shape[0]} entries")
        return cls(dtype or values.dtype.name, (JAGGED, *values.shape[1:]), len(lengths), values.reshape(-1), offsets)

    @property
    def unit(self) -> int:
        """Elements per step of the jagged dimension, or per row when no dimension is jagged."""
        return math.prod(n for n in self.shape if n != JAGGED)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def element_offsets(self) -> NDArray[np.int64]:
        """Where each row begins and the last ends in ``values``: int64 ``(rows + 1,)``, in elements."""
        if self.offsets is None:
            return np.arange(self.rows + 1, dtype=np.int64) * self.unit
        return self.offsets * self.unit

    def lengths(self) -> NDArray[np.int64] | None:
        """The length of each row's jagged dimension, int64 ``(rows,)``; ``None`` when no dimension is jagged."""
        return None if self.offsets is None else np.diff(self.offsets)

    def row_bytes(self) -> NDArray[np.int64]:
        """Value bytes of each row, int64 ``(rows,)``."""
        return np.diff(self.element_offsets()) * self.values.itemsize

    def row_shape(self, index: int) -> tuple[int, ...]:
        if self.offsets is None:
            return self.shape
        length = int(self.offsets[index + 1] - self.offsets[index])
        return tuple(length if n == JAGGED else n for n in self.shape)

    def row(self, index: int) -> Any:
        """Row ``index``: an array view of its shape, or ``bytes``, or the plain value of a msgpack column.

        Raises `WireError` for a dtype that numpy lacks: its values are stored as integers, and must not pass for them.
        """
        flat = self._flat(index)
        if self.dtype == BYTES:
            return flat.tobytes()
        if self.dtype == MSGPACK:
            return msgpack.unpackb(flat.tobytes(), strict_map_key=False)
        self._require_numpy()
        return flat.reshape(self.row_shape(index))

    def bits(self, index: int) -> NDArray[Any]:
        """Row ``index`` as it is stored: of a dtype that numpy lacks, the bits of its values as unsigned integers."""
        return self._flat(index).reshape(self.row_shape(index))

    def _flat(self, index: int) -> NDArray[Any]:
        if not 0 <= index < self.rows:
            raise IndexError(f"row {index} of a column with {self.rows} rows")
        if self.offsets is None:
            begin, end = index * self.unit, (index + 1) * self.unit
        else:
            begin, end = int(self.offsets[index]) * self.unit, int(self.offsets[index + 1]) * self.unit
        return self.values[begin:end]

    def _require_numpy(self) -> None:
        if storage_dtype(self.dtype).name != self.dtype:
            raise WireError(
                f"numpy has no dtype {self.dtype!r}; actors.tensors.to_tensor(column, index) gives a row as a tensor"
            )

    def __iter__(self) -> Any:
        return (self.row(i) for i in range(self.rows))

    def slice(self, begin: int, end: int) -> Column:
        """Rows ``begin..end`` as a view of the values."""
        if self.offsets is None:
            values = self.values[begin * self.unit : end * self.unit]
            return Column(self.dtype, self.shape, end - begin, values)
        base = int(self.offsets[begin])
        values = self.values[base * self.unit : int(self.offsets[end]) * self.unit]
        return Column(self.dtype, self.shape, end - begin, values, self.offsets[begin : end + 1] - base)

    def take(self, positions: NDArray[np.int64]) -> Column:
        """The rows at ``positions``, in that order: a view when they are adjacent and ascending, else one gather."""
        count = len(positions)
        if count == 0:
            return self.slice(0, 0)
        first = int(positions[0])
        if np.array_equal(positions, np.arange(first, first + count)):
            return self.slice(first, first + count)
        if self.offsets is None:
            values = self.values.reshape(self.rows, -1)[positions] if self.unit else self.values[:0]
            return Column(self.dtype, self.shape, count, values.reshape(-1))
        begins, lengths = self.offsets[positions], np.diff(self.offsets)[positions]
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(int(offsets[-1]), dtype=np.int64) + np.repeat(begins - offsets[:-1], lengths)
        values = self.values.reshape(-1, self.unit)[index] if self.unit else self.values[:0]
        return Column(self.dtype, self.shape, count, values.reshape(-1), offsets)

    @staticmethod
    def concat(parts: Sequence[Column]) -> Column:
        """The rows of all ``parts`` in order. Dense parts of different shapes join along the one dimension in which
        they differ; `WireError` when dtypes differ or more than one dimension does."""
        if len(parts) == 1:
            return parts[0]
        dtypes = sorted({p.dtype for p in parts})
        if len(dtypes) != 1:
            raise WireError(f"columns of different dtypes cannot be joined: {', '.join(dtypes)}")
        shape = _common_shape([p.shape for p in parts])
        rows, values = sum(p.rows for p in parts), np.concatenate([p.values for p in parts])
        if JAGGED not in shape:
            return Column(dtypes[0], shape, rows, values)
        at = shape.index(JAGGED)
        lengths = []
        for part in parts:
            own = part.lengths()
            lengths.append(own if own is not None else np.full(part.rows, part.shape[at], np.int64))
        offsets = np.zeros(rows + 1, np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        return Column(dtypes[0], shape, rows, values, offsets)

    def padded(self, pad_value: Any = 0) -> NDArray[Any]:
        """All rows in one array ``(rows, *longest shape)``, short rows filled up with ``pad_value`` (a copy).

        Raises `WireError` for byte strings, plain values and dtypes that numpy lacks.
        """
        self._require_numpy()
        if self.offsets is None:
            return self.values.reshape(self.rows, *self.shape)
        lengths = np.diff(self.offsets)
        longest = int(lengths.max(initial=0))
        shape = [longest if n == JAGGED else n for n in self.shape]
        out = np.full((self.rows, *shape), pad_value, self.values.dtype)
        at = self.shape.index(JAGGED)
        for i in range(self.rows):
            out[i][(slice(None),) * at + (slice(int(lengths[i])),)] = self.row(i)
        return out


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    ranks = {len(s) for s in shapes}
    if len(ranks) != 1:
        raise WireError(f"rows with different numbers of dimensions cannot be joined: {sorted(set(shapes))}")
    common = tuple(sizes[0] if len(set(sizes)) == 1 else JAGGED for sizes in zip(*shapes, strict=True))
    if common.count(JAGGED) > 1:
        raise WireError(f"rows may differ in one dimension only, these differ in more: {sorted(set(shapes))}")
    return common


def rows_of(arrays: Sequence[NDArray[Any]], dtype: str | None = None) -> Column:
    """A column from one array per row; the rows may differ in one dimension. Copies once.

    Jagged in the dimension in which the rows differ, and in the first when all have one shape, so that what a list of
    sequences becomes does not depend on whether their lengths happen to agree. 0-d rows are never jagged.
    """
    if not arrays:
        raise WireError("a column needs at least one row")
    names = sorted({a.dtype.name for a in arrays})
    if len(names) != 1:
        raise WireError(f"the rows of a field must have one dtype, these have {', '.join(names)}")
    shape = _common_shape([a.shape for a in arrays])
    values = np.concatenate([a.reshape(-1) for a in arrays])
    if not shape:
        return Column(dtype or names[0], shape, len(arrays), values)
    at = shape.index(JAGGED) if JAGGED in shape else 0
    offsets = np.zeros(len(arrays) + 1, np.int64)
    np.cumsum([a.shape[at] for a in arrays], out=offsets[1:])
    return Column(dtype or names[0], (*shape[:at], JAGGED, *shape[at + 1 :]), len(arrays), values, offsets)


def bytes_rows(rows: Sequence[bytes], dtype: str = BYTES) -> Column:
    """A column of byte strings (or, with ``dtype`` `MSGPACK`, of packed plain values)."""
    values = np.frombuffer(b"".join(rows), storage_dtype(dtype))
    return Column.jagged(values, [len(r) for r in rows], dtype)


def plain_rows(rows: Sequence[Any]) -> Column:
    """A column of msgpack-plain values. `WireError` names a value that msgpack cannot hold without loss."""
    for value in rows:
        require_plain(value)
    try:
        return bytes_rows([msgpack.packb(value) for value in rows], MSGPACK)
    except (ValueError, OverflowError) as error:
        raise WireError(f"a plain value that msgpack cannot hold: {error}") from None


def require_plain(value: Any, depth: int = 0) -> None:
    """Refuse what msgpack would change silently (tuples, numpy scalars, objects); see the types it keeps below."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return
    if depth == DEEPEST:
        raise WireError(f"a plain value may be nested {DEEPEST} deep")
    if type(value) is list:
        for item in value:
            require_plain(item, depth + 1)
        return
    if type(value) is dict:
        for key, item in value.items():
            if type(key) not in (str, int, bytes):
                raise WireError(f"a plain mapping may have str, int or bytes keys, not {type(key).__name__}: {key!r}")
            require_plain(item, depth + 1)
        return
    raise WireError(
        f"a value of type {type(value).__name__} would not come back as it went: {value!r}. Plain values are None, "
        "bool, int, float, str, bytes, list and dict; put arrays and tensors in fields of their own"
    )
