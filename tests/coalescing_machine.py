"""A world around `Coalescing` for the properties of reads: callers who come and leave, units that answer late, in
parts, in any order, wrongly or never, and a clock that is moved by hand. What must hold is checked at every
instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.coalescing import FIRST_SLOW_S, KNOWN_READS, PATIENCE_S, Coalescing
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
from policies.errors import KeyCorrupt, KeyMissing, RegraftError, RemoteError, RequestTimeout, Unreachable
from policies.read_queue import Name
from policies.unit_watch import SILENT_READS

SOURCES = (Source("staging", ("ids",)), Source("train", ("ids",)))
KEYS = tuple(f"k{i}" for i in range(12))
UNITS = ("u0", "u1", "u2")
PLACE = {key: UNITS[i % 3] for i, key in enumerate(KEYS[:-1])}
"""Where the keys are. The last one is nowhere."""
KEPT = {"k0", "k1"}
PROBE_S = 0.5
UNBOUNDED = 1000
"""So many keys may wait that every caller is admitted at once: then it is known who waits for what."""


def tokens_of(key: str) -> int:
    return 1 + int(key[1:]) % 4


def row_of(name: Name) -> dict[str, Any]:
    """A row that tells which it is, of two bytes a token."""
    return {"name": name, "data": b"xx" * tokens_of(name.key)}


def wish(key: str) -> Wish:
    return Wish(key, tokens_of(key), 2 * tokens_of(key), again=key in KEPT)


@dataclass
class Read:
    """A read that is out: ``left`` are the keys of which nothing was told, ``asked`` the units that owe an answer.
    ``probe``: the unit that it is to find back."""

    get: StartGet
    started: float
    left: list[str]
    probe: str | None
    placed: bool = False
    asked: set[str] = field(default_factory=set)
    complete: bool = True

    @property
    def source(self) -> Source:
        return self.get.source


@dataclass
class Unit:
    """What is known of a unit, by the rules and from what was told."""

    heard: float = float("-inf")
    failed_before: int | None = None  # reads from this number on left after it had failed
    down: bool = False
    probe: int | None = None  # the read that is out to find it back
    rested: float = 0.0  # when it went down, or its last probe ended


class Reads(RuleBasedStateMachine):
    @initialize(
        max_keys=st.sampled_from((1, 3, 12, 12)),
        max_tokens=st.sampled_from((3, 8, 1000, 1000)),
        max_bytes=st.sampled_from((5, 14, 1000, 1000)),
        in_flight=st.integers(1, 3),
        waiting=st.sampled_from((1, 4, UNBOUNDED, UNBOUNDED)),
        window=st.sampled_from((0.0, 0.2)),
        cache=st.sampled_from((0, 5, 1000)),
    )
    def start(
        self, max_keys: int, max_tokens: int, max_bytes: int, in_flight: int, waiting: int, window: float, cache: int
    ) -> None:
        self.config = CoalescerConfig(
            max_keys, max_tokens, max_bytes, in_flight, waiting, window, probe_after_s=PROBE_S, cache_bytes=cache
        )
        self.policy = Coalescing(self.config)
        self.now = 0.0
        self.timer: float | None = None
        self.asked: dict[int, tuple[Source, tuple[str, ...]]] = {}
        self.answers: dict[int, Answer] = {}
        self.left: set[int] = set()
        self.reads: dict[int, Read] = {}
        self.got: set[tuple[int, Name]] = set()  # what callers have been given, when all are admitted at once
        self.doomed: set[Name] = set()  # what fails in this event
        self.times_read: Counter[Name] = Counter()  # until it is told, or nobody wants it
        self.units = {unit: Unit() for unit in UNITS}
        self.complete = 0
        self.last_number = -1
        self.may_wait = 0
        self.closed = False

    # What happens

    @precondition(lambda self: not self.closed)
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=12), source=st.sampled_from(SOURCES))
    def ask(self, keys: list[str], source: Source) -> None:
        caller = len(self.asked)
        self.asked[caller] = source, tuple(keys)
        self.tell(Wanted(caller, source, tuple(map(wish, keys)), self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(sorted(self.asked)))
        if caller not in self.answers:
            self.left.add(caller)
            self.lose_count(caller)
        self.tell(Left(caller, self.now))

    @precondition(lambda self: any(not read.placed for read in self.reads.values()))
    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        self.place_read(data.draw(st.sampled_from([n for n, read in self.reads.items() if not read.placed])))

    @precondition(lambda self: any(read.asked for read in self.reads.values()))
    @rule(data=st.data(), fails=st.booleans(), bad=st.sets(st.sampled_from(KEYS), max_size=2))
    def unit_ends(self, data: st.DataObject, fails: bool, bad: set[str]) -> None:
        """A unit answers its part of a read, or does not."""
        number, unit = data.draw(
            st.sampled_from([(n, u) for n, read in self.reads.items() for u in sorted(read.asked)])
        )
        keys = [key for key in self.reads[number].left if PLACE.get(key) == unit]
        errors: dict[str, RegraftError]
        if fails:
            errors = {key: Unreachable(f"unit {unit} is gone", key=key) for key in keys}
        else:
            errors = {key: KeyCorrupt("rot", key=key) for key in keys if key in bad}
        self.told(number, keys, errors, ended=False)

    @rule(unit=st.sampled_from(UNITS), fails=st.booleans())
    def unit_catches_up(self, unit: str, fails: bool) -> None:
        """All reads that the unit owes end there at one moment: well, or because it has crashed."""
        for number in list(self.reads):
            if number in self.reads and not self.reads[number].placed:
                self.place_read(number)
            if number in self.reads and unit in self.reads[number].asked:
                keys = [key for key in self.reads[number].left if PLACE.get(key) == unit]
                errors = {key: Unreachable(f"unit {unit} is gone", key=key) for key in keys if fails}
                self.told(number, keys, errors, ended=False)

    @precondition(lambda self: any(read.placed and not read.asked for read in self.reads.values()))
    @rule(data=st.data(), forgotten=st.booleans())
    def end(self, data: st.DataObject, forgotten: bool) -> None:
        """All units have answered: what is left is not in the plane, or lies where the read was not to ask."""
        number = data.draw(st.sampled_from([n for n, read in self.reads.items() if read.placed and not read.asked]))
        left = self.reads[number].left
        errors: dict[str, RegraftError] = {
            key: Unreachable("not asked", key=key) if key in PLACE else KeyMissing("never written", key=key)
            for key in left
            if key in PLACE or not forgotten
        }
        self.told(number, [], errors, ended=True)

    @precondition(lambda self: any(not read.placed for read in self.reads.values()))
    @rule(data=st.data(), bad=st.sets(st.sampled_from(KEYS), max_size=2))
    def end_at_once(self, data: st.DataObject, bad: set[str]) -> None:
        """A plane that does not tell where the keys are, nor their rows before all are there."""
        numbers = [n for n, read in self.reads.items() if not read.placed and not read.get.avoid]
        if numbers:
            number = data.draw(st.sampled_from(numbers))
            keys = self.reads[number].left
            self.told(number, keys, {key: KeyCorrupt("rot", key=key) for key in keys if key in bad}, ended=True)

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), late=st.booleans(), all_of_them=st.booleans())
    def fail(self, data: st.DataObject, late: bool, all_of_them: bool) -> None:
        """Reads fail as a whole, or what is left of them."""
        numbers = sorted(self.reads)
        for number in numbers if all_of_them else [data.draw(st.sampled_from(numbers))]:
            self.fail_read(number, late)

    def fail_read(self, number: int, late: bool) -> None:
        read = self.reads.pop(number)
        error = RequestTimeout("too late") if late else RemoteError("a bug")
        keys = [key for key in read.left if not (read.placed and PLACE.get(key) in read.get.avoid)]
        if read.probe is not None:
            self.probe_ended(number, read, back=False)
        elif late:
            for unit in {PLACE[key] for key in keys if key in PLACE and read.placed}:
                self.unit_failed(unit, number)
        self.lost(read, keys)
        self.tell(GetFailed(number, error, self.now), dict.fromkeys(keys, error))

    @rule(seconds=st.sampled_from((0.0, 0.01, 0.1, 1.0, 1.0, 5.0)))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while self.timer is not None and self.timer <= until:
            self.now, self.timer = max(self.now, self.timer), None
            self.tell(TimerFired(self.now))
            if self.timer == self.now:
                break
        self.now = until

    @rule()
    def stale_timer(self) -> None:
        self.tell(TimerFired(self.now))

    @precondition(lambda self: len(self.asked) > 6)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.tell(Closed(self.now))
        assert set(self.asked) == set(self.answers) | self.left

    # How the policy hears of it

    def place_read(self, number: int) -> None:
        read = self.reads[number]
        read.placed = True
        units = {key: PLACE[key] for key in read.left if key in PLACE}
        read.asked = set(units.values()) - read.get.avoid
        for key, unit in units.items():
            if unit in read.get.avoid:
                self.times_read[Name(read.source, key)] -= 1
        self.tell(GetPlaced(number, units, self.now))

    def told(self, number: int, keys: Iterable[str], errors: Mapping[str, RegraftError], ended: bool) -> None:
        read = self.reads[number]
        rows = {key: row_of(Name(read.source, key)) for key in keys if key not in errors}
        heard = {PLACE[key] for key in (*rows, *errors) if PLACE.get(key) in read.asked}
        lost = [k for k, e in errors.items() if isinstance(e, Unreachable) and PLACE[k] in read.asked]
        if read.probe is not None:
            if rows or errors:
                self.probe_ended(number, read, back=len(lost) < len(rows) + len(errors))
        else:
            for unit in heard:
                if any(PLACE[key] == unit for key in lost):
                    self.unit_failed(unit, number)
                else:
                    self.units[unit] = Unit(heard=self.now)
            given = [k for k in (*rows, *errors) if k not in lost and PLACE.get(k) not in read.get.avoid]
            for name in [Name(read.source, key) for key in given]:
                self.times_read.pop(name, None)
                if name.key not in KEPT and self.config.max_waiting == UNBOUNDED:
                    self.got |= {(caller, name) for caller in self.waiting_for(name)}
            self.lost(read, lost)
        read.asked -= heard
        read.left = [key for key in read.left if key not in rows and key not in errors]
        read.complete = read.complete and not lost
        if not ended:
            self.tell(GetPart(number, rows, errors, self.now), errors)
            return
        del self.reads[number]
        self.complete += read.complete and read.probe is None
        self.tell(GetDone(number, rows, errors, self.now), {**errors, **{k: RemoteError("silence") for k in read.left}})

    def unit_failed(self, unit: str, number: int) -> None:
        state = self.units[unit]
        if state.failed_before is None:
            state.failed_before = self.last_number + 1
        elif number >= state.failed_before and not state.down:
            state.down, state.rested, state.probe = True, self.now, None

    def probe_ended(self, number: int, read: Read, back: bool) -> None:
        """Only the first answer counts, and only if the unit has not been well meanwhile."""
        state = self.units[read.probe or ""]
        if state.probe == number:
            state.probe, state.rested, state.down = None, self.now, not back
            state.failed_before = None if back else state.failed_before

    def lost(self, read: Read, keys: Iterable[str]) -> None:
        """Keys that a read did not bring, through no fault of theirs, fail at their second or only chance."""
        for name in [Name(read.source, key) for key in keys]:
            if len(read.get.keys) == 1 or self.times_read[name] >= 2:
                self.times_read.pop(name, None)
                if name.key not in KEPT and self.config.max_waiting == UNBOUNDED and read.probe is None:
                    self.doomed.add(name)

    def lose_count(self, caller: int) -> None:
        """Nobody knows from outside whether keys were dropped with this caller, so their reads count anew."""
        source, keys = self.asked[caller]
        for key in keys:
            self.times_read.pop(Name(source, key), None)

    def tell(self, event: Event, bad: Mapping[str, RegraftError] | None = None) -> None:
        for instruction in self.policy.handle(event):
            self.obey(instruction, bad or {})
        assert not any(self.waiting_for(name) for name in self.doomed), "a key that failed for good is still waited for"
        self.doomed = set()
        for name in [name for name in self.times_read if not self.wanted(name)]:
            del self.times_read[name]

    def wanted(self, name: Name) -> bool:
        return bool(self.waiting_for(name))

    def waiting_for(self, name: Name) -> list[int]:
        """Callers who have not been answered and, as far as is known, lack the row."""
        gone = {*self.answers, *self.left}
        return [
            caller
            for caller, (source, keys) in self.asked.items()
            if caller not in gone and source == name.source and name.key in keys and (caller, name) not in self.got
        ]

    # What must hold

    def obey(self, instruction: Instruction, bad: Mapping[str, RegraftError]) -> None:
        match instruction:
            case SetTimer(at):
                assert at >= self.now
                self.timer = at
            case StartGet():
                self.take_get(instruction)
            case Answer():
                self.take_answer(instruction, bad)

    def take_get(self, get: StartGet) -> None:
        assert not self.closed and get.number > self.last_number
        self.last_number = get.number
        assert get.keys and len(set(get.keys)) == len(get.keys)
        down = {unit for unit, state in self.units.items() if state.down}
        probed = down - get.avoid
        self.reads[get.number] = Read(get, self.now, list(get.keys), next(iter(probed), None))
        for unit in get.avoid - down:
            assert self.owed(unit) >= SILENT_READS, f"{unit} is avoided without a reason"
        if probed:
            self.take_probe(get, probed)
        else:
            self.take_read(get)

    def take_probe(self, get: StartGet, probed: set[str]) -> None:
        (unit,) = probed
        (key,) = get.keys
        assert PLACE[key] == unit and self.units[unit].probe is None
        assert self.now >= self.units[unit].rested + PROBE_S - 1e-9, "a unit that is down is asked too often"
        self.units[unit].probe = get.number

    def take_read(self, get: StartGet) -> None:
        assert len(get.keys) <= self.config.max_keys
        if len(get.keys) > 1:
            assert sum(map(tokens_of, get.keys)) <= self.config.max_tokens
            assert sum(2 * tokens_of(key) for key in get.keys) <= self.config.max_bytes
        reads = [read for read in self.reads.values() if read.probe is None]
        assert sum(not self.is_slow(read) for read in reads) <= self.config.max_in_flight
        for key in get.keys:
            name = Name(get.source, key)
            assert self.wanted(name), "a key is read that nobody wants"
            elsewhere = [r for r in reads if r.get is not get and r.source == get.source and key in r.left]
            assert all(r.placed and PLACE.get(key) in r.get.avoid for r in elsewhere), "a key in flight is read again"
            self.times_read[name] += 1
            assert self.times_read[name] <= 2, "a key was read more often than once and once again"
        if self.complete < KNOWN_READS:
            for unit in {*UNITS} - get.avoid:
                assert self.owed(unit, FIRST_SLOW_S) < SILENT_READS, f"{unit} is silent and asked for more"

    def owed(self, unit: str, seconds: float = 0.0) -> int:
        """Reads that the unit owes for ``seconds``, and has told nothing since they left."""
        return sum(
            unit in read.asked
            and read.probe is None
            and self.units[unit].heard <= read.started
            and read.started <= self.now - seconds
            for read in self.reads.values()
        )

    def is_slow(self, read: Read) -> bool:
        slow = FIRST_SLOW_S if self.complete < KNOWN_READS else PATIENCE_S
        return read.placed and read.started + slow <= self.now

    def take_answer(self, answer: Answer, bad: Mapping[str, RegraftError]) -> None:
        assert answer.caller not in self.answers and answer.caller not in self.left
        self.answers[answer.caller] = answer
        source, keys = self.asked[answer.caller]
        if answer.error is not None:
            self.lose_count(answer.caller)
        if answer.error is None:
            assert [row["name"] for row in answer.rows] == [Name(source, key) for key in keys]
        elif not self.closed:
            avoided = {key for key in keys if key in PLACE and self.units[PLACE[key]].down}
            if "was not asked" in answer.error.message:
                assert answer.error.details["key"] in avoided
            else:
                mine = [error for key, error in bad.items() if key in keys]
                assert type(answer.error) in {type(error) for error in mine}, "failed by a key that it did not ask for"
                assert answer.error.details.get("key", keys[0]) in keys

    @invariant()
    def within_bounds(self) -> None:
        if not hasattr(self, "policy"):
            return
        counts = self.policy.statistics()
        assert counts["in_flight"] == len(self.reads)
        assert counts["waiting"] <= max(self.config.max_waiting, self.may_wait)
        # Keys that were admitted before may come back to the queue: those of silent units, and of units to be avoided.
        avoiding = sum(len(read.left) for read in self.reads.values() if read.get.avoid)
        self.may_wait = counts["waiting"] + counts["held"] + avoiding

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """Whatever time alone is to set going has a timer: a queued key with a free slot, and a unit to be probed."""
        if not hasattr(self, "policy") or self.closed:
            return
        busy = sum(read.probe is None for read in self.reads.values())
        if self.policy.statistics()["waiting"] and busy < self.config.max_in_flight:
            assert self.timer is not None and self.timer <= self.now + max(PATIENCE_S, self.config.window_s) + 1e-9
        for state in self.units.values():
            if state.down and state.probe is None:
                assert self.timer is not None and self.timer <= state.rested + 8 * PROBE_S + 1e-9

    def teardown(self) -> None:
        """Whatever came before, once the plane works again everybody who still waits gets rows, and so do new ones."""
        if not hasattr(self, "policy"):
            return
        self.heal()
        assert set(self.asked) == set(self.answers) | self.left, "somebody was never answered"
        counts = self.policy.statistics()
        assert counts["waiting"] == counts["held"] == counts["in_flight"] == 0
        if self.closed:
            return
        self.time_passes(8 * PROBE_S)
        self.heal()
        self.ask(list(KEYS[:-1]), SOURCES[0])
        self.heal()
        assert self.answers[len(self.asked) - 1].error is None, "a unit that is back is not asked"

    def heal(self) -> None:
        for _ in range(300):
            for number in list(self.reads):
                if not self.reads[number].placed:
                    self.place_read(number)
                keys = [k for k in self.reads[number].left if PLACE.get(k) in self.reads[number].asked]
                errors: dict[str, RegraftError] = {
                    key: Unreachable("not asked", key=key) if key in PLACE else KeyMissing("never written", key=key)
                    for key in self.reads[number].left
                    if key not in keys
                }
                self.told(number, keys, errors, ended=True)
            if set(self.asked) == set(self.answers) | self.left and not self.reads:
                return
            if self.timer is not None:
                self.now = max(self.now, self.timer)
                self.timer = None
                self.tell(TimerFired(self.now))
