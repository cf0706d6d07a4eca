"""How fast engines decode, as their coordinator sees it: tokens by the time at which they arrived.

A step's tokens are taken to have been made evenly since the step before it, so that a rate does not depend on where
steps end. Cost: O(1) per step, `rate` O(steps looked at); the last `STEPS` steps are kept.
"""

from __future__ import annotations

from collections import deque
from typing import Final

STEPS: Final = 4096


class DecodeMeter:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=STEPS)  # arrival, tokens; arrivals never decrease

    def note(self, now: float, tokens: int) -> None:
        """``tokens`` arrived at ``now``."""
        self._steps.append((now, tokens))

    def rate(self, begin: float, end: float) -> float | None:
        """Tokens a second of the steps that ended after ``begin`` and not after ``end``, over the time that they took;
        None when there is none or its beginning is not known."""
        tokens, last, before = 0, None, None
        for arrived, count in reversed(self._steps):
            if arrived > end:
                continue
            if arrived <= begin:
                before = arrived
                break
            tokens += count
            last = arrived if last is None else last
        if last is None or before is None:
            return None
        return tokens / (last - before)
