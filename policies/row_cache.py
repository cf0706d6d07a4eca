"""A small cache of rows that several callers are likely to want in turn, such as the head of a chain that siblings
share.

Rules:
1. Rows are written once and never replaced, so what is in here is never wrong. It may outlive its row in the plane.
2. A row's arrays are copied when it enters, so that a small row does not keep the buffer of a large read alive, and are
   read-only from then on.
3. At most ``capacity`` bytes; who was not asked for the longest goes first. A row larger than that does not enter.

Cost: O(1) per look-up, one copy of each row that enters.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

Row = Mapping[str, Any]


def row_bytes(row: Row) -> int:
    """Bytes of a row's arrays and byte strings; plain values count as nothing."""
    return sum(
        value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, bytes) else 0
        for value in row.values()
    )


class RowCache:
    def __init__(self, capacity: int) -> None:
        self._capacity, self._size = capacity, 0
        self._rows: dict[Hashable, Row] = {}  # who was asked for last comes last

    def get(self, name: Hashable) -> Row | None:
        row = self._rows.pop(name, None)
        if row is not None:
            self._rows[name] = row
        return row

    def add(self, name: Hashable, row: Row) -> None:
        if name in self._rows or row_bytes(row) > self._capacity:
            return
        self._rows[name] = {field: _kept(value) for field, value in row.items()}
        self._size += row_bytes(row)
        while self._size > self._capacity:
            self._size -= row_bytes(self._rows.pop(next(iter(self._rows))))


def _kept(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    copied = value.copy()
    copied.flags.writeable = False
    return copied
