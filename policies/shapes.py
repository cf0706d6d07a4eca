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

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Union, cast

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

FEW_ROWS = 32
"""Up to so many, adding them one by one is faster than a call of numpy."""

ShapeKeys = Union[int, "array[int]"]
"""The shape numbers of a block's rows in one field: one for all of them, or one for each (typecode ``q``)."""

ShapeCounts = dict[int, int]
"""Shape number → how many hold that shape in one field: live rows, each for itself, or kinds of put whose live rows
all have it, each as one (`policies.blocks.Layout`). A shape that no live row has has no entry."""


class JaggedShape(NamedTuple):
    """A row shape with `JAGGED` in one place. ``base``: the number of rows of length 0 when that is the first, so that
    the number of any other is a sum; None when it is not."""

    shape: tuple[int, ...]
    base: int | None

    def filled(self, length: int) -> tuple[int, ...]:
        return tuple([length if size == JAGGED else size for size in self.shape])


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

    def jagged(self, shape: tuple[int, ...]) -> JaggedShape:
        """How rows of this shape, jagged in one dimension, are numbered. `Refused` when that cannot be."""
        if shape.count(JAGGED) != 1:
            raise Refused(f"row shape {shape}: rows may differ in one dimension only")
        return JaggedShape(shape, self._base(shape[1:]) if shape[0] == JAGGED else None)

    def numbers(self, jagged: JaggedShape, lengths: Lengths, rows: int) -> ShapeKeys:
        """The numbers of ``rows`` rows with ``lengths`` in their jagged dimension; `Refused` for impossible lengths."""
        if type(lengths) is int:
            if not 0 <= lengths <= LONGEST:
                raise Refused(f"length {lengths} is not in 0..2^40")
            return self.number(jagged.filled(lengths)) if jagged.base is None else jagged.base + lengths
        listed = cast("NDArray[np.int64]", lengths)
        if len(listed) != rows:
            raise Refused(f"{len(listed)} lengths came for {rows} rows")
        if rows > FEW_ROWS and jagged.base is not None:
            # As an unsigned number a negative length is larger than any.
            if int(listed.view(np.uint64).max()) > LONGEST:
                raise Refused(f"lengths {listed.min()}..{listed.max()} are not all in 0..2^40")
            numbers = array("q")
            numbers.frombytes((listed + jagged.base).tobytes())
            return numbers
        sizes = listed.tolist()
        if min(sizes) < 0 or max(sizes) > LONGEST:
            raise Refused(f"lengths {min(sizes)}..{max(sizes)} are not all in 0..2^40")
        if jagged.base is None:
            return array("q", [self.number(jagged.filled(size)) for size in sizes])
        base = jagged.base
        return array("q", [base + size for size in sizes])

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
    if type(numbers) is int:
        counts[numbers] = counts.get(numbers, 0) + rows
    else:
        for number in cast("array[int]", numbers):
            counts[number] = counts.get(number, 0) + 1


def discount_rows(counts: ShapeCounts, numbers: ShapeKeys, positions: Sequence[int]) -> None:
    """The rows at ``positions`` of a block went. O(1) when all its rows have one shape, else O(1) per position."""
    if isinstance(numbers, int):
        count(counts, numbers, -len(positions))
        return
    for position in positions:
        number = numbers[position]
        left = counts[number] - 1
        if left:
            counts[number] = left
        else:
            del counts[number]


def uniform(counts: ShapeCounts) -> int | None:
    """The number of the one shape that all live rows have; None when they differ or there are none."""
    return next(iter(counts)) if len(counts) == 1 else None
