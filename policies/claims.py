"""Tasks: who has claimed what, and the requests that are parked until their rows are there.

Rules, all in this file:

1. A task claims a row once. A claim is given what its sampler (`policies.sampling`) draws: all it asked for or nothing.
2. A claim or wait that cannot be answered is parked. It is answered by the operation that completes it, by its
   deadline, or when its partition goes; it never stands in another request's way: of the parked claims that can be
   met the one parked first is met, again and again until none can be.
3. A row that is cleared is offered to nobody, whatever still refers to it.

For each (task, set of fields, sampler) asked for there is a `Watch`. Costs: the first claim of a watch scans the
partition's rows once; after that a row that becomes ready, is claimed or is cleared costs what `policies.watches` says
per watch of its partition. A parked request costs nothing until its watch changes; then each *different* demand parked
there is tried once, however many are parked. A task costs one bit per row and lasts as long as its partition, and so
does a watch; so name tasks after what they do, not after each request.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from policies.errors import Refused
from policies.rows import Row
from policies.sampler_registry import SamplerRegistry
from policies.sampling import SEQUENTIAL, Demand, SamplerSpec
from policies.watches import Grant, Table, Watch

NAMED = 3
"""Keys that an answer to a wait names."""


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """``count`` rows of ``partition`` that have all ``fields`` and that ``task`` has not claimed; until ``deadline``.

    ``claim_id`` is unique; the same request again is the same claim. ``rank`` and ``oldest_version``: see
    `policies.sampling.Demand`.
    """

    claim_id: str
    partition: str
    task: str
    fields: tuple[str, ...]
    count: int
    deadline: float
    sampler: SamplerSpec = SEQUENTIAL
    rank: int | None = None
    oldest_version: float | None = None

    @property
    def demand(self) -> Demand:
        return Demand(self.count, self.rank, self.oldest_version)


@dataclass(frozen=True, slots=True)
class WaitRequest:
    """All of ``keys`` have all of ``fields``; until ``deadline``. ``wait_id`` is unique among claims and waits."""

    wait_id: str
    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...]
    deadline: float


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer to the claim or wait ``claim_id``: the keys, or the deadline passed, or it can never be met.

    For a wait ``keys`` are those it asked for. ``skipped``: (key, reason) of rows that the task will not be given.
    ``parts``: micro-batches as indices into ``keys``, empty when they are one. With ``timed_out`` or ``error`` nothing
    was claimed; ``found`` says in words what there was instead. ``grant``: what a claim that is given back needs.
    """

    claim_id: str
    keys: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    timed_out: bool = False
    error: Refused | None = None
    found: str = field(default="", compare=False)
    grant: Grant | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True, eq=False)
class Task:
    """``bit`` marks the rows it has claimed; ``claimed`` counts them since the last reset, cleared rows included."""

    name: str
    bit: int
    claimed: int = 0
    watches: dict[tuple[int, SamplerSpec], Watch] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _ParkedClaim:
    order: int
    request: ClaimRequest
    task: Task
    watch: Watch


@dataclass(slots=True, eq=False)
class _ParkedWait:
    order: int
    request: WaitRequest
    want: int
    unmet: set[str]


class Consumers:
    """The tasks, watches and parked requests of one partition."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self._watches: list[Watch] = []
        self._parked: dict[str, _ParkedClaim | _ParkedWait] = {}
        self._orders = itertools.count()
        self._dirty: dict[Watch, None] = {}
        self._waits: dict[str, dict[str, _ParkedWait]] = {}
        self._met: dict[str, _ParkedWait] = {}

    @property
    def idle(self) -> bool:
        """No watch and no wait: rows may come and go without a word here."""
        return not self._watches and not self._waits

    @property
    def parked(self) -> int:
        return len(self._parked)

    def task(self, name: str) -> Task:
        """The task of this name, made when it is new."""
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = Task(name, 1 << len(self.tasks))
        return task

    def add_watch(self, task: Task, watch: Watch) -> None:
        task.watches[watch.want, watch.spec] = watch
        self._watches.append(watch)

    # Rows come, change and go.

    def came(self, rows: Sequence[Row]) -> None:
        """New rows, in order of arrival, all with one mask."""
        for watch in self._watches:
            if rows and watch.ready(rows[0]):
                watch.fill(rows)
                self._changed(watch)
        for row in rows if self._waits else ():
            self._see(row)

    def grew(self, row: Row, before: int) -> None:
        """A row had the fields ``before`` and has more now."""
        for watch in self._watches:
            if before & watch.want != watch.want and watch.ready(row):
                watch.offer(row)
                self._changed(watch)
        if self._waits:
            self._see(row)

    def retagged(self, row: Row) -> None:
        """The tags of a row changed."""
        for watch in self._watches:
            if watch.retagged(row.key):
                self._changed(watch)

    def went(self, row: Row) -> None:
        """A row was cleared."""
        for watch in self._watches:
            if watch.ready(row):
                watch.withdraw(row.key)
                self._changed(watch)
        for wait in self._waits.get(row.key, {}).values():
            wait.unmet.add(row.key)

    def _see(self, row: Row) -> None:
        for wait_id, wait in self._waits.get(row.key, {}).items():
            if row.mask & wait.want == wait.want:
                wait.unmet.discard(row.key)
                if not wait.unmet:
                    self._met[wait_id] = wait

    def _changed(self, watch: Watch) -> None:
        if watch.waiting:
            self._dirty[watch] = None

    # Requests.

    def claim(
        self, request: ClaimRequest, want: int, table: Table, registry: SamplerRegistry, now: float
    ) -> ClaimAnswer | None:
        """Answer the claim, or park it and answer None. Raises `Refused` for one that can never be met, or a sampler
        that has failed; a refused claim begins no task and no watch."""
        task, watch = self._watch_for(request, want, table, registry)
        answer = self._attempt(request, task, watch)
        if answer is not None and answer.error is not None:
            raise answer.error
        if answer is None and request.deadline <= now:
            return ClaimAnswer(request.claim_id, timed_out=True, found=watch.shortfall(request.demand))
        if answer is None:
            order = next(self._orders)
            self._parked[request.claim_id] = _ParkedClaim(order, request, task, watch)
            watch.waiting.setdefault(request.demand, OrderedDict())[order] = request
        return answer

    def _watch_for(
        self, request: ClaimRequest, want: int, table: Table, registry: SamplerRegistry
    ) -> tuple[Task, Watch]:
        task = self.tasks.get(request.task) or Task(request.task, 1 << len(self.tasks))
        watch = task.watches.get((want, request.sampler))
        if watch is not None:
            watch.check(request.demand, request.fields)
            return task, watch
        watch = Watch(table, task.name, task.bit, want, request.sampler, registry)
        watch.check(request.demand, request.fields)
        self.tasks[task.name] = task
        self.add_watch(task, watch)
        watch.fill(table.rows.values())
        return task, watch

    def _attempt(self, request: ClaimRequest, task: Task, watch: Watch) -> ClaimAnswer | None:
        grant = watch.draw(request.demand)
        if grant is None:
            return None
        self._changed(watch)
        if isinstance(grant, Refused):
            return ClaimAnswer(request.claim_id, error=grant)
        taken, others = grant.drawn.claims, [other for other in task.watches.values() if other is not watch]
        for candidate in taken:
            row = candidate.row
            if row is not None:
                row.claimed |= task.bit
                for other in others:
                    if row.mask & other.want == other.want:
                        other.withdraw(row.key)
        for other in others if taken else ():
            self._changed(other)
        task.claimed += len(taken)
        drawn = grant.drawn
        return ClaimAnswer(
            request.claim_id,
            tuple([row.key for row in drawn.rows]),
            tuple([(row.key, reason) for row, reason in drawn.skipped]),
            tuple([tuple(part) for part in drawn.parts]),
            grant=grant,
        )

    def wait(self, request: WaitRequest, want: int, ready: Collection[str], now: float) -> ClaimAnswer | None:
        """Answer the wait, or park it and answer None. ``ready``: those of its keys that have the fields now."""
        unmet = set(request.keys).difference(ready)
        if not unmet:
            return ClaimAnswer(request.wait_id, request.keys)
        wait = _ParkedWait(next(self._orders), request, want, unmet)
        if request.deadline <= now:
            return ClaimAnswer(request.wait_id, timed_out=True, found=_lacking(wait))
        self._parked[request.wait_id] = wait
        for key in set(request.keys):
            self._waits.setdefault(key, {})[request.wait_id] = wait
        return None

    def wake(self, now: float) -> list[ClaimAnswer]:
        """The answers of the parked requests that can be answered now, in the order in which they were parked.

        A request whose deadline has passed is not among them: its asker may have left, and its rows would be lost.
        """
        if not self._dirty and not self._met:
            return []
        answers = self._wake_waits(now)
        heap: list[tuple[int, int, Watch, Demand]] = []
        pushed = itertools.count()
        while True:
            for watch in self._dirty:
                for demand, waiting in watch.waiting.items():
                    order = next((order for order, r in waiting.items() if r.deadline > now), None)
                    if order is not None:
                        heappush(heap, (order, next(pushed), watch, demand))
            self._dirty.clear()
            answer = self._next_met(heap)
            if answer is None:
                return [answer for _, answer in sorted(answers, key=lambda answered: answered[0])]
            answers.append(answer)

    def _next_met(self, heap: list[tuple[int, int, Watch, Demand]]) -> tuple[int, ClaimAnswer] | None:
        """The first claim of ``heap`` that can be answered now, with its order of parking; it is parked no more."""
        while heap:
            order, _, watch, demand = heappop(heap)
            waiting = watch.waiting.get(demand)
            request = None if waiting is None else waiting.get(order)
            answer = None if request is None else self._attempt(request, self.tasks[watch.task], watch)
            if answer is not None:
                self._dirty[watch] = None
                self.forget(answer.claim_id)
                return order, answer
        return None

    def _wake_waits(self, now: float) -> list[tuple[int, ClaimAnswer]]:
        met = [wait for wait in self._met.values() if not wait.unmet and wait.request.deadline > now]
        self._met.clear()
        for wait in met:
            self.forget(wait.request.wait_id)
        return [(wait.order, ClaimAnswer(wait.request.wait_id, wait.request.keys)) for wait in met]

    def forget(self, request_id: str) -> None:
        """A parked request is parked no more. O(1), or O(its keys)."""
        parked = self._parked.pop(request_id)
        if isinstance(parked, _ParkedClaim):
            waiting, demand = parked.watch.waiting, parked.request.demand
            del waiting[demand][parked.order]
            if not waiting[demand]:
                del waiting[demand]
            return
        self._met.pop(request_id, None)
        for key in set(parked.request.keys):
            del self._waits[key][request_id]
            if not self._waits[key]:
                del self._waits[key]

    def give_up(self, request_id: str) -> tuple[Sequence[str], str]:
        """A parked request ends unanswered: the fields it asked for, and in words what it waited for in vain."""
        parked = self._parked[request_id]
        found = parked.watch.shortfall(parked.request.demand) if isinstance(parked, _ParkedClaim) else _lacking(parked)
        self.forget(request_id)
        return parked.request.fields, found

    def close(self, error: Refused) -> list[ClaimAnswer]:
        """The partition goes: every parked request is answered with ``error``."""
        return [ClaimAnswer(claim_id, error=error) for claim_id in self._parked]

    def give_back(self, grant: Grant) -> None:
        """The asker left before it had its answer. What the sampler leaves of it is offered again. O(rows given)."""
        watch, task = grant.watch, self.tasks[grant.watch.task]
        if watch.epoch != grant.epoch:
            return
        rows = watch.give_back(grant)
        for row in rows:
            row.claimed &= ~task.bit
        task.claimed -= len(rows)
        for other in task.watches.values():
            other.fill(rows)
            self._changed(other)

    def reset(self, name: str, rows: Collection[Row]) -> None:
        """The task has claimed nothing any more; all its rows are offered again, to new samplers."""
        task = self.tasks.get(name)
        if task is None:
            return
        task.claimed = 0
        for row in rows:
            row.claimed &= ~task.bit
        for watch in task.watches.values():
            watch.reset(rows)
            self._changed(watch)


def _lacking(wait: _ParkedWait) -> str:
    """Which keys of a wait are not ready, in the order asked."""
    lacking = [key for key in dict.fromkeys(wait.request.keys) if key in wait.unmet]
    more = f" and {len(lacking) - NAMED} more" if len(lacking) > NAMED else ""
    return f"{', '.join(map(repr, lacking[:NAMED]))}{more} of {len(set(wait.request.keys))} keys lack them"
