"""Coalescing: many callers want keys, few reads are sent. A state machine: events in, instructions out, no I/O.

When a read leaves. With nothing in flight, what is wanted leaves at the next turn, so all that ask in one turn ride
together and a lone caller waits for nobody (``window_s`` more, when one is set). With a read in flight, what arrives is
gathered and leaves when a read ends; or earlier, in a further slot, when a whole read has been gathered or somebody has
waited `PATIENCE_S`, so a read that hangs holds up nobody else for long. A read that takes longer than reads take gives
its slot up.

Rules:
1. Every caller is answered exactly once: with its rows in its own order, or with the error of one of its keys.
2. A key that is queued or in flight is not read again for another caller who wants it; both share what comes, as soon
   as its unit has sent it. (Rows that are read through here are written once and never replaced.)
3. A key's error reaches those who asked for it and nobody else. What a unit, or the whole plane, failed to deliver in a
   read of several keys is tried again once, in halves, or key by key when it is at most `FEW_KEYS`; then it fails.
4. Units that are silent or down (`policies.unit_watch`) are not asked. The keys of a silent one wait until it is clear
   what it is; those of one that is down fail at once, with its error. So an outage costs a bounded number of reads.
5. A caller who leaves, at whatever moment, changes nothing for others. A waiting key that nobody wants any more is
   dropped; one in flight is not called back.
6. A read keeps to the limits of keys, tokens and bytes, unless it is one key that breaks them by itself. At most
   ``max_in_flight`` reads hold a slot, and callers queue at most ``max_waiting`` keys: beyond that they wait in their
   order and are admitted key by key, so that a chain longer than the bound comes through.

Costs: O(1) per key and event, amortised, and O(reads in flight) per event.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from policies.coalescing_events import (
    Answer,
    Closed,
    Event,
    GetDone,
    GetFailed,
    GetPart,
    GetPlaced,
    Instruction,
    Left,
    SetTimer,
    Source,
    StartGet,
    TimerFired,
    Wanted,
    Wish,
)
from policies.config import CoalescerConfig
from policies.errors import ClosedError, RegraftError, RemoteError, Unreachable
from policies.histogram import Histogram
from policies.read_queue import Name, ReadQueue, Waiting
from policies.row_cache import Row, RowCache, row_bytes
from policies.row_sizes import RowSizes
from policies.unit_watch import UnitWatch

PATIENCE_S: Final = 0.05
FEW_KEYS: Final = 4
FIRST_SLOW_S: Final = 1.0
"""A read is slow after this time, until it is known how long reads take …"""
SLOW_P99S: Final = 3.0
"""… and then after this many times their 99th percentile (but not within `PATIENCE_S`)."""
KNOWN_READS: Final = 20

_COUNTS: Final = ("gets", "keys_read", "shared", "cached", "failed_gets", "retried_keys", "probes", "dropped")


@dataclass(slots=True, eq=False)
class _Caller:
    """``unadmitted``: keys not asked for yet; ``pending``: those that it waits for; ``rows``: what has come."""

    source: Source
    keys: tuple[str, ...]
    unadmitted: deque[Wish]
    pending: set[str] = field(default_factory=set)
    rows: dict[str, Row] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Row:
    """A row that is queued, held back, in flight or to be tried again. ``held``: the silent unit that it waits for;
    ``tried``: a read of it has failed."""

    wish: Wish
    waiting: Waiting
    wanters: dict[int, None] = field(default_factory=dict)
    held: str | None = None
    tried: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """A read that is out. ``keys``: those of which nothing has been told; ``units``: where they are; ``placed``: that
    is known; ``probe``: the unit that this read is to find back."""

    source: Source
    keys: dict[str, None]
    alone: bool
    avoid: frozenset[str]
    started: float
    probe: str | None = None
    placed: bool = False
    lost: bool = False
    units: dict[str, str] = field(default_factory=dict)


class Coalescing:
    def __init__(self, config: CoalescerConfig) -> None:
        self._config = config
        self._callers: dict[int, _Caller] = {}
        self._backlog: deque[int] = deque()  # callers with unadmitted keys, in order
        self._rows: dict[Name, _Row] = {}
        self._queue = ReadQueue(config.max_keys, config.max_tokens, config.max_bytes)
        self._held: dict[str, dict[Name, None]] = {}  # by the unit that they wait for
        self._again: deque[tuple[str | None, list[Name]]] = deque()  # reads to be tried again, with their unit
        self._flights: dict[int, _Flight] = {}
        self._units = UnitWatch(config.probe_after_s)
        self._cache, self._sizes = RowCache(config.cache_bytes), RowSizes()
        self._next_number = 0
        self._timer_at: float | None = None
        self._closed = False
        self._slow_s = FIRST_SLOW_S
        self._counts: Counter[str] = Counter()
        self._unit_gets: Counter[str] = Counter()
        self._wait, self._service = Histogram(), Histogram()
        self._out: list[Instruction] = []

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event and say what is to be done now."""
        match event:
            case Wanted():
                self._want(event)
            case Left(caller):
                self._drop(caller)
            case GetPlaced(number, units):
                self._place(number, units)
            case GetPart(number, rows, errors, now):
                self._arrive(number, rows, errors, now)
            case GetDone() | GetFailed():
                self._end(event)
            case TimerFired():
                self._timer_at = None
            case Closed():
                self._close()
        self._advance(event)
        instructions, self._out = self._out, []
        return instructions

    def statistics(self) -> Mapping[str, Any]:
        """``gets`` sent with ``keys_read`` keys in them, ``shared`` requests that rode on another's, ``cached`` ones
        that needed no read, ``failed_gets`` that did not bring all since a unit or the plane failed, ``retried_keys``,
        ``probes`` (among the gets), ``dropped`` keys that nobody wanted any more; ``waiting`` and ``held`` keys and
        ``in_flight`` reads now; ``unit_gets``: how many reads asked each unit; ``wait_s`` of keys in the queue and
        ``service_s`` of reads that brought all: see `Histogram.to_plain`."""
        return {
            **{name: self._counts[name] for name in _COUNTS},
            "waiting": len(self._queue),
            "held": sum(map(len, self._held.values())),
            "in_flight": len(self._flights),
            "unit_gets": dict(self._unit_gets),
            "wait_s": self._wait.to_plain(),
            "service_s": self._service.to_plain(),
        }

    # Callers

    def _want(self, event: Wanted) -> None:
        if self._closed:
            closed = ClosedError("the coalescer is closed; it reads nothing any more")
            self._out.append(Answer(event.caller, error=closed))
        elif not event.wishes:
            self._out.append(Answer(event.caller))
        else:
            wishes = {wish.key: wish for wish in event.wishes}
            keys = tuple([wish.key for wish in event.wishes])
            self._callers[event.caller] = _Caller(event.source, keys, deque(wishes.values()))
            self._backlog.append(event.caller)

    def _admit(self, now: float) -> None:
        """Let callers' keys into the queue, first come first served, while there is room."""
        while self._backlog:
            number = self._backlog[0]
            caller = self._callers.get(number)
            while caller is not None and caller.unadmitted:
                wish = caller.unadmitted[0]
                name = Name(caller.source, wish.key)
                row = self._rows.get(name)
                if row is not None:
                    self._counts["shared"] += 1
                elif (cached := self._cache.get(name)) is not None:
                    self._counts["cached"] += 1
                    caller.unadmitted.popleft()
                    self._give(number, caller, wish.key, cached)
                    continue
                elif len(self._queue) >= self._config.max_waiting:
                    return
                else:
                    row = self._rows[name] = _Row(
                        wish, Waiting(now, wish.tokens, self._sizes.expected(name.source, wish))
                    )
                    self._queue.add(name, row.waiting)
                row.wanters[number] = None
                caller.pending.add(wish.key)
                caller.unadmitted.popleft()
            self._backlog.popleft()

    def _give(self, number: int, caller: _Caller, key: str, row: Row) -> None:
        caller.rows[key] = row
        caller.pending.discard(key)
        if not caller.pending and not caller.unadmitted:
            del self._callers[number]
            self._out.append(Answer(number, tuple([caller.rows[k] for k in caller.keys])))

    def _drop(self, number: int) -> None:
        """Forget a caller, and waiting keys that only it wanted."""
        caller = self._callers.pop(number, None)
        if caller is None:
            return
        for key in caller.pending:
            name = Name(caller.source, key)
            row = self._rows.get(name)
            if row is None:
                continue  # the key whose error is being told
            del row.wanters[number]
            if row.wanters:
                continue
            if row.held is not None:
                del self._held[row.held][name]
                self._forget(name)
            elif name in self._queue:
                self._queue.remove(name)
                self._forget(name)

    def _forget(self, name: Name) -> None:
        del self._rows[name]
        self._counts["dropped"] += 1

    def _still_wanted(self, names: Iterable[Name]) -> list[Name]:
        """Those of ``names`` that somebody wants; the others are forgotten. None is queued, held or in flight."""
        kept = []
        for name in names:
            if self._rows[name].wanters:
                kept.append(name)
            else:
                self._forget(name)
        return kept

    def _deliver(self, name: Name, row: Row) -> None:
        wanted = self._rows.pop(name)
        self._sizes.note(name.source, wanted.wish.tokens, row_bytes(row))
        if wanted.wish.again:
            self._cache.add(name, row)
        for number in wanted.wanters:
            self._give(number, self._callers[number], name.key, row)

    def _refuse(self, name: Name, error: RegraftError) -> None:
        wanted = self._rows.pop(name, None)
        for number in list(wanted.wanters) if wanted is not None else ():
            self._drop(number)
            self._out.append(Answer(number, error=error))

    def _close(self) -> None:
        self._closed = True
        for number in list(self._callers):
            self._drop(number)
            self._out.append(Answer(number, error=ClosedError("the coalescer was closed during the read")))
        self._backlog.clear()

    # Reads that are out

    def _place(self, number: int, units: Mapping[str, str]) -> None:
        flight = self._flight(number)
        flight.placed = True
        asked = set()
        for key, unit in units.items():
            if key not in flight.keys:
                continue
            flight.units[key] = unit
            if unit in flight.avoid:
                del flight.keys[key]
                self._hold(unit, [Name(flight.source, key)])
            else:
                asked.add(unit)
        for unit in asked:
            self._unit_gets[unit] += 1
            if flight.probe is None:
                self._units.asked(unit, number, flight.started)

    def _arrive(self, number: int, rows: Mapping[str, Row], errors: Mapping[str, RegraftError], now: float) -> None:
        flight = self._flight(number)
        if flight.probe is not None:
            back = bool(rows) or any(not isinstance(error, Unreachable) for error in errors.values())
            self._probed(number, flight, back, now)
            return
        lost: dict[str | None, dict[str, RegraftError]] = {}
        for key in (*rows, *errors):
            if key not in flight.keys:
                continue
            del flight.keys[key]
            unit, error = flight.units.get(key), errors.get(key)
            if isinstance(error, Unreachable):
                lost.setdefault(unit, {})[key] = error
                continue
            if unit is not None:
                self._units.answered(unit, number, now)
            if error is None:
                self._deliver(Name(flight.source, key), rows[key])
            else:
                self._refuse(Name(flight.source, key), error)
        for unit, lost_keys in lost.items():
            self._lose(number, flight, unit, lost_keys, now)

    def _lose(
        self, number: int, flight: _Flight, unit: str | None, errors: Mapping[str, RegraftError], now: float
    ) -> None:
        """These keys of a read were not delivered, and it is not their fault: try them again, or fail them."""
        flight.lost = True
        again = []
        for key, error in errors.items():
            name = Name(flight.source, key)
            if unit is not None and isinstance(error, Unreachable):
                self._units.failed(unit, number, self._next_number, error, name, now)
            if self._rows[name].tried or flight.alone:
                self._refuse(name, error)
            else:
                self._rows[name].tried = True
                again.append(name)
        again = self._still_wanted(again)
        self._counts["retried_keys"] += len(again)
        if len(again) <= FEW_KEYS:
            self._again.extend((unit, [name]) for name in again)
        else:
            half = len(again) // 2
            self._again.extend(((unit, again[:half]), (unit, again[half:])))

    def _end(self, event: GetDone | GetFailed) -> None:
        number, now = event.number, event.now
        flight = self._flight(number)
        if isinstance(event, GetDone):
            self._arrive(number, event.rows, event.errors, now)
            for key in list(flight.keys):
                silence = RemoteError(f"the plane's answer says nothing of key {key!r}", key=key)
                self._arrive(number, {}, {key: silence}, now)
        elif flight.probe is not None:
            self._probed(number, flight, False, now)
        else:
            left, flight.keys = flight.keys, {}
            for unit in {flight.units.get(key) for key in left}:
                errors = {key: event.error for key in left if flight.units.get(key) == unit}
                self._lose(number, flight, unit, errors, now)
        del self._flights[number]
        for unit in set(flight.units.values()):
            self._units.ended(unit, number)
        if flight.lost:
            self._counts["failed_gets"] += 1
        elif flight.probe is None and isinstance(event, GetDone):
            self._service.add(now - flight.started)
            if self._service.count >= KNOWN_READS:
                self._slow_s = max(PATIENCE_S, SLOW_P99S * self._service.quantile(0.99))

    def _flight(self, number: int) -> _Flight:
        try:
            return self._flights[number]
        except KeyError:
            raise ValueError(f"no read of number {number} is in flight") from None

    def _probed(self, number: int, flight: _Flight, back: bool, now: float) -> None:
        """A probe has its answer: the first that it gets."""
        if flight.keys and flight.probe is not None:
            flight.keys = {}
            self._units.probed(flight.probe, number, back, now)

    # Units that are not asked

    def _hold(self, unit: str, names: list[Name]) -> None:
        for name in self._still_wanted(names):
            self._rows[name].held = unit
            self._held.setdefault(unit, {})[name] = None

    def _release(self, now: float) -> None:
        """Of keys that wait for a unit: fail those of one that is down, and queue again those of one that is well."""
        if not self._held:
            return
        avoided = self._units.avoided(now, self._slow_s)
        for unit in list(self._held):
            error = self._units.down(unit)
            if error is None and unit in avoided:
                continue
            names = list(self._held.pop(unit))
            for name in names:
                self._rows[name].held = None
            if error is None:
                self._queue.put_back(names, [self._rows[name].waiting for name in names])
                continue
            for name in names:
                self._refuse(name, _down(name.key, unit, error))

    # Reads that leave

    def _advance(self, event: Event) -> None:
        now = event.now
        self._release(now)
        self._admit(now)
        if not self._closed:
            self._probe(now)
        free = isinstance(event, GetDone | GetFailed) or not self._busy(now)
        while self._busy(now) < self._config.max_in_flight:
            names = self._next_again(now) or self._next_queued(event, free)
            if not names:
                break
            self._start(names[0].source, names, self._units.avoided(now, self._slow_s), self._config.timeout_s, now)
            self._admit(now)
        due = self._due(now)
        if due is not None and (self._timer_at is None or due < self._timer_at):
            self._timer_at = max(due, now)
            self._out.append(SetTimer(self._timer_at))

    def _busy(self, now: float) -> int:
        """Slots in use."""
        return sum(f.probe is None and not self._is_slow(f, now) for f in self._flights.values())

    def _is_slow(self, flight: _Flight, now: float) -> bool:
        return flight.placed and flight.started + self._slow_s <= now

    def _next_again(self, now: float) -> list[Name]:
        """The next read to be tried again, if its unit is to be asked."""
        while self._again:
            unit, names = self._again.popleft()
            names = self._still_wanted(names)
            if unit is None or unit not in self._units.avoided(now, self._slow_s):
                if names:
                    return names
                continue
            self._hold(unit, names)
            self._release(now)
        return []

    def _next_queued(self, event: Event, free: bool) -> list[Name]:
        """What may leave the queue now. While callers are still asking in this turn, only a whole read may."""
        if not len(self._queue):
            return []
        source = self._queue.whole()
        if self._leaves(free) > event.now or (source is None and isinstance(event, Wanted)):
            return []
        taken = self._queue.take(source)
        for waiting in taken.values():
            self._wait.add(event.now - waiting.since)
        return list(taken)

    def _leaves(self, free: bool) -> float:
        """When the head of the queue, which is not empty, may leave in a slot. ``free``: at the beginning of this turn
        nothing was in flight, or a read has just ended."""
        oldest = self._queue.oldest() or 0.0
        if self._queue.whole() is not None:
            return oldest
        if free:
            return oldest + self._config.window_s
        return oldest + max(self._config.window_s, PATIENCE_S)

    def _due(self, now: float) -> float | None:
        """When time alone changes something; None: never."""
        times = [self._units.next_probe()] if not self._closed else []
        if len(self._queue) or self._again:
            if self._busy(now) < self._config.max_in_flight:
                times.append(self._leaves(not self._busy(now)) if len(self._queue) else None)
            else:
                flights = self._flights.values()
                times += [f.started + self._slow_s for f in flights if f.placed and not self._is_slow(f, now)]
        return min((time for time in times if time is not None), default=None)

    def _probe(self, now: float) -> None:
        while (due := self._units.due_probe(now)) is not None:
            unit, name, seconds = due
            self._counts["probes"] += 1
            avoid = self._units.avoided(now, self._slow_s) - {unit}
            self._units.probing(unit, self._next_number)
            self._start(name.source, [name], avoid, min(seconds, self._config.timeout_s), now, probe=unit)

    def _start(
        self,
        source: Source,
        names: list[Name],
        avoid: frozenset[str],
        timeout_s: float,
        now: float,
        probe: str | None = None,
    ) -> None:
        number = self._next_number
        self._next_number += 1
        keys = tuple([name.key for name in names])
        self._flights[number] = _Flight(source, dict.fromkeys(keys), len(keys) == 1, avoid, now, probe)
        self._counts["gets"] += 1
        self._counts["keys_read"] += len(keys)
        self._out.append(StartGet(number, source, keys, avoid, timeout_s))


def _down(key: str, unit: str, error: RegraftError) -> Unreachable:
    cause = f"key {key!r}: unit {unit} is down and was not asked; it is probed until it is back. {error.message}"
    return Unreachable(cause, key=key, unit=unit)
