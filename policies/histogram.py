"""A histogram of seconds: counts in buckets whose limits double, so that a p99 is known within a factor of two.

Cost: `add` O(1), `quantile` O(buckets), 32 numbers of memory.
"""

from __future__ import annotations

import math
from typing import Final

SMALLEST_S: Final = 1e-5
BUCKETS: Final = 32


class Histogram:
    """Bucket i counts values up to ``SMALLEST_S · 2**i``; the first takes all that are smaller, the last all larger."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        index = math.ceil(math.log2(seconds / SMALLEST_S)) if seconds > SMALLEST_S else 0
        self._counts[min(index, BUCKETS - 1)] += 1
        self.count += 1
        self.total_s += max(seconds, 0.0)

    def quantile(self, share: float) -> float:
        """The limit of the bucket in which ``share`` (0..1) of the values are reached; 0 when there is none."""
        reached = 0
        for index, count in enumerate(self._counts):
            reached += count
            if count and reached >= share * self.count:
                return SMALLEST_S * 2.0**index
        return 0.0

    def to_plain(self) -> dict[str, float | list[list[float]]]:
        """``count``, ``total_s``, ``p50_s``, ``p99_s``, and ``buckets``: [limit in seconds, count] of those in use."""
        buckets = [[SMALLEST_S * 2.0**index, float(count)] for index, count in enumerate(self._counts) if count]
        return {
            "count": float(self.count),
            "total_s": self.total_s,
            "p50_s": self.quantile(0.5),
            "p99_s": self.quantile(0.99),
            "buckets": buckets,
        }
