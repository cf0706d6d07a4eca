"""Columns: the rows of one field, as one values buffer and one offsets buffer.

A column holds ``rows`` values of one dtype and one row shape in which at most one dimension is jagged. That covers a
batch of scalars ``()``, of fixed shapes ``(48, 8)``, and of token sequences with or without trailing dimensions
``(-1,)``, ``(-1, 48, 8)``. A row that is sliced out is a view; nothing here copies unless it says so.

Costs: `Column.slice` O(1); `Column.take` and `Column.collect` no copy when the rows lie side by side in the order
asked, else one pass over the bytes taken; `Column.concat` one copy. Python runs per *run* of rows that lie side by
side, and only where runs are long (`LONG_RUN`); otherwise, and for rows of fixed shape, numpy gathers by an index.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from policies.dtypes import BYTES, MSGPACK, dtype_name, readable_dtype, storage_dtype
from policies.errors import WireError

JAGGED = -1
DEEPEST = 64
"""Levels of lists and mappings in a plain value: far below what msgpack and a Python stack can hold."""

LONG_RUN = 256
"""Elements from which on a run of rows is copied as one piece. A piece costs about 0.3 µs of Python and then runs at
the speed of memcpy, an index about 2 ns per step of the jagged dimension. Measured, in pieces and by index: 256 rows of
64 int64 take 0.07 and 0.03 ms, of 1,024 0.18 and 0.43 ms, of 16,384 2.5 and 13 ms."""


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
        """A column of ``len(array)`` rows of one shape from an array ``(rows, *shape)``. With ``dtype`` the array holds
        what is stored of values of that dtype. No copy of a contiguous little-endian array."""
        dtype, values = _stored(array, dtype)
        return cls(dtype, tuple(array.shape[1:]), array.shape[0], values)

    @classmethod
    def jagged(cls, values: NDArray[Any], lengths: Sequence[int] | NDArray[Any], dtype: str | None = None) -> Column:
        """A column of rows ``(length, *trailing)`` from ``values`` ``(sum(lengths), *trailing)``; see `dense`."""
        offsets = _offsets(lengths)
        if int(offsets[-1]) != values.shape[0]:
            raise WireError(f"the lengths add up to {int(offsets[-1])} but the values have {values.shape[0]} entries")
        dtype, flat = _stored(values, dtype)
        return cls(dtype, (JAGGED, *values.shape[1:]), len(lengths), flat, offsets)

    @classmethod
    def joined(cls, values: NDArray[Any], shapes: Sequence[tuple[int, ...]], dtype: str) -> Column:
        """A column of rows of ``shapes``, which differ in one dimension at most, from all their elements, row after row
        and flat, as they are stored.

        Jagged in the dimension in which the rows differ, and in the first when all have one shape, so that what a list
        of sequences becomes does not depend on whether their lengths happen to agree. 0-d rows are never jagged.
        """
        shape = _common_shape(shapes)
        if not shape:
            return cls(dtype, shape, len(shapes), values)
        at = shape.index(JAGGED) if JAGGED in shape else 0
        offsets = _offsets([own[at] for own in shapes])
        return cls(dtype, (*shape[:at], JAGGED, *shape[at + 1 :]), len(shapes), values, offsets)

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
        return flat.view(self._numpy_dtype()).reshape(self.row_shape(index))

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

    def _numpy_dtype(self) -> np.dtype[Any]:
        dtype = readable_dtype(self.dtype)
        if dtype is None:
            raise WireError(
                f"numpy has no dtype {self.dtype!r}; actors.ragged.RaggedTensor(column) gives the rows as what they are"
            )
        return dtype

    def __iter__(self) -> Iterator[Any]:
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
        first = int(positions[0]) if count else 0
        if count <= 1:
            return self.slice(first, first + count)
        begins, ends = _runs(positions)
        if len(begins) == 1:
            return self.slice(first, first + count)
        if self.offsets is None:
            values = self.values.reshape(self.rows, self.unit).take(positions, axis=0)
            return Column(self.dtype, self.shape, count, values.reshape(-1))
        starts = self.offsets[positions]
        offsets = _offsets(self.offsets[positions + 1] - starts)
        if int(offsets[-1]) * self.unit >= LONG_RUN * len(begins):
            bounds = zip(
                (self.offsets[begins] * self.unit).tolist(), (self.offsets[ends] * self.unit).tolist(), strict=True
            )
            values = np.concatenate([self.values[begin:end] for begin, end in bounds])
        else:
            index = np.arange(int(offsets[-1]), dtype=np.int64) + np.repeat(starts - offsets[:-1], np.diff(offsets))
            values = self.values.reshape(int(self.offsets[-1]), self.unit).take(index, axis=0).reshape(-1)
        return Column(self.dtype, self.shape, count, values, offsets)

    @staticmethod
    def concat(parts: Sequence[Column]) -> Column:
        """The rows of all ``parts`` in order. Parts of different shapes join along the one dimension in which their
        rows differ; `WireError` when dtypes differ or rows differ in more than one dimension."""
        if len(parts) == 1:
            return parts[0]
        dtype, shape, offsets = _layout(parts)
        return Column(dtype, shape, sum(p.rows for p in parts), np.concatenate([p.values for p in parts]), offsets)

    @staticmethod
    def collect(parts: Sequence[Column], order: NDArray[np.int64]) -> Column:
        """``Column.concat(parts).take(order)``, but long runs are copied once only, to where they are to lie."""
        if len(parts) == 1 or len(order) == 0:
            return Column.concat(parts).take(order)
        dtype, shape, offsets = _layout(parts)
        rows = [p.rows for p in parts]
        unit = math.prod(n for n in shape if n != JAGGED)
        edges = (np.arange(sum(rows) + 1) if offsets is None else offsets) * unit
        part_of_row = np.repeat(np.arange(len(parts)), rows)
        begins, ends = _runs(order, part_of_row[order])
        if int((edges[ends] - edges[begins]).sum()) < LONG_RUN * len(begins):
            return Column.concat(parts).take(order)
        of = part_of_row[begins]
        base = edges[np.cumsum([0, *rows])[of]]
        bounds = zip(of.tolist(), (edges[begins] - base).tolist(), (edges[ends] - base).tolist(), strict=True)
        values = np.concatenate([parts[p].values[begin:end] for p, begin, end in bounds])
        taken = None if offsets is None else _offsets(offsets[order + 1] - offsets[order])
        return Column(dtype, shape, len(order), values, taken)

    def padded(self, pad_value: Any = 0) -> NDArray[Any]:
        """All rows in one array ``(rows, *longest shape)``, short rows filled up with ``pad_value``; a copy, except
        where no dimension is jagged.

        Raises `WireError` for byte strings, plain values, dtypes that numpy lacks, and a pad value that the dtype
        cannot hold.
        """
        dtype = self._numpy_dtype()
        try:
            pad = np.array(pad_value).astype(dtype) if dtype.kind in "mM" else np.full((), pad_value, dtype)
        except (OverflowError, TypeError, ValueError) as error:
            raise WireError(f"{pad_value!r} is no pad value for {self.dtype}: {error}") from None
        if dtype.kind in "biu":
            require_exact_pad(pad.item(), pad_value, self.dtype)
        return self.filled(pad.view(self.values.dtype)).view(dtype)

    def filled(self, pad: NDArray[Any]) -> NDArray[Any]:
        """`padded` with everything as it is stored; ``pad`` is the stored form of the pad value, 0-d."""
        if self.offsets is None:
            return self.values.reshape(self.rows, *self.shape)
        lengths = np.diff(self.offsets)
        longest = int(lengths.max(initial=0))
        at = self.shape.index(JAGGED)
        out = np.full((self.rows, *(longest if n == JAGGED else n for n in self.shape)), pad, self.values.dtype)
        by_length = np.moveaxis(out, at + 1, 1)
        for i, length in enumerate(lengths.tolist()):
            by_length[i, :length] = np.moveaxis(self.bits(i), at, 0)
        return out


def require_exact_pad(held: Any, asked: Any, dtype: str) -> None:
    """Refuse a pad value that a whole-number dtype would change (others round it, like any value)."""
    if held != asked:
        raise WireError(f"{asked!r} is no pad value for {dtype}, which would hold {held!r}")


def _stored(array: NDArray[Any], dtype: str | None) -> tuple[str, NDArray[Any]]:
    """(dtype name, the elements flat and little-endian in their storage dtype)."""
    name = dtype or dtype_name(array.dtype)
    storage = storage_dtype(name)
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype != storage:
        if flat.dtype.byteorder == ">":
            flat = flat.astype(flat.dtype.newbyteorder("<"))
        if flat.dtype.itemsize != storage.itemsize:
            raise WireError(f"{name} is stored as {storage.name}, and {flat.dtype.name} came")
        flat = flat.view(storage)
    return name, flat


def _offsets(lengths: Sequence[int] | NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _runs(
    rows: NDArray[np.int64], groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The runs of ascending adjacent numbers in ``rows`` (at least one), as (first numbers, last numbers + 1). With
    ``groups``, one for each entry, a run is of one group."""
    new = rows[1:] != rows[:-1] + 1
    if groups is not None:
        new |= groups[1:] != groups[:-1]
    at = np.flatnonzero(new)
    return rows[np.append(0, at + 1)], rows[np.append(at, len(rows) - 1)] + 1


def _layout(parts: Sequence[Column]) -> tuple[str, tuple[int, ...], NDArray[np.int64] | None]:
    """(dtype, row shape, offsets) of the rows of all parts."""
    dtypes = sorted({p.dtype for p in parts})
    if len(dtypes) != 1:
        raise WireError(f"columns of different dtypes cannot be joined: {', '.join(dtypes)}")
    filled = [p for p in parts if p.rows] or parts[:1]
    shapes = [p.shape for p in filled]
    try:
        shape = _common_shape(shapes)
    except WireError:
        shape = _common_shape([_plainest_shape(p) for p in filled])
    if JAGGED not in shape:
        return dtypes[0], shape, None
    at = shape.index(JAGGED)
    lengths = [
        np.full(p.rows, p.shape[at]) if p.offsets is None or p.shape[at] != JAGGED else np.diff(p.offsets)
        for p in filled
    ]
    return dtypes[0], shape, _offsets(np.concatenate(lengths))


def _plainest_shape(column: Column) -> tuple[int, ...]:
    """The one shape of all rows where there is one: a column may call a dimension jagged in which its rows agree."""
    lengths = column.lengths()
    return column.shape if lengths is None or (lengths != lengths[0]).any() else column.row_shape(0)


def _common_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    for row, shape in enumerate(shapes):
        if len(shape) != len(shapes[0]):
            raise WireError(
                f"rows with different numbers of dimensions cannot be joined: {shapes[0]} and {shape}", row=row
            )
    sizes = [set(column) for column in zip(*shapes, strict=True)]
    common = tuple(JAGGED if len(own) > 1 else own.pop() for own in sizes)
    if common.count(JAGGED) > 1:
        raise WireError(f"rows may differ in one dimension only, these differ in more: {sorted(set(shapes))}")
    return common


def rows_of(arrays: Sequence[NDArray[Any]]) -> Column:
    """A column from one array per row; see `Column.joined`. Copies once."""
    if not arrays:
        raise WireError("a column needs at least one row")
    name = dtype_name(arrays[0].dtype)
    if len({array.dtype for array in arrays}) > 1:
        for row, array in enumerate(arrays):
            if dtype_name(array.dtype) != name:
                raise WireError(
                    f"the rows of a field must have one dtype, these have {name} and {array.dtype.name}", row=row
                )
    shapes = [array.shape for array in arrays]
    one_dimension = {len(shape) for shape in shapes} == {1}
    flat = arrays if one_dimension else [array.reshape(-1) for array in arrays]
    return Column.joined(_stored(np.concatenate(flat), None)[1], shapes, name)


def bytes_rows(rows: Sequence[bytes], dtype: str = BYTES) -> Column:
    """A column of byte strings (or, with ``dtype`` `MSGPACK`, of packed plain values)."""
    values = np.frombuffer(b"".join(rows), storage_dtype(dtype))
    return Column.jagged(values, [len(r) for r in rows], dtype)


def plain_rows(rows: Sequence[Any]) -> Column:
    """A column of msgpack-plain values. `WireError` names a value that msgpack cannot hold without loss."""
    packed = []
    for row, value in enumerate(rows):
        try:
            require_plain(value)
            packed.append(msgpack.packb(value))
        except WireError as error:
            raise WireError(error.message, row=row) from None
        except (ValueError, OverflowError) as error:
            raise WireError(f"a plain value that msgpack cannot hold: {error}", row=row) from None
    return bytes_rows(packed, MSGPACK)


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
