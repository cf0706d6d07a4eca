"""The rows that the controller benchmarks publish: plain values that both systems are given alike.

Keys and jagged lengths come from counters, so that a row is never like one before it: that is the dearest case for a
controller that keeps exact shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

PARTITION: Final = "train"
FIELDS: Final = 16
FIXED_SHAPE: Final = (8,)
BLOCK_ROWS: Final = 256
"""Rows per publication where rows are made that are not what is measured."""


@dataclass(frozen=True, slots=True)
class Columns:
    """``fields`` fields, of which the first ``jagged`` have rows of one dimension and any length, the others all have
    `FIXED_SHAPE`. Even fields are int64, odd ones float32."""

    fields: int
    jagged: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"field{number:02}" for number in range(self.fields))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one publication: ``lengths`` int64 (rows,) holds for all jagged fields."""

    columns: Columns
    keys: tuple[str, ...]
    lengths: NDArray[np.int64]

    @property
    def tags(self) -> list[dict[str, float]]:
        """What is set on each row, different for each."""
        return [{"score": float(length)} for length in self.lengths]


class RowMaker:
    """Makes rows with keys and lengths that it never made before."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._made = 0

    def batch(self, rows: int) -> Rows:
        first, self._made = self._made, self._made + rows
        keys = tuple(f"rollout-{number}" for number in range(first, self._made))
        return Rows(self.columns, keys, np.arange(first + 1, self._made + 1, dtype=np.int64))

    def batches(self, total: int, rows: int) -> Iterator[Rows]:
        """``total`` rows, ``rows`` at a time."""
        for done in range(0, total, rows):
            yield self.batch(min(rows, total - done))

    def again(self, keys: tuple[str, ...]) -> Rows:
        """Rows of new lengths under keys that exist."""
        made = self.batch(len(keys))
        return Rows(self.columns, keys, made.lengths)
