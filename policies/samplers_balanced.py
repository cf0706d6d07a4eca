"""Shares with nearly equal sums of lengths: micro-batches of a claim, and batches of data-parallel ranks.

Two ways, each with its bound (L: lengths, all ≥ 0):

- `lightest_first` puts the longest row that is left into the lightest share (Graham 1969). The heaviest share is at
  most 4/3 - 1/(3 · shares) times what the best possible split has, and two shares differ by at most max(L).
- `level_rounds` deals the longest rows that are left, one to each share, the longest to the lightest. All shares get
  equally many rows, and two shares differ by at most max(L) - min(L): a round adds differences of at most that, each
  against the difference that was there, so neither outgrows the larger of both.

Both O(rows · log rows), and the same for the same lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heapreplace

from policies.errors import Refused
from policies.samplers_sequential import Sequential
from policies.sampling import Demand, Drawn, Sampler, Wrapper


def lightest_first(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """The indices of each share, ascending. No share is empty when there are as many rows."""
    split: list[list[int]] = [[] for _ in range(shares)]
    heap = [(0, 0, share) for share in range(shares)]
    heapify(heap)
    for index in _longest_first(lengths):
        weight, rows, share = heap[0]
        split[share].append(index)
        heapreplace(heap, (weight + lengths[index], rows + 1, share))
    return [sorted(share) for share in split]


def level_rounds(lengths: Sequence[int], shares: int) -> list[list[int]]:
    """The indices of each share, ascending; ``len(lengths)`` is a multiple of ``shares``."""
    split: list[list[int]] = [[] for _ in range(shares)]
    weights = [0] * shares
    longest_first = _longest_first(lengths)
    for start in range(0, len(lengths), shares):
        lightest = sorted(range(shares), key=lambda share: weights[share])
        for share, index in zip(lightest, longest_first[start : start + shares], strict=True):
            split[share].append(index)
            weights[share] += lengths[index]
    return [sorted(share) for share in split]


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


class Balanced(Wrapper):
    """What ``of`` draws, in ``parts`` micro-batches of nearly equal sums of the lengths of ``field``."""

    def __init__(self, parts: int, field: str, of: Sampler | None = None) -> None:
        if type(parts) is not int or parts < 1:
            raise Refused(f"parts must be a whole number, 1 or more, not {parts!r}")
        if not isinstance(field, str):
            raise Refused(f"field must be the name of a field, not {field!r}")
        super().__init__(of or Sequential())
        self.parts, self.field = parts, field
        self.fields |= {field}

    def check(self, demand: Demand) -> None:
        super().check(demand)
        if demand.count < self.parts:
            raise Refused(f"{demand.count} rows asked for in {self.parts} micro-batches; ask for {self.parts} or more")

    def draw(self, demand: Demand) -> Drawn | None:
        drawn = self.of.draw(demand)
        if drawn is None:
            return None
        parts = lightest_first([row.length(self.field) for row in drawn.rows], self.parts)
        return replace(drawn, parts=parts)
