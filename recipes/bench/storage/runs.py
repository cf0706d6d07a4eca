"""What is timed. A run begins in all processes at an agreed moment and ends with the last of them.

Every run leaves the system without rows that were not there before; clearing is never timed, but waited for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

import numpy as np

from recipes.bench.scenario import CheckFailed
from recipes.bench.storage.cluster import System
from recipes.bench.storage.load import Load, Reading

ROUND_TRIPS: Final = 200
_FREED_WITHIN_S: Final = 10.0
_FREE_BYTES: Final = 1 << 20
_AHEAD_S: Final = 0.1
"""Long enough for the order to reach every process before the moment comes."""


def soon() -> float:
    return time.perf_counter() + _AHEAD_S


def moved(load: Load, seconds: float) -> Mapping[str, float]:
    """The figures of a run that wrote or read all rows."""
    return {
        "wall_s": seconds,
        "rows_per_s": load.stored_rows / seconds,
        "gb_per_s": load.stored_bytes / seconds / 1e9,
    }


class WriteRun:
    """All rows are written; then some of every PUT are read back and compared, and all are cleared."""

    def __init__(self, system: System, load: Load) -> None:
        self.system, self.load = system, load
        system.each("prepare", load)

    def run(self) -> Mapping[str, float]:
        begin = soon()
        ends = self.system.each("write", begin)
        self.system.each("check", self.load)
        self.system.empty()
        return moved(self.load, max(ends) - begin)

    def close(self) -> None:
        """The system stays for the next scenario."""


class _Filled:
    """With all rows stored from the beginning to the end."""

    def __init__(self, system: System, load: Load) -> None:
        self.system, self.load = system, load
        system.each("prepare", load)
        system.each("write", soon())

    def close(self) -> None:
        self.system.empty()


class ReadRun(_Filled):
    def __init__(self, system: System, load: Load, reading: Reading) -> None:
        super().__init__(system, load)
        self._reading = reading

    def run(self) -> Mapping[str, float]:
        begin = soon()
        ends = self.system.each("read", self.load, self._reading, begin)
        return moved(self.load, max(ends) - begin)


class LatencyRun(_Filled):
    """One process reads one row after another while nobody else does anything."""

    def run(self) -> Mapping[str, float]:
        seconds = self.system.one("round_trips", self.load, ROUND_TRIPS)
        return {"p50_s": float(np.quantile(seconds, 0.5)), "p99_s": float(np.quantile(seconds, 0.99))}


class MemoryRun(WriteRun):
    """What the units and the object store have grown by, once all rows are stored, since nothing had ever been."""

    def run(self) -> Mapping[str, float]:
        self._await_free_store()
        self.system.each("write", soon())
        grown = self.system.footprint().grown_since(self.system.idle)
        self.system.empty()
        if grown <= 0:
            raise CheckFailed(f"storing {self.load.stored_bytes} bytes made memory grow by {grown} bytes")
        return {"bytes_per_byte": grown / self.load.stored_bytes}

    def _await_free_store(self) -> None:
        """Ray frees objects a little later than they are given back."""
        until = time.monotonic() + _FREED_WITHIN_S
        while (missing := self.system.idle.store_room - self.system.footprint().store_room) > _FREE_BYTES:
            if time.monotonic() > until:
                raise CheckFailed(
                    f"{missing} bytes of the object store are held {_FREED_WITHIN_S:g} s after all was cleared"
                )
            time.sleep(0.1)
