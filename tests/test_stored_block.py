"""A stored block: rows stay where they were put, and dead ones do not hold memory."""

from __future__ import annotations

import tracemalloc

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from policies.answers import CLEARED
from policies.columns import Column, bytes_rows
from policies.stored_block import COMPACT_ABOVE_BYTES, OVERHEAD_BYTES, StoredBlock


class BlockMachine(RuleBasedStateMachine):
    """Frees of any rows in any order against the rows as they were put."""

    @initialize(sizes=st.lists(st.sampled_from([0, 1, 3_000, 9_000]), min_size=1, max_size=12))
    def put(self, sizes: list[int]) -> None:
        self.rows = [bytes([number]) * size for number, size in enumerate(sizes)]
        numbers = Column.dense(np.arange(len(sizes)))
        self.backing = object()
        self.block = StoredBlock.of(7, len(sizes), {"raw": bytes_rows(self.rows), "n": numbers}, self.backing)
        self.columns = self.block.columns
        self.live = set(range(len(sizes)))
        self.before = (self.block.snapshot(), set(self.live))

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        positions = data.draw(st.lists(st.integers(0, len(self.rows) - 1), min_size=1, max_size=4))
        self.before = (self.block.snapshot(), set(self.live))
        self.block.free(np.array(positions))
        self.live -= set(positions)

    def check_reads(self, block: StoredBlock, live: set[int]) -> None:
        asked = [*range(len(self.rows)), 0]
        part = block.read(["raw", "n"], np.array(asked))
        assert [(asked[index], verdict) for index, verdict, _ in part.bad] == [
            (i, CLEARED) for i in asked if i not in live
        ]
        alive = [i for i in asked if i in live]
        assert list(part.columns["raw"]) == [self.rows[i] for i in alive]
        assert [int(n) for n in part.columns["n"]] == alive

    @invariant()
    def rows_are_read_where_they_were_put(self) -> None:
        self.check_reads(self.block, self.live)

    @invariant()
    def what_was_captured_before_stays_as_it_was(self) -> None:
        self.check_reads(*self.before)

    @invariant()
    def live_columns_hold_the_live_rows_only(self) -> None:
        positions, columns = self.block.live_positions(), self.block.live_columns()
        assert (list(range(len(self.rows))) if positions is None else positions.tolist()) == sorted(self.live)
        assert list(columns["raw"]) == [self.rows[i] for i in sorted(self.live)]

    @invariant()
    def dead_rows_hold_no_more_than_live_ones_and_a_little(self) -> None:
        if self.live:
            live = sum(len(self.rows[i]) + 16 for i in self.live) + 8
            assert self.block.nbytes <= OVERHEAD_BYTES + 2 * live + COMPACT_ABOVE_BYTES

    @invariant()
    def memory_that_was_left_is_not_pinned(self) -> None:
        """A compacted block has memory of its own; any other still is what was put."""
        compacted = self.block.kept < len(self.rows)
        assert (self.block.backing is None) == compacted
        shared = any(np.shares_memory(self.block.columns[n].values, self.columns[n].values) for n in self.columns)
        assert not (compacted and shared)


TestBlock = BlockMachine.TestCase


@given(st.data())
def test_a_block_of_live_rows_reads_like_the_one_they_came_from(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.binary(max_size=20), min_size=1, max_size=8))
    dead = data.draw(st.sets(st.integers(0, len(rows) - 1), max_size=len(rows) - 1))
    block = StoredBlock.of(7, len(rows), {"raw": bytes_rows(rows)})
    block.free(np.array(sorted(dead), np.int64))
    positions = block.live_positions()
    assert positions is not None
    again = StoredBlock.of_live(7, len(rows), block.live_columns(), positions)
    everywhere = np.arange(len(rows))
    before, after = block.read(["raw"], everywhere), again.read(["raw"], everywhere)
    assert before.bad == after.bad and list(before.columns["raw"]) == list(after.columns["raw"])
    again.free(positions[:1])
    assert again.live == block.live - 1


def test_the_overhead_of_a_small_block_is_about_what_is_counted() -> None:
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        blocks = []
        for number in range(200):
            columns = {f"f{i}": Column.jagged(np.zeros(4, np.int32), [4]) for i in range(3)}
            blocks.append(StoredBlock.of(number, 1, columns))
        each = (tracemalloc.get_traced_memory()[0] - before) / len(blocks)
    finally:
        tracemalloc.stop()
    counted = blocks[0].nbytes
    assert 0.5 * counted < each < 2 * counted, (each, counted)
