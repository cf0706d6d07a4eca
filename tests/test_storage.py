"""A unit's rules: visible only after the controller said so, once per batch id, gone when cleared."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from policies.answers import CLEARED, MISSING
from policies.checksums import block_checksum
from policies.columns import Column
from policies.errors import CapacityExceeded, DtypeConflict, Refused, RequestTimeout, Unreachable, WireError
from policies.storage import Answer, Stored, UnitState
from policies.stored_block import OVERHEAD_BYTES, StoredBlock

REFUSED = DtypeConflict("refused")
CAPACITY = 16 * OVERHEAD_BYTES
POISON = WireError("a header that is not msgpack")


def open_unit(incarnation: int = 0, capacity_bytes: int = 1 << 20, capacity_rows: int = 1_000) -> UnitState:
    return UnitState("u0", incarnation, capacity_bytes, capacity_rows)


def column(*rows: int) -> Column:
    return Column.dense(np.array(rows, np.int64))


def take_in(unit: UnitState, token: Any, batch: str, keys: list[str], *rows: int) -> list[Answer]:
    columns = {"x": column(*rows)}
    return unit.put(token, batch, "train", keys, columns, None, block_checksum(columns))


class UnitMachine(RuleBasedStateMachine):
    """Puts, repeats, publishes that succeed, are refused or get lost, frees, holds and reads, against a dict."""

    puts = Bundle("puts")

    def __init__(self) -> None:
        super().__init__()
        self.unit = UnitState("u0", incarnation=3, capacity_bytes=CAPACITY, capacity_rows=40)
        self.tokens = 0
        self.waiting: dict[int, str] = {}
        self.rows: dict[str, list[int]] = {}
        self.in_flight: list[str] = []
        self.visible: dict[str, int] = {}
        self.refused: set[str] = set()
        self.dead: dict[str, set[int]] = {}
        self.held_dead: list[tuple[str, int]] = []
        self.holders: set[str] = set()

    def took(self, answers: list[Answer]) -> None:
        for answer in answers:
            batch = self.waiting.pop(answer.token)
            if isinstance(answer.result, Stored):
                assert batch in self.visible, "acknowledged before it was published"
                assert answer.result.block == self.visible[batch]
                assert answer.result.row_bytes.tolist() == [8] * len(self.rows[batch])

    def send(self, batch: str) -> None:
        self.tokens += 1
        self.waiting[self.tokens] = batch
        rows = self.rows[batch]
        keys = [f"{batch}-{i}" for i in range(len(rows))]
        self.took(take_in(self.unit, self.tokens, batch, keys, *rows))

    @rule(target=puts, rows=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def put(self, rows: list[int]) -> str:
        batch = f"b{len(self.rows)}"
        self.rows[batch] = rows
        self.send(batch)
        return batch

    @rule(batch=puts)
    def repeat(self, batch: str) -> None:
        if batch not in self.refused:
            self.send(batch)

    @rule()
    def start_publish(self) -> None:
        publications = self.unit.next_publish()
        if publications:
            assert not self.in_flight, "two publishes at once"
            self.in_flight = [p.batch_id for p in publications]
            self.blocks = {p.batch_id: p.block for p in publications}

    @rule(refuse=st.booleans())
    def publish_answered(self, refuse: bool) -> None:
        if not self.in_flight:
            return
        batches, self.in_flight = self.in_flight, []
        outcomes: list[Any] = [REFUSED if refuse and i == 0 else None for i in range(len(batches))]
        for batch, outcome in zip(batches, outcomes, strict=True):
            if outcome is None:
                self.visible[batch] = self.blocks[batch]
                self.dead[batch] = set()
            else:
                self.refused.add(batch)
        self.took(self.unit.published(outcomes))
        assert not [t for t, b in self.waiting.items() if b in batches], "a writer got no answer"

    @rule(poisoned=st.integers(0, 4))
    def publish_cannot_be_taken(self, poisoned: int) -> None:
        """The controller cannot take the message for the sake of one put: the others are published all the same."""
        batches, self.in_flight = self.in_flight, []
        if not batches:
            return
        bad = batches[poisoned % len(batches)]
        self.took(self.unit.publish_failed(POISON))
        if len(batches) > 1:
            for batch in batches:
                (publication,) = self.unit.next_publish()
                assert publication.batch_id == batch
                if batch == bad:
                    self.took(self.unit.publish_failed(POISON))
                else:
                    self.visible[batch] = publication.block
                    self.dead[batch] = set()
                    self.took(self.unit.published([None]))
        self.refused.add(bad)

    @rule()
    def publish_lost(self) -> None:
        if self.in_flight:
            batches, self.in_flight = self.in_flight, []
            answers = self.unit.publish_unknown(RequestTimeout("no answer"))
            assert all(isinstance(a.result, Unreachable) for a in answers)
            for answer in answers:
                assert self.waiting.pop(answer.token) in batches

    @rule(batch=puts, data=st.data())
    def free(self, batch: str, data: st.DataObject) -> None:
        if batch in self.visible:
            position = data.draw(st.integers(0, len(self.rows[batch]) - 1))
            self.unit.free([(self.visible[batch], np.array([position]))])
            if self.holders:
                self.held_dead.append((batch, position))
            else:
                self.dead[batch].add(position)

    @rule(holder=st.sampled_from(["s1", "s2"]))
    def hold(self, holder: str) -> None:
        self.holders.add(holder)
        self.unit.hold(holder)

    @rule(holder=st.sampled_from(["s1", "s2", "never held"]))
    def release(self, holder: str) -> None:
        self.holders.discard(holder)
        self.unit.release(holder)
        if not self.holders:
            for batch, position in self.held_dead:
                self.dead[batch].add(position)
            self.held_dead = []

    @invariant()
    def reads_are_exact(self) -> None:
        for batch, block in self.visible.items():
            rows = self.rows[batch]
            part = self.unit.read(block, ["x"], np.arange(len(rows)))
            assert {i for i, verdict, _ in part.bad if verdict == CLEARED} == self.dead[batch]
            alive = [row for i, row in enumerate(rows) if i not in self.dead[batch]]
            assert [int(v) for v in part.columns["x"]] == alive if alive else True

    @invariant()
    def memory_is_accounted_for(self) -> None:
        assert self.unit.nbytes == sum(b.nbytes for b in self.unit.blocks.values()) <= CAPACITY
        assert self.unit.rows == sum(b.live for b in self.unit.blocks.values()) <= 40
        fully_dead = [b for b in self.visible if len(self.dead[b]) == len(self.rows[b])]
        assert not any(self.visible[b] in self.unit.blocks for b in fully_dead)


TestUnit = UnitMachine.TestCase


def test_publishes_that_arrive_together_leave_together() -> None:
    unit = open_unit()
    take_in(unit, "t1", "b1", ["a"], 1)
    assert [p.batch_id for p in unit.next_publish()] == ["b1"]
    take_in(unit, "t2", "b2", ["b"], 2)
    take_in(unit, "t3", "b3", ["c"], 3)
    assert unit.next_publish() == []
    unit.published([None])
    assert [p.batch_id for p in unit.next_publish()] == ["b2", "b3"]


@pytest.mark.parametrize(
    ("capacity_bytes", "capacity_rows", "text"),
    [(OVERHEAD_BYTES + 16, 10, "holds 1032 of 1040 bytes and the put has 1040"), (1 << 20, 2, "holds 1 of 2 rows")],
)
def test_a_full_unit_says_what_is_full_and_by_how_much(capacity_bytes: int, capacity_rows: int, text: str) -> None:
    unit = open_unit(capacity_bytes=capacity_bytes, capacity_rows=capacity_rows)
    assert take_in(unit, "t1", "b1", ["a"], 1) == []
    (answer,) = take_in(unit, "t2", "b2", ["b", "c"], 2, 3)
    assert isinstance(answer.result, CapacityExceeded) and text in answer.result.message
    assert answer.result.details["full"] == ("rows" if capacity_rows == 2 else "bytes")
    assert len(unit.blocks) == 1


def test_reads_of_what_never_was() -> None:
    unit = open_unit()
    take_in(unit, "t1", "b1", ["a"], 1)
    (publication,) = unit.next_publish()
    assert [v for _, v, _ in unit.read(publication.block, ["y"], np.array([0])).bad] == [MISSING]
    assert [v for _, v, _ in unit.read(publication.block, ["x"], np.array([1])).bad] == [MISSING]
    assert [v for _, v, _ in unit.read(publication.block + 1, ["x"], np.array([0])).bad] == [CLEARED]


def test_block_ids_of_two_incarnations_never_meet() -> None:
    ids = set()
    for incarnation in (0, 1, (1 << 31) - 1):
        unit = open_unit(incarnation)
        for i in range(3):
            take_in(unit, i, f"b{i}", ["a"], 1)
        ids |= {p.block for p in unit.next_publish()}
    assert len(ids) == 9 and max(ids) < 1 << 63


def test_arrays_that_change_on_their_way_are_refused_and_leave_nothing() -> None:
    """Fault: a big buffer is reused in flight. After a timeout the writer may, while the message is still queued."""
    unit, rows = open_unit(), np.ones(4, np.int64)
    columns = {"x": Column.dense(rows)}
    given = block_checksum(columns)
    rows[2] = 2
    (answer,) = unit.put("t1", "b1", "train", ["a", "b", "c", "d"], columns, None, given)
    assert isinstance(answer.result, WireError) and "changed on their way" in answer.result.message
    assert unit.blocks == {} and unit.next_publish() == []
    rows[2] = 1
    assert unit.put("t2", "b1", "train", ["a", "b", "c", "d"], columns, None, given) == []


def test_what_is_captured_does_not_change_when_rows_are_freed() -> None:
    """Fault: one writer does not take the barrier. The first of two savers ends the hold for itself only."""
    unit = open_unit()
    take_in(unit, "t1", "b1", ["a", "b"], 1, 2)
    (publication,) = unit.next_publish()
    unit.published([None])
    unit.free([(publication.block, np.array([0]))])
    unit.hold("first")
    unit.hold("second")
    unit.release("first")
    unit.free([(publication.block, np.array([1]))])
    (captured,) = unit.capture("second", [publication.block])
    unit.release("second")
    assert unit.blocks == {} and captured.live == 1
    positions = captured.live_positions()
    assert positions is not None and positions.tolist() == [1]
    with pytest.raises(Refused, match="not held by 'first'"):
        unit.capture("first", [])
    unit.hold("third")
    with pytest.raises(Refused, match="does not hold blocks"):
        unit.capture("third", [publication.block])


def test_a_failed_restore_leaves_nothing_of_its_blocks() -> None:
    """The same block of an earlier checkpoint has rows that are dead in the later one."""
    unit, columns = open_unit(capacity_bytes=4 * OVERHEAD_BYTES), {"x": column(1, 2)}
    later = StoredBlock.of(7, 2, columns)
    later.free(np.array([0]))
    unit.load("r1", [later])
    unit.unload("r1")
    assert unit.blocks == {} and unit.nbytes == 0
    unit.load("r2", [StoredBlock.of(7, 2, columns)])
    assert unit.read(7, ["x"], np.array([0, 1])).bad == []
    with pytest.raises(CapacityExceeded, match="1040 of 4096 bytes and the checkpoint brings 5200"):
        unit.load("r3", [StoredBlock.of(8 + i, 2, columns) for i in range(5)])
    assert list(unit.blocks) == [7]
