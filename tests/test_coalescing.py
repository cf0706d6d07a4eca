"""Coalescing: design invariant 9 after every event of a world that misbehaves, and its rules one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from policies.coalescing import FIRST_SLOW_S, KNOWN_READS, PATIENCE_S, Coalescing
from policies.coalescing_events import (
    Answer,
    Closed,
    Event,
    GetDone,
    GetFailed,
    GetPart,
    GetPlaced,
    Left,
    SetTimer,
    Source,
    StartGet,
    TimerFired,
    Wanted,
    Wish,
)
from policies.config import CoalescerConfig
from policies.errors import ClosedError, KeyMissing, RemoteError, RequestTimeout, Unreachable
from policies.unit_watch import LONGEST_PROBE_INTERVALS
from tests.coalescing_machine import Reads

CHUNKS, ROWS = Source("staging", ("ids",)), Source("train", ("ids",))

TestReads = Reads.TestCase
TestReads.settings = settings(max_examples=250, stateful_step_count=50)


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

    def want(self, *keys: str | Wish, source: Source = CHUNKS) -> int:
        self.callers += 1
        wishes = tuple([Wish(key) if isinstance(key, str) else key for key in keys])
        self.tell(Wanted(self.callers, source, wishes, self.now))
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
                    self.answers[caller] = tuple([row["ids"] for row in rows]) if error is None else error
                case SetTimer(at):
                    self.timer = at

    def serve(self, index: int = -1) -> None:
        get = self.started[index]
        self.tell(GetDone(get.number, rows(*get.keys), {}, self.now))

    def lose(self, index: int = -1) -> None:
        self.tell(GetFailed(self.started[index].number, Unreachable("down"), self.now))

    def place(self, index: int = -1, **units: str) -> None:
        """The keys are placed on these units; those that are not named here are on ``u0``."""
        get = self.started[index]
        self.tell(GetPlaced(get.number, {key: units.get(key, "u0") for key in get.keys}, self.now))

    def lose_unit(self, index: int = -1, unit: str = "u0") -> None:
        """All keys of the read fail with the unit, and the read ends."""
        get = self.started[index]
        self.tell(GetDone(get.number, {}, {key: Unreachable(f"unit {unit}", key=key) for key in get.keys}, self.now))

    def take_down(self) -> None:
        """Unit u0 goes down: a read of ``x`` fails, and so does the next one."""
        for _ in range(2):
            self.want("x")
            self.now += PATIENCE_S
            self.turn()
            self.place()
            self.lose_unit()

    @property
    def sent(self) -> list[tuple[str, ...]]:
        return [get.keys for get in self.started]

    def count(self, name: str) -> Any:
        return self.policy.statistics()[name]


def rows(*keys: str) -> dict[str, dict[str, Any]]:
    return {key: {"ids": key.upper()} for key in keys}


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
    assert driver.sent == [] and driver.count("dropped") == 1
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
    driver.tell(GetDone(driver.started[0].number, rows("b"), {}, 0.0))
    assert isinstance(driver.answers[1], RemoteError) and driver.answers[2] == ("B",)


def test_closing_answers_everybody_and_later_callers() -> None:
    driver = Driver(CoalescerConfig(max_waiting=1))
    driver.want("a", "b", "c")
    driver.turn()
    driver.want("d")
    driver.tell(Closed(0.0))
    driver.want("e")
    assert [type(driver.answers[caller]) for caller in (1, 2, 3)] == [ClosedError] * 3
    sent = len(driver.sent)
    driver.serve()
    assert len(driver.sent) == sent


def test_reads_keep_to_tokens_and_bytes_and_a_row_over_the_limit_is_read_alone() -> None:
    driver = Driver(CoalescerConfig(max_tokens=10, max_bytes=100, max_in_flight=9))
    driver.want(
        Wish("a", 4, 40), Wish("b", 4, 40), Wish("c", 4, 40), Wish("big", 11, 40), Wish("d", 1, 101), Wish("e", 1)
    )
    driver.now = PATIENCE_S
    driver.turn()
    assert driver.sent == [("a", "b"), ("c",), ("big",), ("d",), ("e",)]


def test_what_is_read_teaches_how_large_rows_are() -> None:
    """Ten rows of 50 MB of which nothing is known: the first tells, and then no read is larger than its limit."""
    driver = Driver(CoalescerConfig(max_bytes=200_000_000, max_in_flight=1))
    large = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (50_000_000,), (0,))
    driver.want("first")
    driver.want(*(f"k{n}" for n in range(10)))
    driver.tell(TimerFired(0.0))
    assert driver.sent == [("first", *(f"k{n}" for n in range(10)))], "nothing is known yet"
    get = driver.started[0]
    driver.tell(GetDone(get.number, {key: {"ids": large} for key in get.keys}, {}, 0.0))
    driver.want(*(f"l{n}" for n in range(10)))
    driver.turn()
    for _ in range(2):
        driver.serve()
    assert [len(keys) for keys in driver.sent[1:]] == [4, 4, 2]


def test_a_known_row_with_more_beside_its_tokens_is_measured_by_those_read_before() -> None:
    driver = Driver(CoalescerConfig(max_bytes=1000, max_in_flight=1))
    driver.want(Wish("a", tokens=10, nbytes=120))
    driver.turn()
    driver.tell(GetDone(0, {"a": {"ids": b"i" * 120, "routes": b"r" * 380}}, {}, 0.0))
    driver.want(*(Wish(key, tokens=10, nbytes=120) for key in "bcd"))
    driver.turn()
    assert driver.sent[1:] == [("b", "c")]


def test_rows_of_two_sources_are_not_read_together_nor_taken_for_each_other() -> None:
    driver = Driver()
    driver.want("a", "b")
    driver.want("a", source=ROWS)
    driver.turn()
    assert [(get.source, get.keys) for get in driver.started] == [(CHUNKS, ("a", "b")), (ROWS, ("a",))]


def test_a_unit_s_rows_are_handed_out_when_they_come() -> None:
    driver = Driver()
    driver.want("a")
    driver.want("b")
    driver.turn()
    driver.place(b="u1")
    driver.tell(GetPart(0, rows("b"), {}, 0.0))
    assert driver.answers == {2: ("B",)}
    driver.want("b")
    driver.now = PATIENCE_S
    driver.turn()
    assert driver.sent == [("a", "b"), ("b",)], "the row was told; who wants it now has it read again"


def test_a_unit_that_fails_costs_its_own_keys_one_more_try() -> None:
    driver = Driver()
    for key in "abc":
        driver.want(key)
    driver.turn()
    driver.place(c="u1")
    driver.tell(GetPart(0, rows("c"), {}, 0.0))
    driver.tell(GetDone(0, {}, {key: Unreachable("u0", key=key) for key in "ab"}, 0.0))
    assert driver.answers == {3: ("C",)} and driver.sent == [("a", "b", "c"), ("a",), ("b",)]
    driver.serve(1)
    driver.serve(2)
    assert driver.answers == {1: ("A",), 2: ("B",), 3: ("C",)}
    assert driver.count("failed_gets") == 1 and driver.count("retried_keys") == 2


def test_two_reads_that_fail_at_one_moment_do_not_take_a_unit_down() -> None:
    """The second left before the first failed, so it says nothing new: both are tried again."""
    driver = Driver(CoalescerConfig(max_keys=2))
    driver.want("a", "b", "c", "d")
    for index in range(2):
        driver.place(index)
    driver.lose_unit(0)
    driver.lose_unit(1)
    assert driver.sent[2:] == [("a",), ("b",)] and not driver.answers
    for index in range(2, 6):
        driver.serve(index)
    assert driver.answers == {1: ("A", "B", "C", "D")}


def test_a_unit_that_is_down_is_not_asked_and_its_keys_fail_at_once() -> None:
    driver = Driver()
    driver.take_down()
    caller = driver.want("a")
    other = driver.want("b")
    driver.turn()
    assert driver.started[-1].avoid == {"u0"}
    driver.place(b="u1")
    error = driver.answers[caller]
    assert isinstance(error, Unreachable) and error.details == {"key": "a", "unit": "u0"}
    driver.tell(GetDone(2, rows("b"), {"a": Unreachable("not asked", key="a")}, driver.now))
    assert driver.answers[other] == ("B",)
    assert driver.count("unit_gets") == {"u0": 2, "u1": 1}


def test_an_answer_makes_up_for_a_failure() -> None:
    driver = Driver()
    for serve in (False, True, False):
        driver.want("x")
        driver.now += PATIENCE_S
        driver.turn()
        driver.place()
        if serve:
            driver.serve()
        else:
            driver.lose_unit()
    driver.want("a")
    driver.turn()
    assert driver.started[-1].avoid == frozenset()


def test_what_was_to_be_tried_again_fails_when_its_unit_goes_down() -> None:
    driver = Driver(CoalescerConfig(max_in_flight=1))
    for index in range(9):
        driver.want(f"k{index}")
    driver.turn()
    driver.place()
    driver.lose_unit()
    driver.place()
    driver.lose_unit()
    assert len(driver.sent) == 2, "the second half was not sent any more"
    assert [type(driver.answers[caller]) for caller in range(1, 10)] == [Unreachable] * 9


def test_a_unit_that_is_down_is_probed_with_one_row_ever_more_rarely_and_asked_again_when_it_is_back() -> None:
    config = CoalescerConfig(probe_after_s=1.0)
    driver = Driver(config)
    driver.take_down()
    probed = []
    for _ in range(6):
        assert driver.timer is not None
        driver.now = driver.timer
        driver.turn()
        assert driver.sent[-1] == ("x",) and driver.started[-1].avoid == frozenset()
        probed.append(driver.now)
        driver.place()
        driver.lose_unit()
    assert np.diff(probed).round(6).tolist() == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert LONGEST_PROBE_INTERVALS == 8 and driver.count("probes") == 6
    driver.now = driver.timer or 0.0
    driver.turn()
    driver.place()
    driver.serve()
    driver.want("a")
    driver.turn()
    assert driver.sent[-1] == ("a",) and driver.started[-1].avoid == frozenset()


@pytest.mark.parametrize("answer", [{"x": KeyMissing("cleared", key="x")}, {}])
def test_a_probe_of_a_row_that_is_gone_lets_the_next_read_try_the_unit(answer: dict[str, KeyMissing]) -> None:
    driver = Driver()
    driver.take_down()
    driver.now += 1.0
    driver.turn()
    driver.tell(GetDone(2, {}, answer, driver.now))
    driver.want("a")
    driver.turn()
    assert (driver.started[-1].avoid == frozenset()) == bool(answer)


def silent(driver: Driver) -> None:
    """Two reads are out to u0 and it says nothing."""
    for key in "ab":
        driver.want(key)
        driver.now += PATIENCE_S
        driver.turn()
        driver.place()
    driver.now += FIRST_SLOW_S
    driver.turn()


def test_the_keys_of_a_silent_unit_wait_and_all_others_go_on() -> None:
    driver = Driver()
    silent(driver)
    late = driver.want("late")
    other = driver.want("other")
    driver.turn()
    assert driver.sent[2:] == [("late", "other")] and driver.started[-1].avoid == {"u0"}, "slow reads hold no slot"
    driver.place(other="u1")
    driver.tell(GetDone(2, rows("other"), {"late": Unreachable("not asked", key="late")}, driver.now))
    assert driver.answers == {other: ("OTHER",)} and driver.count("held") == 1
    driver.serve(0)
    assert driver.sent[3:] == [("late",)] and driver.started[-1].avoid == frozenset()
    driver.serve()
    assert driver.answers[late] == ("LATE",)


def test_one_read_that_a_unit_never_answers_makes_it_wait_for_nobody() -> None:
    driver = Driver()
    driver.want("hangs")
    driver.turn()
    driver.place()
    driver.now = 5 * FIRST_SLOW_S
    for key in "abc":
        caller = driver.want(key)
        driver.turn()
        driver.place()
        driver.serve()
        assert driver.answers[caller] == (key.upper(),)


def test_the_keys_of_a_silent_unit_that_goes_down_fail() -> None:
    driver = Driver()
    silent(driver)
    late = driver.want("late")
    driver.turn()
    driver.place()
    for index in range(2):
        driver.lose_unit(index)
    driver.tell(GetDone(2, {}, {}, driver.now))
    assert driver.sent[3:] == [("late",)], "both left before the first failed; the next read decides"
    driver.place()
    driver.lose_unit()
    assert isinstance(driver.answers[late], Unreachable) and len(driver.answers) == 3


def test_who_leaves_while_a_silent_unit_keeps_his_key_is_forgotten() -> None:
    driver = Driver()
    silent(driver)
    late = driver.want("late")
    driver.turn()
    driver.place()
    driver.tell(Left(late, driver.now))
    assert driver.count("held") == 0 and driver.count("dropped") == 1


def test_reads_are_slow_when_they_take_longer_than_reads_take() -> None:
    driver = Driver()
    for _ in range(KNOWN_READS):
        driver.want("a")
        driver.turn()
        driver.place()
        driver.serve()
    for key in "bc":
        driver.want(key)
        driver.now += PATIENCE_S
        driver.turn()
        driver.place()
    driver.want("d")
    driver.now += PATIENCE_S
    driver.turn()
    assert driver.sent[-1] == ("d",) and driver.started[-1].avoid == {"u0"}


def test_the_head_that_siblings_share_is_read_once() -> None:
    driver = Driver()
    for sibling in "bc":
        driver.want(Wish("head", again=True), Wish(sibling))
        driver.turn()
        driver.serve()
    assert driver.sent == [("head", "b"), ("c",)]
    assert driver.answers == {1: ("HEAD", "B"), 2: ("HEAD", "C")} and driver.count("cached") == 1


def test_waits_and_services_are_measured() -> None:
    driver = Driver(CoalescerConfig(window_s=0.5))
    driver.want("a", "b")
    driver.now = 0.5
    driver.turn()
    driver.now = 0.75
    driver.serve()
    assert (driver.count("wait_s")["count"], driver.count("wait_s")["total_s"]) == (2, 1.0)
    assert (driver.count("service_s")["count"], driver.count("service_s")["total_s"]) == (1, 0.25)


def test_a_late_answer_makes_a_unit_well_again() -> None:
    driver = Driver(CoalescerConfig(max_in_flight=3))
    driver.want("slow")
    driver.turn()
    driver.place()
    driver.take_down()
    assert driver.count("unit_gets") == {"u0": 3}
    driver.serve(0)
    driver.want("a")
    driver.turn()
    assert driver.started[-1].avoid == frozenset()
    driver.tell(GetFailed(driver.started[-1].number, RequestTimeout("late"), driver.now))
