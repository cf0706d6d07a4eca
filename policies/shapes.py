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

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from policies.columns import JAGGED
from policies.errors import Refused
from policies.locations import Lengths

FIRST_BITS = 40
LONGEST = (1 << FIRST_BITS) - 1
SCALAR = 0
REMEMBERED_SHAPES = 4_096
"""Whole shapes whose number is kept at hand."""

ShapeKeys = int | NDArray[np.int64]
"""The shape numbers of a block's rows in one field: one for all of them, or int64 ``(rows,)``."""

ShapeCounts = dict[int, int]
"""Shape number → how many hold that shape in one field: live rows, each for itself, or kinds of put whose live rows
all have it, each as one (`policies.blocks.Layout`). A shape that no live row has has no entry."""


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

    def number(self, shape: tuple[int, ...]) -> int:
        """The number of a row shape without a jagged dimension. `Refused` for a size outside 0..2^40."""
        key = self._whole.get(shape)
        if key is not None:
            return key
        if not 0 <= shape[0] <= LONGEST:
            raise Refused(f"row shape {shape} has no lengths for its jagged dimension, or a size outside 0..2^40")
        key = self._base(shape[1:]) + shape[0]
        if len(self._whole) < REMEMBERED_SHAPES:
            self._whole[shape] = key
        return key

    def numbers(self, shape: tuple[int, ...], lengths: Lengths, rows: int) -> ShapeKeys:
        """The numbers of ``rows`` rows whose shape is jagged: `JAGGED` in ``shape`` stands for ``lengths``.

        `Refused` when these do not belong together.
        """
        if shape.count(JAGGED) != 1:
            raise Refused(f"lengths came for row shape {shape}; exactly one of its sizes must be {JAGGED}")
        if isinstance(lengths, int):
            shortest = longest = lengths
        else:
            if len(lengths) != rows:
                raise Refused(f"{len(lengths)} lengths came for {rows} rows")
            shortest, longest = int(lengths.min()), int(lengths.max())
        if shortest < 0 or longest > LONGEST:
            raise Refused(f"lengths {shortest}..{longest} are not all in 0..2^40")
        if shape[0] == JAGGED:
            return self._base(shape[1:]) + lengths
        if isinstance(lengths, int):
            return self.number(_filled(shape, lengths))
        return np.array([self.number(_filled(shape, length)) for length in lengths.tolist()], np.int64)

    def shape(self, key: int) -> tuple[int, ...]:
        """The row shape with this number."""
        if key == SCALAR:
            return ()
        return (key & LONGEST, *self.trailing[(key >> FIRST_BITS) - 1])

    def _base(self, trailing: tuple[int, ...]) -> int:
        base = self._bases.get(trailing)
        if base is None:
            if any(not 0 <= n <= LONGEST for n in trailing):
                raise Refused(f"a row shape ends in {trailing}; sizes are 0..2^40, and one jagged size needs lengths")
            base = self._bases[trailing] = (len(self._bases) + 1) << FIRST_BITS
        return base


def count(counts: ShapeCounts, number: int, holders: int) -> None:
    """``holders`` more (or, negative, fewer) hold the shape ``number``. O(1)."""
    left = counts.get(number, 0) + holders
    if left:
        counts[number] = left
    else:
        del counts[number]


def count_rows(counts: ShapeCounts, numbers: ShapeKeys, rows: int) -> None:
    """The ``rows`` rows of a block came, with shape ``numbers``. O(1) when all have one shape, else O(rows)."""
    if isinstance(numbers, int):
        count(counts, numbers, rows)
    else:
        for number in numbers.tolist():
            counts[number] = counts.get(number, 0) + 1


def discount_rows(counts: ShapeCounts, numbers: ShapeKeys, positions: NDArray[np.int64]) -> None:
    """The rows at ``positions`` of a block went. O(1) when all its rows have one shape, else O(1) per position."""
    if isinstance(numbers, int):
        count(counts, numbers, -len(positions))
    else:
        for number in numbers[positions].tolist():
            left = counts[number] - 1
            if left:
                counts[number] = left
            else:
                del counts[number]


def _filled(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    return tuple([length if size == JAGGED else size for size in shape])


def uniform(counts: ShapeCounts) -> int | None:
    """The number of the one shape that all live rows have; None when they differ or there are none."""
    return next(iter(counts)) if len(counts) == 1 else None
