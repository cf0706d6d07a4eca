"""How much one side may have asked of a peer without an answer; what exceeds it waits on the asking side.

So a peer that is slow, frozen or gone holds up its askers, whose deadlines count, and not the memory of anybody.
Requests that the peer may park are not counted, since they end when others are served: counting them could keep the
one out that they wait for. Cost: two comparisons per request.
"""

from __future__ import annotations

MOST_REQUESTS = 1024
MOST_BYTES = 256 << 20


class InFlight:
    """Requests and bytes that are out. A request larger than the limit goes when nothing else is out."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_requests, self._most_bytes = most_requests, most_bytes
        self.requests = self.nbytes = 0

    def take(self, nbytes: int) -> bool:
        """Count a request in, if there is room for it."""
        if self.requests and (self.requests >= self._most_requests or self.nbytes + nbytes > self._most_bytes):
            return False
        self.requests += 1
        self.nbytes += nbytes
        return True

    def release(self, nbytes: int) -> None:
        self.requests -= 1
        self.nbytes -= nbytes
