"""The cut as a transaction: design invariants 2 to 8 after every step, whatever fails and whenever.

The machine plays the coordinator, the plane and the clock by hand. What the engine produced is a numbered run per call,
so a token that is lost, doubled or moved shows in the chain.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.answers import PutAck
from policies.calls import CallIdentity
from policies.capture import CaptureTable, State
from policies.chain import CHUNK_FIELDS, ChainDigest
from policies.checksums import block_checksum
from policies.config import RolloutRecoveryConfig
from policies.cut import (
    PUTS_IN_FLIGHT,
    ClearDone,
    ClearFailed,
    ClearKeys,
    CutTransaction,
    DeadlinePassed,
    Deliver,
    Event,
    Instruction,
    Interrupted,
    PutDone,
    PutFailed,
    StageBatch,
    Started,
)
from policies.receipts import Acknowledgement, Inventory, Receipt
from tests.fake_plane import spoiled
from tests.generated_tokens import chain, tokens

SMALL = RolloutRecoveryConfig(
    generation_prefix_batch_size=3,
    generation_prefix_batch_max_tokens=8,
    generation_prefix_batch_max_bytes=90,
    control_timeout_s=10.0,
)
FATES = ("ok", "ok", "ok", "fail_before", "fail_after", "wrong_checksum", "wrong_bytes", "missing_key")


class Cuts(RuleBasedStateMachine):
    @initialize(lengths=st.lists(st.integers(1, 4), min_size=3, max_size=8))
    def start(self, lengths: list[int]) -> None:
        self.table = CaptureTable()
        self.table.expect_vocabulary(10_000)
        self.now = 0.0
        self.store: dict[str, list[int]] = {}
        self.late: set[str] = set()  # keys whose clear failed and that are cleared later
        self.doubted: set[str] = set()  # keys whose put did not get the acknowledgement it should have
        self.flags: dict[CallIdentity, list[bool]] = {}
        self.known: list[CallIdentity] = []
        self.tries: dict[tuple[CallIdentity, int], int] = {}  # puts of a chunk in this cut
        for length in lengths:
            self.begin([True] * length)
        self.cut: CutTransaction | None = None
        self.puts: dict[int, StageBatch] = {}
        self.clears: dict[int, ClearKeys] = {}
        self.receipts = 0

    # What engines and workers do, at any moment.

    @rule(flags=st.lists(st.booleans(), max_size=4))
    def begin(self, flags: list[bool]) -> None:
        identity = CallIdentity(f"r{len(self.known) % 2}", f"c{len(self.known)}")
        self.table.add(identity).observe(tokens(0, len(flags), cuttable=flags))
        self.known.append(identity)
        self.flags[identity] = list(flags)

    @rule(flags=st.lists(st.booleans(), min_size=1, max_size=5))
    def observe(self, flags: list[bool]) -> None:
        for identity in self.table.active():
            capture = self.table.get(identity)
            if capture is not None and capture.state is not State.POISONED and capture.finish_reason is None:
                capture.observe(tokens(len(self.flags[identity]), len(flags), cuttable=flags))
                self.flags[identity] += flags

    @rule(data=st.data(), what=st.sampled_from(("end", "abort_end", "poison", "finish", "abort")))
    def happen(self, data: st.DataObject, what: str) -> None:
        identity = data.draw(st.sampled_from(self.known), label="call")
        capture = self.table.get(identity)
        if capture is None:
            return
        if what == "end":
            capture.end("stop")
        elif what == "abort_end":
            capture.end("abort")
        elif what == "poison":
            capture.observe(tokens(-1, 1))
        else:
            keys = self.table.finish(identity, "stop") if what == "finish" else self.table.abort(identity)
            for key in keys:
                del self.store[key]

    # The cut.

    @precondition(lambda self: self.cut is None)
    @rule(data=st.data())
    def begin_cut(self, data: st.DataObject) -> None:
        strangers = [CallIdentity("r9", "c9"), CallIdentity("r0", "c1", 7)]
        calls = [*strangers, *self.known]
        first = data.draw(st.integers(0, len(calls)), label="first")
        left_out = data.draw(st.integers(0, 2), label="left out")
        self.inventory = Inventory.of(f"k{self.receipts}", [*calls[first:], *calls[:first]][left_out:])
        self.tries.clear()
        self.cut = CutTransaction(self.inventory, self.table, SMALL)
        self.tell(Started(self.now))

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), fate=st.sampled_from(FATES))
    def put_ends(self, data: st.DataObject, fate: str) -> None:
        stage = self.puts.pop(data.draw(st.sampled_from(sorted(self.puts)), label="put"))
        first_only = ("wrong_bytes", "missing_key")
        self.doubted.update(() if fate == "ok" else stage.keys[:1] if fate in first_only else stage.keys)
        if fate == "fail_before":
            return self.tell(PutFailed(stage.number, "lost", self.now))
        row_bytes = sum(column.row_bytes() for column in stage.columns.values())
        for index, key in enumerate(stage.keys):
            assert key not in self.store, "a key was put twice"
            self.store[key] = stage.columns["ids"].row(index).tolist()
        if fate == "fail_after":
            return self.tell(PutFailed(stage.number, "the answer was lost", self.now))
        ack = PutAck("u0", 1, stage.keys, tuple(np.asarray(row_bytes).tolist()), block_checksum(stage.columns))
        return self.tell(PutDone(stage.number, spoiled(ack, fate), self.now))

    @precondition(lambda self: self.clears)
    @rule(works=st.booleans())
    def clear_ends(self, works: bool) -> None:
        number, clear = self.clears.popitem()
        if works:
            for key in clear.keys:
                self.store.pop(key, None)
            self.tell(ClearDone(number, self.now))
        else:
            self.late.update(clear.keys)
            self.tell(ClearFailed(number, self.now))

    @rule(seconds=st.sampled_from((0.5, 4.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.cut is not None and self.now > self.cut.deadline:
            self.tell(DeadlinePassed(self.now))

    @precondition(lambda self: self.cut is not None)
    @rule()
    def interrupt(self) -> None:
        self.tell(Interrupted(self.now))

    def tell(self, event: Event) -> None:
        assert self.cut is not None
        for instruction in self.cut.handle(event):
            self.obey(instruction)

    def obey(self, instruction: Instruction) -> None:
        assert self.cut is not None
        if isinstance(instruction, StageBatch):
            assert self.now <= self.cut.deadline, "a write started after the deadline"
            assert not self.cut.interrupted, "a write started after the interruption"
            self.puts[instruction.number] = instruction
            for tag in instruction.tags:
                chunk = CallIdentity(tag["rollout_id"], tag["call_id"]), tag["start"]
                self.tries[chunk] = self.tries.get(chunk, 0) + 1
                assert self.tries[chunk] <= 2, "a row was put more often than in its batch and alone"
            lengths = [len(row) for row in instruction.columns["ids"]]
            assert len(lengths) == 1 or (len(lengths) <= 3 and sum(lengths) <= 7)  # 7 tokens are 84 bytes
        elif isinstance(instruction, ClearKeys):
            self.clears[instruction.number] = instruction
        else:
            assert not self.puts and not self.clears, "the receipt came before all was settled"
            self.cut = None
            self.receipts += 1
            self.check(instruction.receipt)

    def check(self, receipt: Receipt) -> None:
        """Invariants 2, 3, 4 and 5 at the moment of delivery."""
        assert tuple(a.identity for a in receipt.acknowledgements) == self.inventory.calls
        for answer in receipt.acknowledgements:
            if answer.disposition == "durable_prefix":
                assert answer.reason is None
                self.check_prefix(answer)
            else:
                assert answer.reason is not None and answer.cause and not answer.keys
        sealed = {key for capture in self.table.captures() for key in capture.keys}
        assert set(self.store) - self.late == sealed, "rows were left that no call received"
        assert all(capture.state is not State.FROZEN for capture in self.table.captures())

    def check_prefix(self, answer: Acknowledgement) -> None:
        if answer.keys and self.table.get(answer.identity) is not None:
            ids = [token for key in answer.keys for token in self.store[key]]
            assert ids == list(range(answer.tokens))
        digest = ChainDigest.of(chain(answer.tokens))
        assert answer.digest == digest.hexdigest()
        if answer.finish_reason is not None:
            assert answer.tokens == len(self.flags[answer.identity]), "only part of a call was said to be all of it"

    @invariant()
    def captures_hold_the_truth(self) -> None:
        """Invariants 2, 7 and 8 at every moment."""
        if not hasattr(self, "table"):
            return
        for capture in self.table.captures():
            flags, sealed = self.flags[capture.identity], capture.sealed_tokens
            assert [t for key in capture.keys for t in self.store[key]] == list(range(sealed))
            assert sealed + capture.live_tokens == len(flags)
            assert not self.doubted & set(capture.keys), "sealed without a valid acknowledgement"
            assert sealed == 0 or flags[sealed - 1] or capture.finish_reason is not None
        assert len(self.puts) <= PUTS_IN_FLIGHT

    def teardown(self) -> None:
        """From wherever it got to, a cut without faults has every token of every call."""
        if not hasattr(self, "table"):
            return
        self.settle()
        for capture in self.table.captures():
            capture.end("stop")
        self.tries.clear()
        self.inventory = Inventory.of("last", self.table.active())
        self.cut = CutTransaction(self.inventory, self.table, SMALL)
        self.tell(Started(self.now))
        self.settle()
        for capture in self.table.captures():
            assert capture.state is State.POISONED or capture.live_tokens == 0

    def settle(self) -> None:
        while self.cut is not None:
            assert self.puts or self.clears, "the cut waits for nothing and does not deliver"
            for stage in [self.puts.pop(number) for number in sorted(self.puts)]:
                for index, key in enumerate(stage.keys):
                    self.store[key] = stage.columns["ids"].row(index).tolist()
                self.tell(PutDone(stage.number, honest(stage), self.now))
            while self.clears:
                self.clear_ends(True)


def honest(stage: StageBatch) -> PutAck:
    row_bytes = np.asarray(sum(column.row_bytes() for column in stage.columns.values()))
    return PutAck("u0", 1, stage.keys, tuple(row_bytes.tolist()), block_checksum(stage.columns))


TestCuts = Cuts.TestCase
TestCuts.settings = settings(max_examples=200, stateful_step_count=30)


# Examples: one reason to fail each.


def table_with(*lengths: int) -> tuple[CaptureTable, list[CallIdentity]]:
    table = CaptureTable()
    identities = [CallIdentity("r0", f"c{i}") for i in range(len(lengths))]
    for identity, length in zip(identities, lengths, strict=True):
        table.add(identity).observe(tokens(0, length))
    return table, identities


def started(table: CaptureTable, calls: list[CallIdentity]) -> tuple[CutTransaction, list[Instruction]]:
    cut = CutTransaction(Inventory.of("k", calls), table, RolloutRecoveryConfig())
    return cut, cut.handle(Started(0.0))


def test_calls_of_one_cut_ride_in_one_put() -> None:
    table, calls = table_with(3, 4, 5)
    cut, instructions = started(table, calls)
    assert [type(i) for i in instructions] == [StageBatch]
    stage = instructions[0]
    assert isinstance(stage, StageBatch)
    assert stage.keys == tuple(call.chunk_key(0) for call in calls)
    assert stage.tags[1] == {
        "rollout_id": "r0", "call_id": "c1", "attempt": 0, "index": 0, "start": 0, "tokens": 4,
    }  # fmt: skip
    assert {name: stage.columns[name].values.dtype.name for name in CHUNK_FIELDS} == {
        "ids": "int32", "logprobs": "float32", "versions": "int32",
    }  # fmt: skip
    (delivered,) = cut.handle(PutDone(stage.number, honest(stage), 1.5))
    assert isinstance(delivered, Deliver)
    numbers = delivered.receipt.numbers
    assert (numbers["puts"], numbers["rows"], numbers["tokens"], numbers["bytes"]) == (1, 3, 12, 144)
    assert numbers["longest_frozen_s"] == 1.5


def test_one_bad_row_of_32_fails_only_its_own_call() -> None:
    """The batch fails whole, then each row goes alone, under a key of its own; the bad one fails again."""
    table, calls = table_with(*[2] * 32)
    cut, [stage] = started(table, calls)
    assert isinstance(stage, StageBatch)
    instructions = cut.handle(PutFailed(stage.number, "a row was refused", 0.1))
    clears = [i for i in instructions if isinstance(i, ClearKeys)]
    assert [clear.keys for clear in clears] == [stage.keys]
    queue = [i for i in instructions if isinstance(i, StageBatch)]
    receipt = None
    for instruction in itertools.chain(iter(lambda: queue.pop(0) if queue else None, None)):
        assert len(instruction.keys) == 1 and instruction.keys[0] not in stage.keys
        bad = instruction.keys[0].startswith(str(calls[9]))
        event = (
            PutFailed(instruction.number, "refused", 0.2)
            if bad
            else PutDone(instruction.number, honest(instruction), 0.2)
        )
        for new in cut.handle(event):
            if isinstance(new, StageBatch):
                queue.append(new)
            elif isinstance(new, ClearKeys):
                clears.append(new)
    for clear in clears:
        for new in cut.handle(ClearDone(clear.number, 0.3)):
            assert isinstance(new, Deliver)
            receipt = new.receipt
    assert receipt is not None
    failed = [a for a in receipt.acknowledgements if a.disposition == "durable_failure"]
    assert [(a.identity, a.reason, a.cause) for a in failed] == [(calls[9], "cut_error", "refused")]
    capture = table.get(calls[9])
    assert capture is not None and capture.live_tokens == 2


def test_a_call_with_nothing_new_is_acknowledged_without_a_write() -> None:
    table, calls = table_with(3)
    cut, [stage] = started(table, calls)
    assert isinstance(stage, StageBatch)
    [first] = cut.handle(PutDone(stage.number, honest(stage), 0.0))
    _, [second] = started(table, calls)
    assert isinstance(first, Deliver) and isinstance(second, Deliver)
    assert second.receipt.acknowledgements == first.receipt.acknowledgements
    assert second.receipt.numbers["puts"] == 0


def test_every_kind_of_call_that_cannot_be_cut_has_its_reason() -> None:
    table, calls = table_with(0, 0, 2, 2, 2)
    held, not_started, poisoned, aborted, finished = calls
    for identity in (held, not_started):
        capture = table.get(identity)
        assert capture is not None
    capture = table.get(held)
    assert capture is not None
    capture.observe(tokens(0, 3, cuttable=False))
    capture = table.get(poisoned)
    assert capture is not None
    capture.observe(tokens(-1, 1))
    table.abort(aborted)
    table.finish(finished, "length")
    stranger, retry = CallIdentity("r7", "c77"), held.next_attempt()
    _, [delivered] = started(table, [*calls, stranger, retry])
    assert isinstance(delivered, Deliver)
    answers = delivered.receipt.acknowledgements
    reasons = [a.reason for a in answers]
    assert reasons == ["no_tokens", "no_tokens", "poisoned", "unknown_call", None, "unknown_call", "wrong_identity"]
    assert answers[1].cause == "not started"
    terminal = answers[4]
    assert (terminal.finish_reason, terminal.tokens, terminal.keys) == ("length", 2, ())


def test_a_finished_call_is_cut_whole_and_says_so() -> None:
    table, calls = table_with(0)
    capture = table.get(calls[0])
    assert capture is not None
    capture.observe(tokens(0, 3, cuttable=[True, False, False]))
    capture.end("stop")
    cut, [stage] = started(table, calls)
    assert isinstance(stage, StageBatch)
    [delivered] = cut.handle(PutDone(stage.number, honest(stage), 0.0))
    assert isinstance(delivered, Deliver)
    [answer] = delivered.receipt.acknowledgements
    assert (answer.tokens, answer.finish_reason) == (3, "stop")


def test_a_write_under_way_at_the_deadline_is_sealed_and_the_rest_rolls_back() -> None:
    table, calls = table_with(*[2] * 9)
    cut = CutTransaction(Inventory.of("k", calls), table, SMALL)
    stages = cut.handle(Started(0.0))
    assert cut.handle(DeadlinePassed(10.1)) == []
    instructions: list[Instruction] = []
    for stage in stages:
        assert isinstance(stage, StageBatch)
        instructions += cut.handle(PutDone(stage.number, honest(stage), 12.0))
    [delivered] = instructions
    assert isinstance(delivered, Deliver)
    assert [a.reason for a in delivered.receipt.acknowledgements] == [None] * 6 + ["control_deadline"] * 3
    assert delivered.receipt.numbers["failed_control_deadline"] == 3


def test_a_call_that_ends_while_its_chunk_is_written_is_not_said_to_be_whole() -> None:
    table, calls = table_with(3)
    cut, [stage] = started(table, calls)
    capture = table.get(calls[0])
    assert isinstance(stage, StageBatch) and capture is not None
    capture.observe(tokens(3, 2))
    capture.end("stop")
    [delivered] = cut.handle(PutDone(stage.number, honest(stage), 0.0))
    assert isinstance(delivered, Deliver)
    [answer] = delivered.receipt.acknowledgements
    assert (answer.tokens, answer.finish_reason) == (3, None)


def test_an_answer_to_nothing_is_an_error() -> None:
    table, calls = table_with(2)
    cut, _ = started(table, calls)
    for event in (PutFailed(9, "?", 0.0), ClearDone(9, 0.0), ClearFailed(9, 0.0)):
        with pytest.raises(ValueError, match="on its way"):
            cut.handle(event)
