"""Exact shapes: a number for every row shape, and how many live rows of a field have each.

What it must support, and at what cost: one row of a field comes or goes in O(1) dictionary operations, whatever the
number of rows that live; "do all live rows agree, and on what?" is O(1). Nothing is rescanned and nothing is
approximate.

A row shape ``(first, *trailing)`` is the number ``trailing id << 40 | first``. So all rows of a batch of token
sequences are numbered by one vector addition, and lengths that were never seen need no new entry; only distinct
*trailing* shapes are remembered (for ever: their number is that of the data's layouts, or of the distinct lengths
where a dimension other than the first is jagged). The same row shape has the same number however its column said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from policies.columns import JAGGED
from policies.errors import Refused

FIRST_BITS = 40
LONGEST = (1 << FIRST_BITS) - 1
SCALAR = 0
REMEMBERED_SHAPES = 4_096
"""Whole shapes whose number is kept at hand."""

ShapeKeys = int | NDArray[np.int64]
"""The shape numbers of a block's rows in one field: one for all of them, or int64 ``(rows,)``."""

ShapeCounts = dict[int, int]
"""Shape number → live rows of one field; a shape without live rows has no entry."""


class Shapes:
    """Between row shapes and their numbers. Trailing shape ids begin at 1, so that `SCALAR` is no other shape's."""

    def __init__(self, trailing: Iterable[tuple[int, ...]] = ()) -> None:
        self._bases: dict[tuple[int, ...], int] = {}
        self._whole: dict[tuple[int, ...], int] = {(): SCALAR}
        for shape in trailing:
            self._base(shape)

    @property
    def trailing(self) -> list[tuple[int, ...]]:
        """What to give to a new `Shapes` so that it numbers all shapes alike."""
        return list(self._bases)

    def keys(self, shape: tuple[int, ...], lengths: NDArray[np.int64] | None, rows: int) -> ShapeKeys:
        """The shape numbers of ``rows`` rows of a column with row shape ``shape`` (`JAGGED` in at most one place) and
        ``lengths`` int64 ``(rows,)`` of that dimension; ``rows`` ≥ 1. `Refused` when these do not belong together."""
        if lengths is None:
            key = self._whole.get(shape)
            if key is not None:
                return key
            if 0 <= shape[0] <= LONGEST:
                key = self._base(shape[1:]) + shape[0]
                if len(self._whole) < REMEMBERED_SHAPES:
                    self._whole[shape] = key
                return key
            raise Refused(f"row shape {shape} has no lengths for its jagged dimension, or a size outside 0..2^40")
        if len(lengths) != rows:
            raise Refused(f"{len(lengths)} lengths came for {rows} rows")
        if shape.count(JAGGED) != 1:
            raise Refused(f"lengths came for row shape {shape}; exactly one of its sizes must be {JAGGED}")
        if rows == 1:
            shortest = longest = int(lengths.item(0))
        else:
            shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or longest > LONGEST:
            raise Refused(f"lengths {shortest}..{longest} are not all in 0..2^40")
        if shape[0] == JAGGED:
            return self._base(shape[1:]) + (longest if shortest == longest else lengths)
        return np.array(
            [self._key(tuple(length if n == JAGGED else n for n in shape)) for length in lengths.tolist()], np.int64
        )

    def shape(self, key: int) -> tuple[int, ...]:
        """The row shape with this number."""
        if key == SCALAR:
            return ()
        return (key & LONGEST, *self.trailing[(key >> FIRST_BITS) - 1])

    def _key(self, shape: tuple[int, ...]) -> int:
        key = self.keys(shape, None, 1)
        assert isinstance(key, int)
        return key

    def _base(self, trailing: tuple[int, ...]) -> int:
        base = self._bases.get(trailing)
        if base is None:
            if any(not 0 <= n <= LONGEST for n in trailing):
                raise Refused(f"a row shape ends in {trailing}; sizes are 0..2^40, and one jagged size needs lengths")
            base = self._bases[trailing] = (len(self._bases) + 1) << FIRST_BITS
        return base


def add_rows(counts: Sequence[ShapeCounts], numbers: Sequence[ShapeKeys], rows: int) -> None:
    """``rows`` rows of a block came: field i counts them under ``numbers[i]``. O(1) per field whose rows share one
    shape, else O(rows)."""
    for count, keys in zip(counts, numbers, strict=True):
        if type(keys) is int:
            count[keys] = count.get(keys, 0) + rows
        else:
            for key in cast(NDArray[np.int64], keys).tolist():
                count[key] = count.get(key, 0) + 1


def remove_rows(counts: Sequence[ShapeCounts], numbers: Sequence[ShapeKeys], positions: NDArray[np.int64]) -> None:
    """The rows at ``positions`` of a block went, from fields that counted them under ``numbers``. O(1) per row and
    field, whatever the number of rows that live."""
    rows = len(positions)
    for count, keys in zip(counts, numbers, strict=True):
        if type(keys) is int:
            left = count[keys] - rows
            if left:
                count[keys] = left
            else:
                del count[keys]
            continue
        for key in cast(NDArray[np.int64], keys)[positions].tolist():
            left = count[key] - 1
            if left:
                count[key] = left
            else:
                del count[key]


def uniform(count: ShapeCounts) -> int | None:
    """The number of the one shape that all live rows have; None when they differ or there are none."""
    return next(iter(count)) if len(count) == 1 else None
