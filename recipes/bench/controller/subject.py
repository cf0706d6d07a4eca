"""What the in-process benchmarks ask of a controller, whichever it is.

A subject prepares what its clients would send before its clock starts, times only calls of the controller, and is not
garbage-collected meanwhile. All keys are in `rows.PARTITION`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from recipes.bench.controller.rows import Rows


class Subject(Protocol):
    def publish(self, batches: Sequence[Rows]) -> float:
        """Create the rows' keys and publish them, a batch at a time: the seconds it took, all batches together."""

    def cycle(self, batches: Sequence[Rows]) -> float:
        """For each batch in turn: create and publish it, look its fields up, tag its rows. Seconds. What the lookups
        answered is checked."""

    def clear(self, groups: Sequence[Sequence[str]]) -> float:
        """Clear the keys, a group at a time. Seconds."""

    def check(self, batches: Sequence[Rows], tagged: bool) -> None:
        """`CheckFailed` unless every row is there with all its fields and, if ``tagged``, its tags."""

    def check_rows(self, rows: int) -> None:
        """`CheckFailed` unless so many rows live."""

    def close(self) -> None: ...


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection within: what the other system holds would be paid for by the one that is measured."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
