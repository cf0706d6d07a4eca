"""Tasks: who has claimed what, and the requests that are parked until their rows are there.

Rules, all in this file:

1. A task is given a row once. Rows are offered in the order in which they arrived; a claim is given all it asked for,
   or nothing.
2. A claim or wait that cannot be answered is parked. It is answered by the operation that completes it, by its
   deadline, or when its partition goes; it never stands in another request's way, so of several parked claims each
   is tried in the order in which they were parked.
3. A row that is cleared is offered to nobody, whatever still refers to it.

For each (task, set of fields) asked for there is a `Watch`: a heap of the ready rows that the task has not claimed, in
order of arrival, and their exact number. Costs: the first claim of a watch scans the partition's rows once; after
that a row that becomes ready, is claimed or is cleared costs O(1) per watch of its partition (O(log n) when rows become
ready out of order), and a parked request costs nothing until its watch holds enough rows. A task costs one bit per
row and lasts as long as its partition, so name tasks after what they do, not after each request.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from policies.errors import Refused
from policies.rows import Row

NO_CLAIM = 1 << 62


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """``count`` rows of ``partition`` that have all ``fields`` and that ``task`` has not claimed; until ``deadline``.

    ``claim_id`` is unique; the same request again is the same claim.
    """

    claim_id: str
    partition: str
    task: str
    fields: tuple[str, ...]
    count: int
    deadline: float


@dataclass(frozen=True, slots=True)
class WaitRequest:
    """All of ``keys`` have all of ``fields``; until ``deadline``. ``wait_id`` is unique among claims and waits."""

    wait_id: str
    partition: str
    keys: tuple[str, ...]
    fields: tuple[str, ...]
    deadline: float


def deadline_after(now: float, timeout: float) -> float:
    """``timeout`` seconds from ``now``; `Refused` for NaN, which is neither sooner nor later than anything."""
    if math.isnan(timeout):
        raise Refused("a timeout of NaN s; give seconds")
    return now + timeout


@dataclass(frozen=True, slots=True)
class ClaimAnswer:
    """The answer to the claim or wait ``claim_id``: the keys, or the deadline passed, or it can never be met.

    For a wait ``keys`` are those it asked for. With ``timed_out`` or ``error`` nothing was claimed.
    """

    claim_id: str
    keys: tuple[str, ...] = ()
    timed_out: bool = False
    error: Refused | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """``rows`` so far, of ``expected`` (None: nobody said how many there will be)."""

    rows: int
    expected: int | None

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.rows >= self.expected


@dataclass(slots=True, eq=False)
class Watch:
    """The rows that have all fields of ``want`` and that ``task`` has not claimed.

    ``heap`` may also hold rows that were cleared or claimed meanwhile; ``available`` counts the others. ``smallest`` is
    the least count among the parked claims of this watch.
    """

    task: Task
    want: int
    heap: list[tuple[int, Row]]
    available: int
    smallest: int = NO_CLAIM

    def ready(self, row: Row) -> bool:
        return row.mask & self.want == self.want and not row.claimed & self.task.bit

    def offer(self, row: Row) -> None:
        heappush(self.heap, (row.arrival, row))
        self.available += 1

    def withdraw(self) -> None:
        """One of the rows counted is not available any more."""
        self.available -= 1
        if len(self.heap) > 2 * self.available + 64:
            self.heap = [entry for entry in self.heap if self._current(entry)]
            heapify(self.heap)

    def take(self, count: int) -> list[Row]:
        """The first ``count`` available rows; there must be as many."""
        taken: list[Row] = []
        while len(taken) < count:
            entry = heappop(self.heap)
            if self._current(entry):
                taken.append(entry[1])
        self.available -= count
        return taken

    def _current(self, entry: tuple[int, Row]) -> bool:
        arrival, row = entry
        return row.arrival == arrival and not row.claimed & self.task.bit


@dataclass(slots=True, eq=False)
class Task:
    """``bit`` marks the rows it has claimed; ``claimed`` counts them since the last reset, cleared rows included."""

    name: str
    bit: int
    claimed: int = 0
    watches: dict[int, Watch] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _ParkedClaim:
    request: ClaimRequest
    watch: Watch


@dataclass(slots=True, eq=False)
class _ParkedWait:
    request: WaitRequest
    want: int
    unmet: set[str]


class Consumers:
    """The tasks, watches and parked requests of one partition."""

    def __init__(self) -> None:
        self.tasks: dict[str, Task] = {}
        self._watches: list[Watch] = []
        self._parked: dict[str, _ParkedClaim | _ParkedWait] = {}
        self._waits: dict[str, list[_ParkedWait]] = {}
        self._wait_met = False

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

    def watch(self, task: Task, want: int, rows: Iterable[Row]) -> Watch:
        """The task's watch for these fields; a new one is filled from ``rows``, all of the partition."""
        watch = task.watches.get(want)
        if watch is None:
            watch = task.watches[want] = Watch(task, want, [], 0)
            self._watches.append(watch)
            _refill(watch, rows)
        return watch

    def came(self, rows: Sequence[Row]) -> None:
        """New rows, in order of arrival, all with one mask."""
        for watch in self._watches:
            if rows and watch.ready(rows[0]):
                for row in rows:
                    watch.offer(row)
        for row in rows if self._waits else ():
            self._see(row)

    def grew(self, row: Row, before: int) -> None:
        """A row had the fields ``before`` and has more now."""
        for watch in self._watches:
            if before & watch.want != watch.want and watch.ready(row):
                watch.offer(row)
        if self._waits:
            self._see(row)

    def went(self, row: Row) -> None:
        """A row was cleared."""
        for watch in self._watches:
            if watch.ready(row):
                watch.withdraw()
        for wait in self._waits.get(row.key, ()):
            wait.unmet.add(row.key)

    def _see(self, row: Row) -> None:
        for wait in self._waits.get(row.key, ()):
            if row.mask & wait.want == wait.want:
                wait.unmet.discard(row.key)
                self._wait_met = self._wait_met or not wait.unmet

    def claim(self, request: ClaimRequest, want: int, rows: Iterable[Row], now: float) -> ClaimAnswer | None:
        """Answer the claim, or park it and answer None. ``rows``: all of the partition, in order of arrival."""
        watch = self.watch(self.task(request.task), want, rows)
        if watch.available >= request.count:
            return self._grant(request, watch)
        if request.deadline <= now:
            return ClaimAnswer(request.claim_id, timed_out=True)
        self._parked[request.claim_id] = _ParkedClaim(request, watch)
        watch.smallest = min(watch.smallest, request.count)
        return None

    def _grant(self, request: ClaimRequest, watch: Watch) -> ClaimAnswer:
        rows, task = watch.take(request.count), watch.task
        others = [other for other in task.watches.values() if other is not watch]
        for row in rows:
            row.claimed |= task.bit
            for other in others:
                if row.mask & other.want == other.want:
                    other.withdraw()
        task.claimed += len(rows)
        return ClaimAnswer(request.claim_id, tuple([row.key for row in rows]))

    def wait(self, request: WaitRequest, want: int, ready: Collection[str], now: float) -> ClaimAnswer | None:
        """Answer the wait, or park it and answer None. ``ready``: those of its keys that have the fields now."""
        unmet = set(request.keys).difference(ready)
        if not unmet:
            return ClaimAnswer(request.wait_id, request.keys)
        if request.deadline <= now:
            return ClaimAnswer(request.wait_id, timed_out=True)
        wait = _ParkedWait(request, want, unmet)
        self._parked[request.wait_id] = wait
        for key in set(request.keys):
            self._waits.setdefault(key, []).append(wait)
        return None

    def wake(self, now: float) -> list[ClaimAnswer]:
        """The answers of the parked requests that can be answered now, in the order in which they were parked.

        A request whose deadline has passed is not among them: its asker may have left, and its rows would be lost.
        """
        if not self._parked or not (self._wait_met or any(w.available >= w.smallest for w in self._watches)):
            return []
        self._wait_met = False
        answers: list[ClaimAnswer] = []
        for parked in self._parked.values():
            if parked.request.deadline <= now:
                continue
            if isinstance(parked, _ParkedWait):
                if not parked.unmet:
                    answers.append(ClaimAnswer(parked.request.wait_id, parked.request.keys))
            elif parked.watch.available >= parked.request.count:
                answers.append(self._grant(parked.request, parked.watch))
        for answer in answers:
            self.forget(answer.claim_id)
        return answers

    def forget(self, claim_id: str) -> None:
        """A parked request is parked no more."""
        parked = self._parked.pop(claim_id)
        if isinstance(parked, _ParkedClaim):
            claims = [p for p in self._parked.values() if isinstance(p, _ParkedClaim) and p.watch is parked.watch]
            parked.watch.smallest = min([claim.request.count for claim in claims], default=NO_CLAIM)
            return
        for key in set(parked.request.keys):
            waits = self._waits[key]
            waits.remove(parked)
            if not waits:
                del self._waits[key]

    def close(self, error: Refused) -> list[ClaimAnswer]:
        """The partition goes: every parked request is answered with ``error``."""
        return [ClaimAnswer(claim_id, error=error) for claim_id in self._parked]

    def unclaim(self, task: Task, taken: Sequence[Row], rows: Collection[Row]) -> None:
        """The task has not claimed the rows ``taken`` after all. ``rows``: all of the partition. O(rows), and rare."""
        for row in taken:
            task.claimed -= bool(row.claimed & task.bit)
            row.claimed &= ~task.bit
        for watch in task.watches.values():
            _refill(watch, rows)

    def reset(self, name: str, rows: Collection[Row]) -> None:
        """The task has claimed nothing any more; all its rows are offered again."""
        task = self.tasks.get(name)
        if task is None:
            return
        task.claimed = 0
        for row in rows:
            row.claimed &= ~task.bit
        for watch in task.watches.values():
            _refill(watch, rows)


def _refill(watch: Watch, rows: Iterable[Row]) -> None:
    watch.heap = [(row.arrival, row) for row in rows if watch.ready(row)]
    watch.available = len(watch.heap)


class Deadlines:
    """When parked requests end. Every operation is O(log n) of the requests parked."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._entries: dict[str, tuple[float, int, str]] = {}
        self._partitions: dict[str, str] = {}
        self._count = 0

    def add(self, request_id: str, partition: str, deadline: float) -> None:
        entry = (deadline, self._count, request_id)
        self._count += 1
        self._entries[request_id] = entry
        self._partitions[request_id] = partition
        heappush(self._heap, entry)

    def partition(self, request_id: str) -> str | None:
        """The partition in which the request is parked; None when it is not."""
        return self._partitions.get(request_id)

    def remove(self, request_id: str) -> None:
        del self._entries[request_id], self._partitions[request_id]
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())

    def next(self) -> float | None:
        """The earliest deadline, in seconds on the clock of ``now``; None when nothing is parked."""
        while self._heap and self._entries.get(self._heap[0][2]) != self._heap[0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> list[tuple[str, str]]:
        """(request id, partition) of all whose deadline is not after ``now``, earliest first; they are removed."""
        due: list[tuple[str, str]] = []
        while (deadline := self.next()) is not None and deadline <= now:
            request_id = self._heap[0][2]
            due.append((request_id, self._partitions[request_id]))
            self.remove(request_id)
        return due
