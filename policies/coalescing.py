"""Coalescing: many callers want keys, few reads are sent. A state machine: events in, instructions out, no I/O.

When a read leaves. With nothing in flight, what is wanted leaves at the next turn, so all that ask in one turn ride
together and a lone caller waits for nobody (``window_s`` more, when one is set). With a read in flight, what arrives is
gathered and leaves when a read ends; or earlier, in a further slot, when a whole GET has been gathered or somebody has
waited `PATIENCE_S`, so a read that hangs holds up nobody else for long.

Rules:
1. Every caller is answered exactly once: with its rows in its own order, or with the error of one of its keys.
2. A key that is queued or in flight is not read again for another caller who wants it; both share what comes. (Rows
   that are read through here are written once and never replaced.)
3. A key's error reaches those who asked for it and nobody else. A read of several keys that fails as a whole is tried
   again once, in halves, or key by key when it has at most `FEW_KEYS`; what fails again fails for its callers.
4. A caller who leaves, at whatever moment, changes nothing for others. A queued key that nobody wants any more is
   dropped; one in flight is not called back.
5. At most ``max_keys`` keys in a read, ``max_in_flight`` reads at once, ``max_waiting`` keys queued. Beyond that
   callers wait in their order and are admitted key by key, so that a chain longer than the bound comes through.

Costs: O(1) per key and event, amortised.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from policies.config import CoalescerConfig
from policies.errors import ClosedError, RegraftError, RemoteError

PATIENCE_S: Final = 0.05
FEW_KEYS: Final = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """``caller`` is a number that was not used before; ``keys`` may repeat."""

    caller: int
    keys: tuple[str, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Left:
    """The caller does not wait any more. Harmless when it has been answered."""

    caller: int
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class GetDone:
    """Read ``number`` came back: a row or an error for each of its keys."""

    number: int
    rows: Mapping[str, Any]
    errors: Mapping[str, RegraftError]
    now: float


@dataclass(frozen=True, slots=True)
class GetFailed:
    """Read ``number`` failed as a whole."""

    number: int
    error: RegraftError
    now: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    now: float


@dataclass(frozen=True, slots=True)
class Closed:
    now: float


Event = Wanted | Left | GetDone | GetFailed | TimerFired | Closed


@dataclass(frozen=True, slots=True)
class StartGet:
    """Read these keys, all different. To be answered by one `GetDone` or `GetFailed`."""

    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """``rows`` in the order of the caller's keys, or the ``error`` it gets instead."""

    caller: int
    rows: tuple[Any, ...] = ()
    error: RegraftError | None = None


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `TimerFired` at ``at``, and in a later turn than this one even if that is now. Replaces an earlier timer."""

    at: float


Instruction = StartGet | Answer | SetTimer


@dataclass(slots=True, eq=False)
class _Caller:
    """``unadmitted``: keys not asked for yet; ``pending``: queued or in flight; ``rows``: what has come."""

    keys: tuple[str, ...]
    unadmitted: deque[str]
    pending: set[str] = field(default_factory=set)
    rows: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    keys: tuple[str, ...]
    again: bool


class Coalescing:
    def __init__(self, config: CoalescerConfig) -> None:
        self._config = config
        self._callers: dict[int, _Caller] = {}
        self._backlog: deque[int] = deque()  # callers with unadmitted keys, in order
        self._wanters: dict[str, dict[int, None]] = {}  # of every key queued or in flight
        self._queue: dict[str, float] = {}  # key → when it was queued, oldest first
        self._again: deque[tuple[str, ...]] = deque()  # reads to be tried again
        self._flights: dict[int, _Flight] = {}
        self._next_number = 0
        self._timer_at: float | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._out: list[Instruction] = []

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event and say what is to be done now."""
        match event:
            case Wanted(caller, keys, now):
                self._want(caller, keys, now)
            case Left(caller):
                self._drop(caller)
            case GetDone(number, rows, errors):
                self._deliver(self._flight(number).keys, rows, errors)
            case GetFailed(number, error):
                self._fail(self._flight(number), error)
            case TimerFired():
                self._timer_at = None
            case Closed():
                self._close()
        self._advance(event)
        instructions, self._out = self._out, []
        return instructions

    def statistics(self) -> Mapping[str, int]:
        """``gets`` sent with ``keys_read`` keys in them, ``shared`` requests that rode on another's, ``failed_gets``,
        ``retried_keys``, ``dropped`` keys that nobody wanted any more; ``waiting`` keys and ``in_flight`` reads now."""
        names = ("gets", "keys_read", "shared", "failed_gets", "retried_keys", "dropped")
        counts = {name: self._counts[name] for name in names}
        return {**counts, "waiting": len(self._queue), "in_flight": len(self._flights)}

    def _want(self, caller: int, keys: tuple[str, ...], now: float) -> None:
        if self._closed:
            self._out.append(Answer(caller, error=ClosedError("the coalescer is closed; it reads nothing any more")))
        elif not keys:
            self._out.append(Answer(caller))
        else:
            self._callers[caller] = _Caller(keys, deque(dict.fromkeys(keys)))
            self._backlog.append(caller)
            self._admit(now)

    def _admit(self, now: float) -> None:
        """Let callers' keys into the queue, first come first served, while there is room."""
        while self._backlog:
            caller = self._callers.get(self._backlog[0])
            while caller is not None and caller.unadmitted:
                key = caller.unadmitted[0]
                if key in self._wanters:
                    self._counts["shared"] += 1
                elif len(self._queue) >= self._config.max_waiting:
                    return
                else:
                    self._wanters[key] = {}
                    self._queue[key] = now
                self._wanters[key][self._backlog[0]] = None
                caller.pending.add(key)
                caller.unadmitted.popleft()
            self._backlog.popleft()

    def _advance(self, event: Event) -> None:
        now = event.now
        self._admit(now)
        while len(self._flights) < self._config.max_in_flight:
            keys, again = self._next_again(), True
            if not keys:
                keys, again = self._next_queued(event), False
            if not keys:
                break
            self._start(keys, again)
            self._admit(now)
        due = self._due()
        if due is not None and (self._timer_at is None or due < self._timer_at):
            self._timer_at = max(due, now)
            self._out.append(SetTimer(self._timer_at))

    def _next_again(self) -> tuple[str, ...]:
        """The next read to be tried again, without keys that nobody wants any more."""
        while self._again:
            keys = self._still_wanted(self._again.popleft())
            if keys:
                return keys
        return ()

    def _next_queued(self, event: Event) -> tuple[str, ...]:
        """What may leave the queue now. While callers are still asking in this turn, only a whole GET may."""
        full = len(self._queue) >= self._config.max_keys
        due = self._due(ended=isinstance(event, GetDone | GetFailed))
        if due is None or not (full or (due <= event.now and not isinstance(event, Wanted))):
            return ()
        keys = tuple(key for key, _ in zip(self._queue, range(self._config.max_keys), strict=False))
        for key in keys:
            del self._queue[key]
        return keys

    def _due(self, ended: bool = False) -> float | None:
        """When the head of the queue is to leave; None while there is nothing to send or no slot to send it in.
        ``ended``: a read has just come back."""
        if not self._queue or len(self._flights) >= self._config.max_in_flight:
            return None
        oldest = next(iter(self._queue.values()))
        if ended or not self._flights or len(self._queue) >= self._config.max_keys:
            return oldest + self._config.window_s
        return oldest + max(self._config.window_s, PATIENCE_S)

    def _start(self, keys: tuple[str, ...], again: bool) -> None:
        number = self._next_number
        self._next_number += 1
        self._flights[number] = _Flight(keys, again)
        self._counts["gets"] += 1
        self._counts["keys_read"] += len(keys)
        self._out.append(StartGet(number, keys))

    def _flight(self, number: int) -> _Flight:
        try:
            return self._flights.pop(number)
        except KeyError:
            raise ValueError(f"no read of number {number} is in flight") from None

    def _deliver(self, keys: Sequence[str], rows: Mapping[str, Any], errors: Mapping[str, RegraftError]) -> None:
        for key in keys:
            wanters = self._wanters.pop(key)
            if key in rows:
                for caller in wanters:
                    self._give(caller, key, rows[key])
                continue
            error = errors.get(key) or RemoteError(f"the plane's answer says nothing of key {key!r}", key=key)
            for caller in list(wanters):
                self._drop(caller)
                self._out.append(Answer(caller, error=error))

    def _give(self, number: int, key: str, row: Any) -> None:
        caller = self._callers[number]
        caller.rows[key] = row
        caller.pending.remove(key)
        if not caller.pending and not caller.unadmitted:
            del self._callers[number]
            self._out.append(Answer(number, tuple(caller.rows[k] for k in caller.keys)))

    def _fail(self, flight: _Flight, error: RegraftError) -> None:
        self._counts["failed_gets"] += 1
        if flight.again or len(flight.keys) == 1:
            self._deliver(flight.keys, {}, dict.fromkeys(flight.keys, error))
            return
        keys = self._still_wanted(flight.keys)
        self._counts["retried_keys"] += len(keys)
        if len(keys) <= FEW_KEYS:
            self._again.extend((key,) for key in keys)
        else:
            self._again.extend((keys[: len(keys) // 2], keys[len(keys) // 2 :]))

    def _still_wanted(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Those of ``keys``, none of which is queued or in flight, that somebody wants; the others are forgotten."""
        kept = []
        for key in keys:
            if self._wanters[key]:
                kept.append(key)
            else:
                del self._wanters[key]
                self._counts["dropped"] += 1
        return tuple(kept)

    def _drop(self, number: int) -> None:
        """Forget a caller, and queued keys that only it wanted."""
        caller = self._callers.pop(number, None)
        if caller is None:
            return
        for key in caller.pending:
            wanters = self._wanters.get(key)
            if wanters is None:
                continue  # the key whose error is being delivered
            del wanters[number]
            if not wanters and key in self._queue:
                del self._queue[key], self._wanters[key]
                self._counts["dropped"] += 1

    def _close(self) -> None:
        self._closed = True
        for number in list(self._callers):
            self._drop(number)
            self._out.append(Answer(number, error=ClosedError("the coalescer was closed during the read")))
        self._backlog.clear()
