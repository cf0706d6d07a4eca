"""How rows are grouped into PUTs: rows of one layout together, in order, under three limits at once.

Rows come one by one, so that each can be frozen just before its batch is full.

Guarantees: every row is in exactly one batch; rows of one layout keep their order; no batch breaks a limit unless it is
a single row that breaks it by itself; batches are filled greedily, so no two that follow each other in one layout would
fit into one. A row is never split.
Cost: O(1) per row. At most one batch per layout is open.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Sized(Protocol):
    """A row to be stored: ``tokens`` token rows, ``nbytes`` value bytes of all its fields, and a ``layout`` (dtypes and
    trailing shapes) that it shares with the rows beside which it may lie in one block."""

    @property
    def tokens(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def layout(self) -> Hashable: ...


R = TypeVar("R", bound=Sized)


class _Open(Generic[R]):
    __slots__ = ("nbytes", "rows", "tokens")

    def __init__(self) -> None:
        self.rows: list[R] = []
        self.tokens = self.nbytes = 0


class Batching(Generic[R]):
    """Batches of at most ``max_rows`` rows, ``max_tokens`` tokens and ``max_bytes`` bytes."""

    def __init__(self, max_rows: int, max_tokens: int, max_bytes: int) -> None:
        self._max_rows, self._max_tokens, self._max_bytes = max_rows, max_tokens, max_bytes
        self._open: dict[Hashable, _Open[R]] = {}

    def add(self, row: R) -> tuple[R, ...] | None:
        """Take the next row; the batch that is complete with or without it, if one is."""
        tokens, nbytes, complete = row.tokens, row.nbytes, None
        batch = self._open.get(row.layout)
        if batch is not None and (batch.tokens + tokens > self._max_tokens or batch.nbytes + nbytes > self._max_bytes):
            complete, batch = tuple(self._open.pop(row.layout).rows), None
        if batch is None:
            batch = self._open[row.layout] = _Open()
        batch.rows.append(row)
        batch.tokens += tokens
        batch.nbytes += nbytes
        if len(batch.rows) == self._max_rows and complete is None:
            del self._open[row.layout]
            complete = tuple(batch.rows)
        return complete

    def rest(self) -> tuple[R, ...] | None:
        """One of the batches that are still open, oldest first, now that no row follows; None when there is none."""
        layout = next(iter(self._open), None)
        return None if layout is None else tuple(self._open.pop(layout).rows)
