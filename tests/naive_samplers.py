"""The shipped samplers once more, as simple as possible: each looks at all ready rows whenever it is asked.

What a row is to them: an object with ``key``, ``arrival``, ``tags``, ``gone`` and ``length(field)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from policies.sampling import Demand, SamplerSpec

Row = Any


class NotThis(Exception):
    """This demand is refused."""


@dataclass
class Given:
    rows: list[Row]
    taken: list[Row]
    skipped: list[Row] = field(default_factory=list)
    lost: list[Row] = field(default_factory=list)
    parts: list[list[int]] = field(default_factory=list)
    note: Any = None


class NaiveSequential:
    run = 1
    fields: frozenset[str] = frozenset()

    def check(self, demand: Demand) -> None:
        if demand.rank is not None or demand.oldest_version is not None:
            raise NotThis

    def sync(self, row: Row, ready: bool) -> None:
        """Something happened to the row; it can be given now, or it cannot."""

    def unit(self, row: Row) -> Any:
        return row

    def draw(self, rows: Sequence[Row], demand: Demand) -> Given | None:
        chosen = list(rows[: demand.count])
        return Given(chosen, chosen) if len(chosen) == demand.count else None

    def give_back(self, demand: Demand, given: Given) -> list[Row]:
        return given.taken


class NaiveGroups(NaiveSequential):
    def __init__(self, size: int, tag: str = "group") -> None:
        self.run = self.size = size
        self.tag = tag

    def check(self, demand: Demand) -> None:
        super().check(demand)
        if demand.count % self.size:
            raise NotThis

    def unit(self, row: Row) -> Any:
        return row.tags.get(self.tag)

    def draw(self, rows: Sequence[Row], demand: Demand) -> Given | None:
        left, chosen = list(rows), list[Row]()
        while len(chosen) < demand.count:
            names = dict.fromkeys(self.unit(row) for row in left if self.unit(row) is not None)
            of_name = [[row for row in left if self.unit(row) == name] for name in names]
            whole = [group[: self.size] for group in of_name if len(group) >= self.size]
            if not whole:
                return None
            chosen += min(whole, key=lambda group: group[0].arrival)
            left = [row for row in left if row not in chosen]
        return Given(chosen, chosen)


class NaiveStaleness(NaiveSequential):
    def __init__(self, tag: str = "version", of: Any = None) -> None:
        self.of = of or NaiveSequential()
        self.tag, self.run, self.fields = tag, self.of.run, self.of.fields
        self.names: dict[Row, Any] = {}
        self.late: dict[Row, Any] = {}
        self.owed: dict[Any, int] = {}

    def check(self, demand: Demand) -> None:
        if demand.oldest_version is None:
            raise NotThis
        self.of.check(replace(demand, oldest_version=None))

    def unit(self, row: Row) -> Any:
        return self.of.unit(row)

    def sync(self, row: Row, ready: bool) -> None:
        name = self.unit(row) if ready else None
        if ready and row in self.names and self.names[row] == name:
            return
        self.names.pop(row, None)
        if row in self.late:
            before = self.late.pop(row)
            if ready:
                self.owed[before] = self.owed.get(before, 0) + 1
        if ready:
            self.names[row] = name
            if name is not None and self.owed.get(name):
                self.owed[name] -= 1
                self.late[row] = name

    def draw(self, rows: Sequence[Row], demand: Demand) -> Given | None:
        bound = demand.oldest_version
        dated = [row for row in rows if row not in self.late and row.tags.get(self.tag) is not None]
        stale = {self.unit(row) for row in dated if row.tags[self.tag] < bound and self.unit(row) is not None}
        fresh = [row for row in dated if self.unit(row) not in stale]
        given = self.of.draw(fresh, replace(demand, oldest_version=None))
        if given is None:
            return None
        old = [row for row in dated if self.unit(row) in stale]
        for name in stale:
            self.owed[name] = -sum(self.unit(row) == name for row in old) % self.run
        skipped = sorted([*old, *self.late], key=lambda row: row.arrival)
        for row in [*skipped, *given.taken]:
            self.names.pop(row, None)
            self.late.pop(row, None)
        return replace(given, taken=[*given.taken, *skipped], skipped=skipped)

    def give_back(self, demand: Demand, given: Given) -> list[Row]:
        names = {self.unit(row) for row in given.skipped}
        for name in names:
            self.owed.pop(name, None)
        self.late = {row: name for row, name in self.late.items() if name not in names}
        return given.taken


class NaiveRanks(NaiveSequential):
    def __init__(self, world_size: int, mode: str = "disjoint", balance: str | None = None, of: Any = None) -> None:
        self.of = of or NaiveSequential()
        self.world_size, self.mode, self.balance, self.run = world_size, mode, balance, self.of.run
        self.fields = self.of.fields | ({balance} if balance else set())
        self.rounds: list[tuple[Demand, list[list[Row]], dict[int, list[Row]]]] = []
        self.owed: dict[int, list[int]] = {rank: [] for rank in range(world_size)}

    def _whole(self, demand: Demand) -> Demand:
        count = demand.count * (1 if self.mode == "same" else self.world_size)
        return replace(demand, count=count, rank=None)

    def check(self, demand: Demand) -> None:
        if demand.rank is None or not 0 <= demand.rank < self.world_size or demand.count % self.run:
            raise NotThis
        self.of.check(self._whole(demand))

    def sync(self, row: Row, ready: bool) -> None:
        self.of.sync(row, ready)

    def draw(self, rows: Sequence[Row], demand: Demand) -> Given | None:
        rank, terms, taken = demand.rank, replace(demand, rank=None), list[Row]()
        assert rank is not None
        if not self.owed[rank]:
            given = self.of.draw(rows, self._whole(demand))
            if given is None:
                return None
            taken = given.taken
            for owed in self.owed.values():
                owed.append(len(self.rounds))
            self.rounds.append((terms, self._split(given.rows), {rank: given.skipped}))
        number = min(self.owed[rank])
        drawn_for, batches, skipped = self.rounds[number]
        if drawn_for != terms:
            raise NotThis
        self.owed[rank].remove(number)
        live = [row for row in batches[rank] if not row.gone]
        lost = [row for row in batches[rank] if row.gone]
        return Given(live, taken, skipped.get(rank, []), lost, note=number)

    def _split(self, rows: list[Row]) -> list[list[Row]]:
        if self.mode == "same":
            return [rows] * self.world_size
        runs = [rows[i : i + self.run] for i in range(0, len(rows), self.run)]
        if self.balance is None:
            each = len(runs) // self.world_size
            return [_joined(runs[rank * each : (rank + 1) * each]) for rank in range(self.world_size)]
        lengths = [sum(row.length(self.balance) for row in run) for run in runs]
        order = sorted(range(len(runs)), key=lambda i: (-lengths[i], i))
        shares: list[list[int]] = [[] for _ in range(self.world_size)]
        while order:
            dealt, order = order[: self.world_size], order[self.world_size :]
            by_weight = sorted(range(self.world_size), key=lambda s: (sum(lengths[i] for i in shares[s]), s))
            for share, index in zip(by_weight, dealt, strict=True):
                shares[share] = [*shares[share], index]
        return [_joined([runs[i] for i in sorted(share)]) for share in shares]

    def give_back(self, demand: Demand, given: Given) -> list[Row]:
        assert demand.rank is not None
        self.owed[demand.rank].append(given.note)
        terms, batches, skipped = self.rounds[given.note]
        self.rounds[given.note] = (terms, list(batches), {**skipped, demand.rank: given.skipped})
        self.rounds[given.note][1][demand.rank] = [*given.rows, *given.lost]
        return []


class NaiveBalanced(NaiveSequential):
    def __init__(self, parts: int, field: str, of: Any = None) -> None:
        self.of = of or NaiveSequential()
        self.parts, self.field, self.run = parts, field, self.of.run
        self.fields = self.of.fields | {field}

    def check(self, demand: Demand) -> None:
        self.of.check(demand)
        if demand.count < self.parts:
            raise NotThis

    def sync(self, row: Row, ready: bool) -> None:
        self.of.sync(row, ready)

    def unit(self, row: Row) -> Any:
        return self.of.unit(row)

    def draw(self, rows: Sequence[Row], demand: Demand) -> Given | None:
        given: Given | None = self.of.draw(rows, demand)
        if given is None:
            return None
        lengths = [row.length(self.field) for row in given.rows]
        parts: list[list[int]] = [[] for _ in range(self.parts)]
        for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            min(parts, key=lambda part: (sum(lengths[i] for i in part), len(part), parts.index(part))).append(index)
        return replace(given, parts=[sorted(part) for part in parts])

    def give_back(self, demand: Demand, given: Given) -> list[Row]:
        back: list[Row] = self.of.give_back(demand, given)
        return back


def _joined(runs: list[list[Row]]) -> list[Row]:
    return [row for run in runs for row in run]


NAIVE: dict[str, type] = {
    "sequential": NaiveSequential,
    "groups": NaiveGroups,
    "staleness": NaiveStaleness,
    "ranks": NaiveRanks,
    "balanced": NaiveBalanced,
}


def naive(spec: SamplerSpec) -> Any:
    of = {} if spec.of is None else {"of": naive(spec.of)}
    return NAIVE[spec.name](**dict(spec.settings), **of)
