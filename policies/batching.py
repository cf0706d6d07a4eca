"""How rows are grouped into PUTs: in order, under three limits at once.

Guarantees: every row is in exactly one batch and the order is kept; no batch breaks a limit unless it is a single row
that breaks it by itself; batches are filled greedily, so no two neighbours would fit into one.
Cost: one pass, O(rows).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Sized(Protocol):
    """A row to be stored: ``tokens`` token rows, ``nbytes`` value bytes of all its fields."""

    @property
    def tokens(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


R = TypeVar("R", bound=Sized)


def plan_batches(records: Iterable[R], max_rows: int, max_tokens: int, max_bytes: int) -> list[tuple[R, ...]]:
    """Group ``records`` into batches of at most ``max_rows`` rows, ``max_tokens`` tokens and ``max_bytes`` bytes."""
    batches: list[tuple[R, ...]] = []
    batch: list[R] = []
    tokens = nbytes = 0
    for record in records:
        full = len(batch) == max_rows or tokens + record.tokens > max_tokens or nbytes + record.nbytes > max_bytes
        if batch and full:
            batches.append(tuple(batch))
            batch, tokens, nbytes = [], 0, 0
        batch.append(record)
        tokens += record.tokens
        nbytes += record.nbytes
    if batch:
        batches.append(tuple(batch))
    return batches
