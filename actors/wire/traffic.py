"""What a server has served: requests by operation, the time they took, and the time they waited for the thread.

Cumulative since the server began, so that the difference of two looks is the traffic between them. Cost: two clock
reads and a few additions per request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class OperationTraffic:
    """``busy_s``: seconds in the handler. ``queued_s``: seconds between the moment the server's thread turned to its
    socket and the moment the request was served; a request that came while the thread was elsewhere waited longer."""

    requests: int = 0
    failed: int = 0
    busy_s: float = 0.0
    longest_busy_s: float = 0.0
    queued_s: float = 0.0
    longest_queued_s: float = 0.0

    def add(self, queued_s: float, busy_s: float, failed: bool) -> None:
        self.requests += 1
        self.failed += failed
        self.busy_s += busy_s
        self.queued_s += queued_s
        if busy_s > self.longest_busy_s:
            self.longest_busy_s = busy_s
        if queued_s > self.longest_queued_s:
            self.longest_queued_s = queued_s


class Traffic:
    """``now`` in seconds of any clock that only goes forward."""

    def __init__(self, operations: Iterable[str], now: float) -> None:
        self._began = now
        self.operations = {operation: OperationTraffic() for operation in operations}

    def to_plain(self, now: float) -> dict[str, Any]:
        """``seconds`` looked at, the fraction of them that handlers were busy, and the operations that were asked."""
        seconds = now - self._began
        busy = sum(operation.busy_s for operation in self.operations.values())
        return {
            "seconds": seconds,
            "busy_fraction": busy / seconds if seconds > 0 else 0.0,
            "operations": {name: asdict(each) for name, each in self.operations.items() if each.requests},
        }
