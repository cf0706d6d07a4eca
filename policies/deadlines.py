"""When parked requests end, and in which partition each is parked."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from policies.errors import Refused


def deadline_after(now: float, timeout: float) -> float:
    """``timeout`` seconds from ``now``; `Refused` for NaN, which is neither sooner nor later than anything."""
    if math.isnan(timeout):
        raise Refused("a timeout of NaN s; give seconds")
    return now + timeout


class Deadlines:
    """Every operation is O(log n) of the requests parked."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._partitions: dict[str, str] = {}
        self._count = 0

    def add(self, request_id: str, partition: str, deadline: float) -> None:
        entry = (deadline, self._count, request_id)
        self._count += 1
        self._entries[request_id] = entry
        self._partitions[request_id] = partition
        heappush(self._heap, entry)

    def partition(self, request_id: str) -> str | None:
        """The partition in which the request is parked; None when it is not."""
        return self._partitions.get(request_id)

    def remove(self, request_id: str) -> None:
        del self._entries[request_id], self._partitions[request_id]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())

    def next(self) -> float | None:
        """The earliest deadline, in seconds on the clock of ``now``; None when nothing is parked."""
        while self._heap and self._entries.get(self._heap[0][2]) != self._heap[0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[str, str]]:
        """(request id, partition) of all whose deadline is not after ``now``, earliest first; they are removed."""
        due: list[tuple[str, str]] = []
        while (deadline := self.next()) is not None and deadline <= now:
            request_id = self._heap[0][2]
            due.append((request_id, self._partitions[request_id]))
            self.remove(request_id)
        return due
