"""Coalescing as a state machine: design invariant 9 after every event, with a clock moved by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.coalescing import (
    PATIENCE_S,
    Answer,
    Closed,
    Coalescing,
    Event,
    GetDone,
    GetFailed,
    Instruction,
    Left,
    SetTimer,
    StartGet,
    TimerFired,
    Wanted,
)
from policies.config import CoalescerConfig
from policies.errors import ClosedError, KeyMissing, RegraftError, RemoteError, Unreachable

KEYS = [f"k{i}" for i in range(12)]


class Reads(RuleBasedStateMachine):
    @initialize(
        max_keys=st.integers(1, 6),
        in_flight=st.integers(1, 3),
        waiting=st.integers(1, 8),
        window=st.sampled_from((0.0, 0.2)),
    )
    def start(self, max_keys: int, in_flight: int, waiting: int, window: float) -> None:
        self.config = CoalescerConfig(max_keys=max_keys, max_in_flight=in_flight, max_waiting=waiting, window_s=window)
        self.policy = Coalescing(self.config)
        self.now = 0.0
        self.timer: float | None = None
        self.asked: dict[int, tuple[str, ...]] = {}
        self.answers: dict[int, Answer] = {}
        self.left: set[int] = set()
        self.gets: dict[int, tuple[str, ...]] = {}
        self.reads: dict[str, int] = {}  # of a key, until it is answered or nobody wants it
        self.to_retry: set[str] = set()
        self.second_tries: set[int] = set()
        self.closed = False

    @precondition(lambda self: not self.closed)
    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=12))
    def ask(self, keys: list[str]) -> None:
        caller = len(self.asked)
        self.asked[caller] = tuple(keys)
        self.tell(Wanted(caller, tuple(keys), self.now))

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        caller = data.draw(st.sampled_from(sorted(self.asked)))
        if caller not in self.answers:
            self.left.add(caller)
        self.tell(Left(caller, self.now))

    @precondition(lambda self: self.gets)
    @rule(data=st.data(), bad=st.sets(st.sampled_from(KEYS), max_size=3), forgotten=st.booleans())
    def come_back(self, data: st.DataObject, bad: set[str], forgotten: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.gets)))
        keys = self.gets.pop(number)
        errors: dict[str, RegraftError] = {} if forgotten else {key: KeyMissing(key) for key in keys if key in bad}
        rows = {key: f"row of {key}" for key in keys if key not in bad}
        self.forget(keys)
        self.tell(GetDone(number, rows, errors, self.now), bad={key: None for key in keys if key in bad})

    @precondition(lambda self: self.gets)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.gets)))
        keys = self.gets.pop(number)
        if len(keys) == 1 or number in self.second_tries:
            self.forget(keys)
        else:
            self.to_retry.update(keys)
        self.tell(GetFailed(number, Unreachable("down"), self.now), bad=dict.fromkeys(keys))

    @rule(seconds=st.sampled_from((0.0, 0.01, 0.1, 1.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.timer is not None and self.now >= self.timer:
            self.timer = None
            self.tell(TimerFired(self.now))

    @rule()
    def stale_timer(self) -> None:
        self.tell(TimerFired(self.now))

    @precondition(lambda self: len(self.asked) > 5)
    @rule()
    def close(self) -> None:
        self.closed = True
        self.tell(Closed(self.now))
        assert set(self.asked) == set(self.answers) | self.left

    def tell(self, event: Event, bad: dict[str, None] | None = None) -> None:
        for instruction in self.policy.handle(event):
            self.obey(instruction, bad or {})
        self.reads = {key: count for key, count in self.reads.items() if self.wanted(key)}

    def forget(self, keys: tuple[str, ...]) -> None:
        self.reads = {key: count for key, count in self.reads.items() if key not in keys}

    def wanted(self, key: str) -> bool:
        return any(key in keys for caller, keys in self.asked.items() if caller not in {*self.answers, *self.left})

    def obey(self, instruction: Instruction, bad: dict[str, None]) -> None:
        if isinstance(instruction, SetTimer):
            assert instruction.at >= self.now
            self.timer = instruction.at
        elif isinstance(instruction, StartGet):
            assert not self.closed
            assert 1 <= len(instruction.keys) <= self.config.max_keys
            busy = {key for keys in self.gets.values() for key in keys}
            assert not busy & set(instruction.keys) and len(set(instruction.keys)) == len(instruction.keys)
            self.gets[instruction.number] = instruction.keys
            if self.to_retry & set(instruction.keys):
                self.second_tries.add(instruction.number)
                self.to_retry.difference_update(instruction.keys)
            assert len(self.gets) <= self.config.max_in_flight
            for key in instruction.keys:
                assert self.wanted(key)
                self.reads[key] = self.reads.get(key, 0) + 1
                assert self.reads[key] <= 2, "a key was read more often than once and once again"
        else:
            self.take_answer(instruction, bad)

    def take_answer(self, answer: Answer, bad: dict[str, None]) -> None:
        assert answer.caller not in self.answers and answer.caller not in self.left
        self.answers[answer.caller] = answer
        keys = self.asked[answer.caller]
        if answer.error is None:
            assert answer.rows == tuple(f"row of {key}" for key in keys)
        elif not self.closed:
            assert set(bad) & set(keys), "a caller was failed by a key that it did not ask for"

    @invariant()
    def within_bounds(self) -> None:
        if hasattr(self, "policy"):
            counts = self.policy.statistics()
            assert counts["waiting"] <= self.config.max_waiting
            assert counts["in_flight"] == len(self.gets)

    def teardown(self) -> None:
        """Whatever came before, once the plane works again everybody who still waits gets its rows."""
        if not hasattr(self, "policy"):
            return
        for _ in range(200):
            if self.timer is not None:
                self.now = max(self.now, self.timer)
                self.timer = None
                self.tell(TimerFired(self.now))
            for number in list(self.gets):
                keys = self.gets.pop(number)
                self.forget(keys)
                self.tell(GetDone(number, {key: f"row of {key}" for key in keys}, {}, self.now))
            if set(self.asked) == set(self.answers) | self.left:
                break
        assert set(self.asked) == set(self.answers) | self.left, "somebody was never answered"
        assert self.policy.statistics()["waiting"] == 0


TestReads = Reads.TestCase
TestReads.settings = settings(max_examples=150, stateful_step_count=40)


@dataclass
class Driver:
    """Feeds the policy and keeps what it says."""

    config: CoalescerConfig = field(default_factory=CoalescerConfig)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.policy = Coalescing(self.config)
        self.callers = 0
        self.started: list[StartGet] = []
        self.answers: dict[int, Any] = {}
        self.timer: float | None = None

    def want(self, *keys: str) -> int:
        self.callers += 1
        self.tell(Wanted(self.callers, keys, self.now))
        return self.callers

    def turn(self) -> None:
        """The next turn of the event loop at this time."""
        if self.timer is not None and self.timer <= self.now:
            self.timer = None
            self.tell(TimerFired(self.now))

    def tell(self, event: Event) -> None:
        for instruction in self.policy.handle(event):
            match instruction:
                case StartGet():
                    self.started.append(instruction)
                case Answer(caller, rows, error):
                    self.answers[caller] = rows if error is None else error
                case SetTimer(at):
                    self.timer = at

    def serve(self, index: int = -1) -> None:
        get = self.started[index]
        self.tell(GetDone(get.number, {key: key.upper() for key in get.keys}, {}, self.now))

    def lose(self, index: int = -1) -> None:
        self.tell(GetFailed(self.started[index].number, Unreachable("down"), self.now))

    @property
    def sent(self) -> list[tuple[str, ...]]:
        return [get.keys for get in self.started]


def test_all_that_ask_in_one_turn_ride_together() -> None:
    driver = Driver()
    driver.want("a", "b")
    driver.want("b", "c")
    assert driver.sent == []
    driver.turn()
    assert driver.sent == [("a", "b", "c")]
    driver.serve()
    assert driver.answers == {1: ("A", "B"), 2: ("B", "C")}


def test_what_arrives_during_a_read_leaves_when_it_ends() -> None:
    driver = Driver()
    driver.want("a")
    driver.turn()
    for key in "bcd":
        driver.want(key)
        driver.turn()
    assert driver.sent == [("a",)]
    driver.serve()
    assert driver.sent == [("a",), ("b", "c", "d")]


def test_a_key_in_flight_is_shared() -> None:
    driver = Driver()
    driver.want("a")
    driver.turn()
    driver.want("a")
    driver.turn()
    driver.serve()
    assert driver.sent == [("a",)] and driver.answers == {1: ("A",), 2: ("A",)}


def test_a_read_that_hangs_holds_up_others_for_the_patience_only() -> None:
    driver = Driver()
    driver.want("hangs")
    driver.turn()
    driver.want("a")
    driver.now = PATIENCE_S
    driver.turn()
    assert driver.sent == [("hangs",), ("a",)]
    driver.want("b")
    driver.serve()
    assert driver.sent[2:] == [("b",)]


def test_a_whole_get_takes_a_further_slot_at_once() -> None:
    driver = Driver(CoalescerConfig(max_keys=2))
    driver.want("a")
    driver.turn()
    driver.want("b", "c", "d")
    assert driver.sent == [("a",), ("b", "c")]


def test_a_window_gathers_before_the_first_read_leaves() -> None:
    driver = Driver(CoalescerConfig(window_s=0.5))
    driver.want("a")
    driver.turn()
    driver.now = 0.4
    driver.want("b")
    driver.turn()
    assert driver.sent == []
    driver.now = 0.5
    driver.turn()
    assert driver.sent == [("a", "b")]


def test_a_chain_longer_than_the_queue_comes_through() -> None:
    driver = Driver(CoalescerConfig(max_keys=2, max_in_flight=1, max_waiting=3))
    keys = tuple(f"k{i}" for i in range(10))
    driver.want(*keys)
    driver.want("other")
    driver.turn()
    while 2 not in driver.answers:
        driver.serve()
    assert driver.answers == {1: tuple(key.upper() for key in keys), 2: ("OTHER",)}
    assert all(len(sent) <= 2 for sent in driver.sent)


@pytest.mark.parametrize(("count", "again"), [(3, [1, 1, 1]), (4, [1, 1, 1, 1]), (5, [2, 3]), (9, [4, 5])])
def test_a_read_that_fails_whole_is_tried_once_more(count: int, again: list[int]) -> None:
    driver = Driver(CoalescerConfig(max_in_flight=10))
    for index in range(count):
        driver.want(f"k{index}")
    driver.turn()
    driver.lose()
    assert [len(keys) for keys in driver.sent[1:]] == again
    driver.lose(1)
    for index in range(2, len(driver.started)):
        driver.serve(index)
    failed = [caller for caller, answer in driver.answers.items() if isinstance(answer, Unreachable)]
    assert len(driver.answers) == count and len(failed) == again[0]
    assert len(driver.sent) == 1 + len(again), "an outage costs a bounded number of reads"


def test_a_single_key_that_fails_whole_fails() -> None:
    driver = Driver()
    driver.want("a")
    driver.turn()
    driver.lose()
    assert isinstance(driver.answers[1], Unreachable) and len(driver.sent) == 1


def test_keys_that_nobody_wants_any_more_are_not_read_again() -> None:
    driver = Driver()
    driver.want("a", "b")
    driver.want("c")
    driver.turn()
    driver.tell(Left(1, 0.0))
    driver.lose()
    assert driver.sent[1:] == [("c",)]


def test_a_queued_key_that_nobody_wants_is_dropped_and_can_be_asked_for_again() -> None:
    driver = Driver()
    driver.want("a")
    driver.tell(Left(1, 0.0))
    driver.turn()
    assert driver.sent == [] and driver.policy.statistics()["dropped"] == 1
    driver.want("a")
    driver.turn()
    driver.serve()
    assert driver.answers == {2: ("A",)}


def test_after_all_have_left_during_the_flight_a_new_caller_rides_on_it() -> None:
    driver = Driver()
    driver.want("a")
    driver.turn()
    driver.tell(Left(1, 0.0))
    driver.want("a")
    driver.serve()
    assert driver.answers == {2: ("A",)} and driver.sent == [("a",)]


def test_a_key_the_answer_is_silent_about_fails() -> None:
    driver = Driver()
    driver.want("a", "b")
    driver.want("b")
    driver.turn()
    driver.tell(GetDone(driver.started[0].number, {"b": "B"}, {}, 0.0))
    assert isinstance(driver.answers[1], RemoteError) and driver.answers[2] == ("B",)


def test_closing_answers_everybody_and_later_callers() -> None:
    driver = Driver(CoalescerConfig(max_waiting=1))
    driver.want("a", "b", "c")
    driver.turn()
    driver.want("d")
    driver.tell(Closed(0.0))
    driver.want("e")
    assert [type(driver.answers[caller]) for caller in (1, 2, 3)] == [ClosedError] * 3
    driver.serve()
    assert len(driver.sent) == 1
