"""How much memory a system's storage takes: that of its units' processes, and Ray's object store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from actors.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class Footprint:
    """``unit_bytes``: resident memory of the units' own; pages of the object store that they see are not counted.
    ``store_room``: what may still be put into the object store of this node, whoever fills it."""

    unit_bytes: int
    store_room: int

    @classmethod
    def of(cls, units: Sequence[psutil.Process]) -> Footprint:
        memory = [unit.memory_info() for unit in units]
        return cls(sum(each.rss - each.shared for each in memory), ObjectStore(reserve=0.0).room())

    def grown_since(self, earlier: Footprint) -> int:
        return self.unit_bytes - earlier.unit_bytes + earlier.store_room - self.store_room


def processes(title: str) -> list[psutil.Process]:
    """Those that this process started, directly or not, and whose title begins with ``title``."""
    return [process for process in psutil.Process().children(recursive=True) if _title(process).startswith(title)]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
