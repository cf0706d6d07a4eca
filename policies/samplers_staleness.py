"""Rows of weights that are too old are skipped, and said to be, once.

Every claim names the oldest weight version it accepts; a row's version is a tag. Rules:

1. What stands or falls together in the wrapped sampler (a group) is as old as its oldest row. So a stale row takes its
   siblings with it, also those that come later.
2. Skipping is part of an answer: the claim that is met reports all that is too old for it, and the task has claimed
   those rows with it. A claim that is not met has skipped nothing; a later one with a lower bound may be given them.
3. A row without a version (a number) waits until it is tagged.

A group skipped before all of its siblings were there is remembered until they are; so a prompt that is generated anew
needs a new group name.

Costs: O(log rows) for a row that comes or goes, and O(siblings). A changed bound costs O(log rows) for each row between
the old bound and the new one; a failing draw with an unchanged bound costs what it costs in the wrapped sampler.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from typing import Any

from policies.candidates import Candidate
from policies.errors import Refused
from policies.samplers_sequential import Sequential
from policies.sampling import Demand, Drawn, Find, Sampler, Skip, Wrapper


@dataclass(slots=True, eq=False)
class _Unit:
    """Rows that stand or fall together, with their versions. ``stale``: they are kept from the wrapped sampler."""

    name: Any
    rows: dict[Candidate, float] = field(default_factory=dict)
    oldest: float = math.inf
    stale: bool = False


class _ByVersion:
    """Units in order of their oldest version, ``sign`` 1 oldest first, -1 newest first. Outdated entries are passed
    over: one is right while its unit has rows, this version, and is on this side."""

    def __init__(self, sign: int, stale: bool) -> None:
        self._sign, self._stale = sign, stale
        self._heap: list[tuple[float, int, _Unit]] = []
        self._pushed = itertools.count()

    def push(self, unit: _Unit, units: int) -> None:
        heappush(self._heap, (self._sign * unit.oldest, next(self._pushed), unit))
        if len(self._heap) > 2 * units + 64:
            self._heap = list({id(entry[2]): entry for entry in self._heap if self._right(entry)}.values())
            heapify(self._heap)

    def pop_beyond(self, bound: float, inclusive: bool) -> _Unit | None:
        """The first unit, when it comes before ``bound``; it is taken out."""
        while self._heap:
            version, _, unit = self._heap[0]
            right = self._right(self._heap[0])
            if right and not (version < bound or (inclusive and version == bound)):
                return None
            heappop(self._heap)
            if right:
                return unit
        return None

    def _right(self, entry: tuple[float, int, _Unit]) -> bool:
        version, _, unit = entry
        return bool(unit.rows) and unit.stale == self._stale and self._sign * unit.oldest == version


class Staleness(Wrapper):
    """``bound``: that of the last draw; the wrapped sampler has exactly the units that are not older.

    ``_apart`` rows have no version yet, and ``_loose`` ones no unit. ``_late`` rows came after their unit was skipped,
    which ``_owed`` more are yet to do.
    """

    reads_tags = True

    def __init__(self, tag: str = "version", of: Sampler | None = None) -> None:
        if not isinstance(tag, str):
            raise Refused(f"tag must be the name of a tag, not {tag!r}")
        of = of or Sequential()
        if of.holds:
            raise Refused("staleness cannot be outside of ranks, whose batches are drawn before they are asked for")
        super().__init__(of)
        self.reads_tags = True
        self.tag = tag
        self.bound = -math.inf
        self._known: dict[Candidate, tuple[Any, float | None]] = {}
        self._units: dict[Any, _Unit] = {}
        self._fresh, self._old = _ByVersion(1, stale=False), _ByVersion(-1, stale=True)
        self._stale: dict[_Unit, None] = {}
        self._apart: set[Candidate] = set()
        self._loose: set[Candidate] = set()
        self._late: dict[Candidate, Any] = {}
        self._owed: dict[Any, int] = {}
        self._late_before: set[tuple[str, int]] = set()

    def check(self, demand: Demand) -> None:
        if demand.oldest_version is None or math.isnan(demand.oldest_version):
            raise Refused(f"oldest_version must be the oldest acceptable version, not {demand.oldest_version!r}")
        self.of.check(replace(demand, oldest_version=None))

    def offer(self, row: Candidate) -> None:
        name, version = self._known[row] = self._seen(row)
        if (row.key, row.arrival) in self._late_before:
            self._late_before.remove((row.key, row.arrival))
            self._late[row] = name
        elif name is not None and self._owed.get(name):
            self._late[row] = name
            self._owe(name, self._owed[name] - 1)
        elif version is None:
            self._apart.add(row)
        elif name is None:
            self._loose.add(row)
            self.of.offer(row)
        else:
            unit = self._units.get(name) or self._units.setdefault(name, _Unit(name))
            unit.rows[row] = version
            if not unit.stale:
                self.of.offer(row)
            self._judge(unit)

    def withdraw(self, row: Candidate) -> None:
        name, _ = self._known.pop(row)
        if row in self._late:
            del self._late[row]
        elif row in self._apart:
            self._apart.remove(row)
        elif row in self._loose:
            self._loose.remove(row)
            self.of.withdraw(row)
        else:
            unit = self._units[name]
            if not unit.stale:
                self.of.withdraw(row)
            self._remove(unit, row)

    def retagged(self, row: Candidate) -> None:
        if self._seen(row) != self._known[row]:
            if row in self._late:  # it gives back the place that it took among its siblings
                self._owe(self._late[row], self._owed.get(self._late[row], 0) + 1)
            self.withdraw(row)
            self.offer(row)
        elif self.of.reads_tags and self._within(row):
            self.of.retagged(row)

    def _seen(self, row: Candidate) -> tuple[Any, float | None]:
        version = row.tags.get(self.tag)
        number = isinstance(version, int | float) and not isinstance(version, bool) and not math.isnan(version)
        return self.of.unit(row), version if number else None

    def _within(self, row: Candidate) -> bool:
        """The wrapped sampler has the row."""
        unit = self._units.get(self._known[row][0])
        return row in self._loose or (unit is not None and row in unit.rows and not unit.stale)

    def _remove(self, unit: _Unit, row: Candidate) -> None:
        del unit.rows[row]
        if unit.rows:
            self._judge(unit)
        else:
            del self._units[unit.name]
            self._stale.pop(unit, None)

    def _judge(self, unit: _Unit) -> None:
        """The rows of the unit changed; find its age, and on which side of the bound it is."""
        oldest = min(unit.rows.values())
        if oldest != unit.oldest or (oldest < self.bound) != unit.stale:
            unit.oldest = oldest
            self._move(unit, oldest < self.bound)

    def _move(self, unit: _Unit, stale: bool) -> None:
        if stale and not unit.stale:
            self._stale[unit] = None
            for row in unit.rows:
                self.of.withdraw(row)
        elif unit.stale and not stale:
            del self._stale[unit]
            for row in unit.rows:
                self.of.offer(row)
        unit.stale = stale
        (self._old if stale else self._fresh).push(unit, len(self._units))

    def _set_bound(self, bound: float) -> None:
        self.bound = bound
        while (unit := self._fresh.pop_beyond(bound, inclusive=False)) is not None:
            self._move(unit, stale=True)
        while (unit := self._old.pop_beyond(-bound, inclusive=True)) is not None:
            self._move(unit, stale=False)

    def draw(self, demand: Demand) -> Drawn | None:
        assert demand.oldest_version is not None, "`check` lets no such demand through"
        if demand.oldest_version != self.bound:
            self._set_bound(demand.oldest_version)
        drawn = self.of.draw(replace(demand, oldest_version=None))
        if drawn is None:
            return None
        for row in drawn.claims:
            name, _ = self._known.pop(row)
            if row in self._loose:
                self._loose.remove(row)
            else:
                self._remove(self._units[name], row)
        return replace(drawn, skipped=[*drawn.skipped, *self._skip()])

    def _skip(self) -> list[Skip]:
        """All that is too old, in order of arrival; it is forgotten here."""
        skips = [Skip(row, f"its group {name!r} was skipped before") for row, name in self._late.items()]
        for unit in self._stale:
            skips += [Skip(row, self._reason(unit, version)) for row, version in unit.rows.items()]
            self._owe(unit.name, -len(unit.rows) % self.run)
            del self._units[unit.name]
            unit.rows.clear()
        self._stale.clear()
        self._late.clear()
        for skip in skips:
            del self._known[skip.row]
        return sorted(skips, key=lambda skip: skip.row.arrival)

    def _reason(self, unit: _Unit, version: float) -> str:
        if version < self.bound:
            return f"version {version} is older than {self.bound}"
        return f"a sibling in its group {unit.name!r} has version {unit.oldest}, older than {self.bound}"

    def _owe(self, name: Any, rows: int) -> None:
        if rows:
            self._owed[name] = rows
        else:
            self._owed.pop(name, None)

    def shortfall(self, demand: Demand) -> str:
        old = sum(len(unit.rows) for unit in self._stale) + len(self._late)
        apart = f"; {len(self._apart)} rows have no number in tag {self.tag!r}" if self._apart else ""
        within = self.of.shortfall(replace(demand, oldest_version=None))
        return f"{within}; {old} rows are older than version {demand.oldest_version} or belong to such{apart}"

    def give_back(self, demand: Demand, drawn: Drawn) -> Sequence[Candidate]:
        """What was skipped is offered anew as well: nobody has heard of it."""
        names = {self.of.unit(skip.row) for skip in drawn.skipped}
        for name in names:
            self._owed.pop(name, None)
        for row in [row for row, name in self._late.items() if name in names]:
            self.withdraw(row)
            self.offer(row)
        return [*self.of.give_back(demand, drawn), *[skip.row for skip in drawn.skipped]]

    def state(self) -> Any:
        late = sorted([row.arrival, row.key] for row in self._late)
        return {"owed": [list(owed) for owed in self._owed.items()], "late": late, "of": self.of.state()}

    def restore(self, state: Any, find: Find) -> None:
        self._owed = dict(state["owed"])
        self._late_before = {(key, arrival) for arrival, key in state["late"]}
        self.of.restore(state["of"], find)
