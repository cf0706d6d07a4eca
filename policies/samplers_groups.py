"""GRPO groups: all siblings of a prompt, or none of them.

A group is named by a tag. Rows without it (a string or a whole number) wait until they are tagged. Rows of a name
beyond its first ``size`` by arrival begin the next group of that name, which is whole once that too has ``size``.

Costs: O(log groups) for a row that comes or goes, and O(size) within its group; a failing draw O(1).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from operator import attrgetter

from policies.candidates import Candidate
from policies.errors import Refused
from policies.sampling import Demand, Drawn, Sampler

GroupName = str | int

_ARRIVAL = attrgetter("arrival")


class Groups(Sampler):
    """``whole`` counts the whole groups. ``heap`` has the first arrival of each name with one, and outdated entries:
    one is right when its name has a whole group and that begins with this arrival."""

    reads_tags = True

    def __init__(self, size: int, tag: str = "group") -> None:
        if type(size) is not int or size < 1:
            raise Refused(f"size must be a whole number of rows, 1 or more, not {size!r}")
        if not isinstance(tag, str):
            raise Refused(f"tag must be the name of a tag, not {tag!r}")
        self.run = self.size = size
        self.tag = tag
        self.whole = 0
        self.heap: list[tuple[int, int, GroupName]] = []
        self._pushed = itertools.count()
        self._groups: dict[GroupName, list[Candidate]] = {}
        self._names: dict[Candidate, GroupName | None] = {}

    def check(self, demand: Demand) -> None:
        super().check(demand)
        if demand.count % self.size:
            raise Refused(f"{demand.count} rows asked for in groups of {self.size}; ask for a multiple of {self.size}")

    def unit(self, row: Candidate) -> GroupName | None:
        name = row.tags.get(self.tag)
        return name if isinstance(name, str | int) else None

    def offer(self, row: Candidate) -> None:
        name = self._names[row] = self.unit(row)
        if name is None:
            return
        rows = self._groups.setdefault(name, [])
        insort(rows, row, key=_ARRIVAL)
        self.whole += not len(rows) % self.size
        self._push(name, rows)

    def withdraw(self, row: Candidate) -> None:
        name = self._names.pop(row)
        if name is None:
            return
        rows = self._groups[name]
        self.whole -= not len(rows) % self.size
        del rows[bisect_left(rows, row.arrival, key=_ARRIVAL)]
        if not rows:
            del self._groups[name]
        self._push(name, rows)

    def retagged(self, row: Candidate) -> None:
        if self.unit(row) != self._names[row]:
            self.withdraw(row)
            self.offer(row)

    def _push(self, name: GroupName, rows: list[Candidate]) -> None:
        """The rows of ``name`` changed; the heap must know where its first whole group begins."""
        if len(rows) >= self.size:
            heappush(self.heap, (rows[0].arrival, next(self._pushed), name))
        if len(self.heap) > 2 * len(self._groups) + 64:
            whole = [(n, rs) for n, rs in self._groups.items() if len(rs) >= self.size]
            self.heap = [(rs[0].arrival, next(self._pushed), n) for n, rs in whole]
            heapify(self.heap)

    def draw(self, demand: Demand) -> Drawn | None:
        if demand.count > self.whole * self.size:
            return None
        drawn: list[Candidate] = []
        while len(drawn) < demand.count:
            arrival, _, name = heappop(self.heap)
            rows = self._groups.get(name, [])
            if len(rows) < self.size or rows[0].arrival != arrival:
                continue
            drawn += rows[: self.size]
            del rows[: self.size]
            self.whole -= 1
            if rows:
                self._push(name, rows)
            else:
                del self._groups[name]
        for row in drawn:
            del self._names[row]
        return Drawn(drawn)

    def shortfall(self, demand: Demand) -> str:
        rest = [len(rows) % self.size for rows in self._groups.values()]
        partial = [rows for rows in rest if rows]
        untagged = len(self._names) - sum(map(len, self._groups.values()))
        return (
            f"{demand.count // self.size} whole groups of {self.size} asked for; {self.whole} are ready, "
            f"{len(partial)} incomplete groups hold {sum(partial)} rows"
            + (f", and {untagged} rows have no tag {self.tag!r} that names one" if untagged else "")
        )
