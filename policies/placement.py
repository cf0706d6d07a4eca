"""Which unit takes a put.

Puts go round the units in turn, starting at a place that differs from client to client, so that many writers spread
evenly without asking anyone. Cost: one addition.
"""

from __future__ import annotations

from collections.abc import Sequence


class RoundRobin:
    """``start`` is any number; clients pass a random one."""

    def __init__(self, start: int) -> None:
        self._next = start

    def choose(self, units: Sequence[str]) -> str:
        """One of ``units`` (not empty)."""
        self._next += 1
        return units[self._next % len(units)]
