"""What is cleared in the background, against a plane whose clears fail and whose puts are published late or never."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cleanup import (
    Cleanup,
    CleanupLimits,
    ClearDone,
    ClearFailed,
    Closing,
    Discard,
    Event,
    Fence,
    FenceMoved,
    SetTimer,
    StartClear,
    TimerFired,
    Unneed,
)
from policies.errors import Refused

LIMITS = CleanupLimits(batch_keys=3, capacity_keys=5, attempts=3, retry_after_s=1.0, looks_after_s=(1.0, 2.0, 4.0))
HORIZON = sum(LIMITS.looks_after_s)


class Plane:
    """Rows that appear at their time; clears fail as scripted. Runs a cleanup until nothing is left to be done."""

    def __init__(self, published: dict[str, float], fails: list[bool] | None = None) -> None:
        self.cleanup = Cleanup(LIMITS)
        self.published = dict(published)  # key → when it appears, infinite for never; it is gone when cleared
        self.fails = list(fails or [])
        self.clears: list[tuple[float, tuple[str, ...]]] = []
        self.now = 0.0

    def rows(self) -> set[str]:
        return {key for key, at in self.published.items() if at <= self.now}

    def run(self, event: Event, until: float = math.inf) -> None:
        queue: list[Event] = [event]
        while queue:
            for instruction in self.cleanup.handle(queue.pop(0)):
                if isinstance(instruction, StartClear):
                    queue.append(self._clear(instruction.keys))
                elif instruction.at <= until:
                    self.now = max(self.now, instruction.at)
                    queue.append(TimerFired(self.now))

    def _clear(self, keys: tuple[str, ...]) -> Event:
        self.clears.append((self.now, keys))
        if self.fails and self.fails.pop(0):
            return ClearFailed("the controller did not answer", self.now)
        gone = self.rows() & set(keys)
        for key in gone:
            del self.published[key]
        return ClearDone(len(gone), self.now)


@given(
    st.lists(st.one_of(st.just(math.inf), st.floats(0.0, HORIZON)), min_size=1, max_size=6),
    st.lists(st.booleans(), max_size=2),
)
def test_a_put_in_doubt_leaves_no_row_whenever_it_is_published(times: list[float], fails: list[bool]) -> None:
    """Each PUT is published before, between or after its clears, or never; after the looks nothing of it is there."""
    plane = Plane({f"k{i}_{j}": at for i, at in enumerate(times) for j in range(2)}, fails)
    for number in range(len(times)):
        plane.run(Discard((f"k{number}_0", f"k{number}_1"), True, 0.0), until=0.0)
    plane.run(TimerFired(0.0))
    assert plane.now >= HORIZON or plane.published == {}
    assert plane.rows() == set()
    counts = plane.cleanup.statistics()
    assert counts["cleanup_in_doubt"] == 0 == counts["cleanup_given_up"]
    assert counts["cleanup_unseen"] == 2 * times.count(math.inf)
    assert counts["cleanup_cleared"] == 2 * (len(times) - times.count(math.inf))


def test_a_put_that_was_seen_is_looked_for_no_more() -> None:
    plane = Plane({"a": 1.5})
    plane.run(Discard(("a",), True, 0.0))
    assert [at for at, _ in plane.clears] == [1.0, 3.0]


def test_a_clear_that_fails_is_no_look() -> None:
    """The unit cannot publish to a controller that nobody reaches; it does so afterwards."""
    plane = Plane({"a": 9.5}, fails=[False, False, True, True])
    plane.run(Discard(("a",), True, 0.0))
    assert [at for at, _ in plane.clears] == [1.0, 3.0, 7.0, 8.0, 10.0] and plane.published == {}


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=8), st.lists(st.booleans(), max_size=12))
def test_every_certain_key_is_cleared_or_given_up_and_counted(parts: list[tuple[int, bool]], fails: list[bool]) -> None:
    keys = [[f"k{i}_{j}" for j in range(size)] for i, (size, _) in enumerate(parts)]
    plane = Plane({key: 0.0 for part in keys for key in part}, fails)
    for part, (_, discarded) in zip(keys, parts, strict=True):
        if part:
            plane.run(Discard(tuple(part), False, 0.0) if discarded else Unneed(tuple(part), 0.0))
    counts = plane.cleanup.statistics()
    assert plane.cleanup.drained and counts["cleanup_waiting"] == 0
    assert counts["cleanup_cleared"] + counts["cleanup_given_up"] == sum(map(len, keys))
    assert len(plane.published) == counts["cleanup_given_up"]
    failure = plane.cleanup.take_failure()
    assert (failure is not None) == (counts["cleanup_given_up"] > 0) and plane.cleanup.take_failure() is None


def test_a_clear_that_keeps_failing_is_tried_ever_later_and_given_up() -> None:
    plane = Plane({"a": 0.0}, fails=[True] * 9)
    plane.run(Unneed(("a",), 0.0))
    assert [at for at, _ in plane.clears] == [0.0, 1.0, 3.0]
    failure = plane.cleanup.take_failure()
    assert failure is not None and "1 rows" in failure and "did not answer" in failure


def test_unneeded_chunks_go_in_batches_and_discarded_rows_by_put() -> None:
    plane = Plane({})
    plane.run(Unneed(tuple("abcdefg"), 0.0))
    plane.run(Discard(("x", "y"), False, 0.0))
    plane.run(Discard(("z",), False, 0.0))
    assert [keys for _, keys in plane.clears] == [tuple("abc"), tuple("def"), ("g",), ("x", "y"), ("z",)]


@given(st.lists(st.tuples(st.sampled_from(("pause", "resume")), st.integers(0, 5)), max_size=12))
def test_a_fence_is_closed_exactly_while_a_later_epoch_paused_than_was_resumed(steps: list[tuple[str, int]]) -> None:
    fence, paused, resumed = Fence(), [-1], [-1]
    for what, epoch in steps:
        if what == "resume":
            fence.resume(epoch)
            resumed.append(epoch)
        elif epoch <= max(resumed):
            with pytest.raises(Refused, match="resumed already"):
                fence.pause(epoch)
        else:
            fence.pause(epoch)
            paused.append(epoch)
        assert fence.closed == (max(paused) > max(resumed))


def test_a_closed_fence_holds_chunks_and_not_what_no_receipt_names() -> None:
    plane = Plane({"a": 0.0, "x": 0.0, "y": 0.5})
    plane.cleanup.fence.pause(1)
    plane.run(FenceMoved(0.0))
    plane.run(Unneed(("a",), 0.0))
    plane.run(Discard(("x",), False, 0.0))
    plane.run(Discard(("y",), True, 0.0))
    assert plane.rows() == {"a"} and not plane.cleanup.drained
    plane.cleanup.fence.resume(1)
    plane.run(FenceMoved(plane.now))
    assert plane.rows() == set() and plane.cleanup.drained


def test_a_pause_is_granted_when_the_clear_under_way_has_ended_and_a_retry_waits_for_its_end() -> None:
    cleanup = Cleanup(LIMITS)
    assert cleanup.handle(Unneed(("a",), 0.0)) == [StartClear(("a",))]
    cleanup.fence.pause(1)
    assert cleanup.handle(FenceMoved(0.0)) == [] and not cleanup.fence_is_granted
    assert cleanup.handle(ClearFailed("lost", 0.0)) == [] and cleanup.fence_is_granted
    cleanup.fence.resume(1)
    assert cleanup.handle(FenceMoved(0.5)) == [SetTimer(1.0)]


def test_whoever_brings_chunks_waits_while_too_many_wait_but_not_for_a_closed_fence() -> None:
    cleanup = Cleanup(LIMITS)
    cleanup.handle(Unneed(("first",), 0.0))
    cleanup.handle(Unneed(tuple("abcde"), 0.0))
    assert not cleanup.over_capacity
    cleanup.handle(Unneed(("f",), 0.0))
    assert cleanup.over_capacity
    cleanup.fence.pause(1)
    assert not cleanup.over_capacity


def test_closing_tries_everything_once() -> None:
    plane = Plane({"a": 0.0, "y": math.inf}, fails=[True, True])
    plane.run(Unneed(("a",), 0.0), until=0.0)
    plane.run(Discard(("y",), True, 0.0), until=0.0)
    plane.run(Closing(0.0))
    counts = plane.cleanup.statistics()
    assert (counts["cleanup_given_up"], counts["cleanup_unseen"], len(plane.clears)) == (1, 1, 3)
    assert plane.cleanup.idle


def test_an_answer_to_no_clear_is_an_error() -> None:
    with pytest.raises(ValueError, match="no clear"):
        Cleanup(LIMITS).handle(ClearDone(0, 0.0))
