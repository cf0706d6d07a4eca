"""The rows of one put as a unit keeps them: columns, which rows live, and whose memory it is.

Rows keep the position they were put at for as long as they live, wherever in memory they are. When more bytes belong to
dead rows than to live ones the block is *compacted*: its live rows are copied together and the old memory is let go. So
a block never holds more than twice what its live rows need (plus `COMPACT_ABOVE_BYTES`, below which no copy is worth
it), no small row pins a large object for ever, and no more bytes are copied than have died.

Costs: `read` one lookup and one gather per field (a view where the rows are adjacent); `free` O(rows freed), and
O(rows) for the first; compaction O(live bytes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED, MISSING
from policies.columns import Column

OVERHEAD_BYTES = 1_024
"""What a block costs beside its values and offsets, counted so that a capacity bounds memory also when blocks are one
small row each. (Measured with tracemalloc for a block of one row and 3 fields: 1.0 kB.)"""

MOST_ROWS = 1 << 24
"""Rows of one block."""

COMPACT_ABOVE_BYTES = 4_096
"""Dead bytes that are not worth a copy."""


@dataclass(frozen=True, slots=True)
class Part:
    """The answer to one read of one block: the rows asked for, except those listed in ``bad`` as
    (index in the read, verdict, cause)."""

    columns: Mapping[str, Column]
    bad: Sequence[tuple[int, str, str]] = ()


def all_bad(positions: NDArray[np.int64], verdict: str, cause: str) -> Part:
    return Part({}, [(index, verdict, cause) for index in range(len(positions))])


@dataclass(slots=True)
class StoredBlock:
    """``rows`` were put at positions 0, 1, …; ``columns`` hold ``kept`` of them, in their order. ``nbytes`` counts the
    columns and `OVERHEAD_BYTES`; ``live``: rows that were not freed.

    ``where`` int64 ``(rows,)``: the row of ``columns`` that was put at each position, -1 for one that is dead; None as
    long as no row is. ``weights`` int64 ``(kept,)``: bytes of each row of ``columns``, filled together with it.
    ``backing``: the object that the memory of the columns can be lent as, None when it is just memory.
    """

    id: int
    rows: int
    columns: dict[str, Column]
    nbytes: int
    live: int
    kept: int
    where: NDArray[np.int64] | None = None
    weights: NDArray[np.int64] | None = None
    dead_bytes: int = 0
    backing: Any = None

    @classmethod
    def of(cls, block_id: int, rows: int, columns: Mapping[str, Column], backing: Any = None) -> StoredBlock:
        """A block all of whose rows live."""
        return cls(block_id, rows, dict(columns), _nbytes(columns), rows, rows, backing=backing)

    @classmethod
    def of_live(
        cls, block_id: int, rows: int, columns: Mapping[str, Column], positions: NDArray[np.int64]
    ) -> StoredBlock:
        """A block of which only the rows at ``positions`` live; ``columns`` hold just these."""
        block = cls.of(block_id, len(positions), columns)
        block.rows = rows
        block.where = np.full(rows, -1, np.int64)
        block.where[positions] = np.arange(len(positions))
        block.weights = _weights(columns, len(positions))
        return block

    def live_positions(self) -> NDArray[np.int64] | None:
        """The positions of the rows that live, ascending; None when all do."""
        return None if self.where is None else np.flatnonzero(self.where >= 0)

    def live_columns(self) -> dict[str, Column]:
        """The rows that live, in order: a copy of them where others are dead, else no copy."""
        if self.where is None:
            return self.columns
        alive = self.where[self.where >= 0]
        return {name: column.take(alive) for name, column in self.columns.items()}

    def snapshot(self) -> StoredBlock:
        """The block as it is now, whatever is freed later."""
        return replace(self, columns=dict(self.columns), where=None if self.where is None else self.where.copy())

    def read(self, fields: Sequence[str], positions: NDArray[np.int64]) -> Part:
        """The rows at ``positions``; freed rows and unknown fields get a verdict instead."""
        unknown = [name for name in fields if name not in self.columns]
        if unknown:
            return all_bad(positions, MISSING, f"block {self.id} has no field {unknown[0]!r}")
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < self.rows:
            return all_bad(positions, MISSING, f"block {self.id} has {self.rows} rows")
        bad: list[tuple[int, str, str]] = []
        if self.where is not None:
            positions = self.where[positions]
            dead = positions < 0
            bad = [(index, CLEARED, "the row was cleared") for index in np.flatnonzero(dead).tolist()]
            positions = positions[~dead]
        return Part({name: self.columns[name].take(positions) for name in fields}, bad)

    def free(self, positions: NDArray[np.int64]) -> None:
        """Forget rows; those that are dead already are no error. Compacts the block when that is due."""
        if self.where is None or self.weights is None:
            self.where, self.weights = np.arange(self.rows, dtype=np.int64), _weights(self.columns, self.kept)
        dying = np.unique(self.where[positions])
        dying = dying[dying >= 0]
        self.where[positions] = -1
        self.live -= len(dying)
        self.dead_bytes += int(self.weights[dying].sum())
        if self.live and self.dead_bytes > max(COMPACT_ABOVE_BYTES, (self.nbytes - OVERHEAD_BYTES) // 2):
            self._compact(self.where, self.weights)

    def _compact(self, where: NDArray[np.int64], weights: NDArray[np.int64]) -> None:
        alive = where[where >= 0]
        self.columns = {name: _own(column.take(alive)) for name, column in self.columns.items()}
        where[where >= 0] = np.arange(self.live)
        self.kept, self.weights, self.dead_bytes, self.backing = self.live, weights[alive], 0, None
        self.nbytes = _nbytes(self.columns)


def _nbytes(columns: Mapping[str, Column]) -> int:
    return OVERHEAD_BYTES + sum(column.nbytes for column in columns.values())


def _weights(columns: Mapping[str, Column], rows: int) -> NDArray[np.int64]:
    weights = np.zeros(rows, np.int64)
    for column in columns.values():
        weights += column.row_bytes() + (0 if column.offsets is None else column.offsets.itemsize)
    return weights


def _own(column: Column) -> Column:
    """The column in memory of its own: a gather has that already, a view of adjacent rows has not."""
    return column if column.values.base is None else replace(column, values=column.values.copy())
