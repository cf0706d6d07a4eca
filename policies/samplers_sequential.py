"""Rows in order of arrival: what a claim gets that names no sampler."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from policies.candidates import Candidate
from policies.sampling import Demand, Drawn, Sampler


class Sequential(Sampler):
    """``rows`` by arrival; ``heap`` orders their arrivals, and those of some that are gone from ``rows``. Rows that
    become ready in order of arrival, as nearly all do, cost O(1)."""

    def __init__(self) -> None:
        self.rows: dict[int, Candidate] = {}
        self.heap: list[int] = []

    def offer(self, row: Candidate) -> None:
        self.rows[row.arrival] = row
        heappush(self.heap, row.arrival)

    def withdraw(self, row: Candidate) -> None:
        del self.rows[row.arrival]
        if len(self.heap) > 2 * len(self.rows) + 64:
            self.heap = list(self.rows)
            heapify(self.heap)

    def draw(self, demand: Demand) -> Drawn | None:
        if demand.count > len(self.rows):
            return None
        drawn: list[Candidate] = []
        while len(drawn) < demand.count:
            row = self.rows.pop(heappop(self.heap), None)
            if row is not None:
                drawn.append(row)
        return Drawn(drawn)

    def shortfall(self, demand: Demand) -> str:
        return f"{demand.count} rows asked for; {len(self.rows)} are ready"
