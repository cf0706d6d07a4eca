"""The cut as a transaction: the state machine of `tests.cut_machine`, whatever fails and whenever, and examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from policies.calls import CallIdentity
from policies.capture import State
from policies.capture_table import CaptureTable
from policies.chunks import Packed, pack
from policies.config import RolloutRecoveryConfig
from policies.cut import ROWS_AT_ONCE, CutTransaction
from policies.cut_events import (
    BatchPacked,
    ClearDone,
    ClearFailed,
    ClearKeys,
    DeadlinePassed,
    Deliver,
    Event,
    GoneOn,
    GoOn,
    Instruction,
    LeaveKeys,
    PackBatch,
    PackFailed,
    PutBatch,
    PutDone,
    PutFailed,
    Started,
)
from policies.receipts import Acknowledgement, Inventory, Receipt
from tests.cut_machine import SMALL, Cuts, honest
from tests.generated_tokens import tokens

TestCuts = Cuts.TestCase
TestCuts.settings = settings(max_examples=300, stateful_step_count=40)


# Examples: one reason to fail each.


def table_with(*lengths: int, layers: int = 0) -> tuple[CaptureTable, list[CallIdentity]]:
    table = CaptureTable(600.0)
    identities = [CallIdentity("r0", f"c{i}") for i in range(len(lengths))]
    for identity, length in zip(identities, lengths, strict=True):
        table.admit(identity, 0.0).capture.observe(tokens(0, length, layers=layers))
    return table, identities


class Shell:
    """Carries out what a cut asks for; each PUT and clear ends as ``put`` and ``clear`` say, in the order asked."""

    def __init__(
        self,
        table: CaptureTable,
        calls: list[CallIdentity],
        put: Callable[[PackBatch, Packed], Event | None] | None = None,
        clear: Callable[[ClearKeys], Event] | None = None,
        config: RolloutRecoveryConfig | None = None,
    ) -> None:
        self.cut = CutTransaction(Inventory.of("k", calls), table, config or RolloutRecoveryConfig())
        self._put = put or (lambda batch, packed: PutDone(batch.number, honest(batch, packed), 0.0))
        self._clear = clear or (lambda asked: ClearDone(asked.number, len(asked.keys), 0.0))
        self.batches: dict[int, tuple[PackBatch, Packed]] = {}
        self.put: list[tuple[str, ...]] = []
        self.cleared: list[tuple[str, ...]] = []
        self.left: list[LeaveKeys] = []
        self.receipt: Receipt | None = None

    def run(self, first: Event | None = None) -> tuple[Acknowledgement, ...]:
        """Until nothing is left to be done; the acknowledgements, if the receipt came."""
        events = [first or Started(0.0)]
        while events:
            for instruction in self.cut.handle(events.pop(0)):
                answer = self._obey(instruction)
                events += [] if answer is None else [answer]
        return () if self.receipt is None else self.receipt.acknowledgements

    def _obey(self, instruction: Instruction) -> Event | None:
        match instruction:
            case GoOn():
                return GoneOn(0.0)
            case PackBatch(number, keys, chunks):
                packed = pack(keys, chunks)
                self.batches[number] = instruction, packed
                return BatchPacked(number, packed.sent, 0.0)
            case PutBatch(number):
                self.put.append(self.batches[number][0].keys)
                return self._put(*self.batches[number])
            case ClearKeys():
                self.cleared.append(instruction.keys)
                return self._clear(instruction)
            case LeaveKeys():
                self.left.append(instruction)
            case Deliver(receipt):
                self.receipt = receipt
        return None


def test_calls_of_one_cut_ride_in_one_put() -> None:
    table, calls = table_with(3, 4, 5)
    shell = Shell(table, calls, put=lambda batch, packed: PutDone(batch.number, honest(batch, packed), 1.5))
    shell.run()
    [(batch, packed)] = shell.batches.values()
    assert batch.keys == tuple(call.chunk_key(0) for call in calls)
    assert packed.tags[1] == {
        "rollout_id": "r0", "call_id": "c1", "attempt": 0, "index": 0, "start": 0, "tokens": 4,
    }  # fmt: skip
    assert {name: column.values.dtype.name for name, column in packed.columns.items()} == {
        "ids": "int32", "logprobs": "float32", "versions": "int32",
    }  # fmt: skip
    assert shell.receipt is not None
    numbers = shell.receipt.numbers
    assert (numbers["puts"], numbers["rows"], numbers["tokens"], numbers["bytes"]) == (1, 3, 12, 144)
    assert numbers["longest_unsealed_s"] == 1.5


def test_calls_with_extras_have_puts_of_their_own_and_every_byte_counts() -> None:
    table, calls = table_with(3, 4)
    routed, others = table_with(2, 2, layers=5)
    for other in others:
        capture = routed.get(other)
        assert capture is not None
        named = CallIdentity("r1", other.call_id)
        table.admit(named, 0.0).capture.observe(tokens(0, 2, layers=5))
        calls.insert(1, named)
    shell = Shell(table, calls)
    answers = shell.run()
    assert [[c.identity.rollout_id for c in batch.chunks] for batch, _ in shell.batches.values()] == [
        ["r0", "r0"], ["r1", "r1"],
    ]  # fmt: skip
    assert [batch.nbytes for batch, _ in shell.batches.values()] == [7 * 12, 4 * (12 + 5 * 2 * 2)]
    assert [answer.extras for answer in answers] == [(), ("routes",), ("routes",), ()]


def test_a_call_is_frozen_only_when_its_batch_is_next() -> None:
    """What is generated while others are written is in the cut, too."""
    table, calls = table_with(*[2] * 9)

    def more_tokens_come(batch: PackBatch, packed: Packed) -> Event:
        last = table.get(calls[8])
        assert last is not None
        if batch.number == 0:
            last.observe(tokens(2, 3))
        return PutDone(batch.number, honest(batch, packed), 0.0)

    assert [a.tokens for a in Shell(table, calls, put=more_tokens_come, config=SMALL).run()] == [2] * 8 + [5]


def test_new_tokens_have_their_turn_after_every_few_rows() -> None:
    """Whatever the size of a batch, an event freezes or seals no more than `ROWS_AT_ONCE` rows."""
    table, calls = table_with(*[2] * (3 * ROWS_AT_ONCE))
    cut = CutTransaction(Inventory.of("k", calls), table, RolloutRecoveryConfig())

    def frozen() -> int:
        return sum(capture.state is State.FROZEN for capture in table.captures())

    instructions = cut.handle(Started(0.0))
    counts = [frozen()]
    while isinstance(instructions[-1], GoOn):
        instructions = cut.handle(GoneOn(0.0))
        counts.append(frozen())
    assert counts == [ROWS_AT_ONCE, 2 * ROWS_AT_ONCE, 3 * ROWS_AT_ONCE]
    [batch] = instructions
    assert isinstance(batch, PackBatch)
    packed = pack(batch.keys, batch.chunks)
    cut.handle(BatchPacked(batch.number, packed.sent, 0.0))
    instructions = cut.handle(PutDone(batch.number, honest(batch, packed), 0.0))
    counts = [frozen()]
    while isinstance(instructions[-1], GoOn):
        instructions = cut.handle(GoneOn(0.0))
        counts.append(frozen())
    assert counts == [2 * ROWS_AT_ONCE, ROWS_AT_ONCE, 0] and isinstance(instructions[-1], Deliver)


def test_one_bad_row_of_32_fails_only_its_own_call() -> None:
    """The batch fails whole, then each row goes alone, under a key of its own; the bad one fails again."""
    table, calls = table_with(*[2] * 32)

    def refused(batch: PackBatch, packed: Packed) -> Event:
        if any(chunk.identity == calls[9] for chunk in batch.chunks):
            return PutFailed(batch.number, "refused", False, 0.1)
        return PutDone(batch.number, honest(batch, packed), 0.1)

    shell = Shell(table, calls, put=refused)
    answers = shell.run()
    failed = [a for a in answers if a.disposition == "durable_failure"]
    assert [(a.identity, a.reason, a.cause) for a in failed] == [(calls[9], "cut_error", "refused")]
    assert [len(keys) for keys in shell.put] == [32] + [1] * 32
    assert len({key for keys in shell.put for key in keys}) == 64
    assert shell.cleared == [shell.put[0], shell.put[10]] and shell.left == []
    capture = table.get(calls[9])
    assert capture is not None and capture.live_tokens == 2


def test_a_batch_that_cannot_be_packed_goes_row_by_row() -> None:
    table, calls = table_with(2, 2)
    cut = CutTransaction(Inventory.of("k", calls), table, RolloutRecoveryConfig())
    [batch] = cut.handle(Started(0.0))
    assert isinstance(batch, PackBatch)
    again = cut.handle(PackFailed(batch.number, "no memory", 0.0))
    assert [len(alone.keys) for alone in again if isinstance(alone, PackBatch)] == [1, 1]
    assert len(again) == 2, "nothing was written, so there is nothing to clear"


@pytest.mark.parametrize(
    ("in_doubt", "removed", "left"), [(True, 0, True), (True, 1, False), (False, 0, False), (False, None, True)]
)
def test_rows_whose_put_is_in_doubt_are_left_to_be_looked_for(in_doubt: bool, removed: int | None, left: bool) -> None:
    """A clear that found nothing proves nothing while the unit may still publish; one that failed proves nothing."""
    table, calls = table_with(2)
    shell = Shell(
        table,
        calls,
        put=lambda batch, _: PutFailed(batch.number, "no answer", in_doubt, 0.0),
        clear=lambda asked: (
            ClearFailed(asked.number, 0.0) if removed is None else ClearDone(asked.number, removed, 0.0)
        ),
    )
    shell.run()
    expected = [LeaveKeys((calls[0].chunk_key(i),), in_doubt) for i in range(2)] if left else []
    assert shell.left == expected and shell.receipt is not None


def test_a_call_with_nothing_new_is_acknowledged_without_a_write() -> None:
    table, calls = table_with(3)
    first = Shell(table, calls).run()
    second = Shell(table, calls)
    assert second.run() == first and second.put == []


def test_every_kind_of_call_that_cannot_be_cut_has_its_reason() -> None:
    table, calls = table_with(0, 0, 2, 2, 2)
    held, _, poisoned, aborted, finished = calls
    for identity, run in ((held, tokens(0, 3, cuttable=False)), (poisoned, tokens(-1, 1))):
        capture = table.get(identity)
        assert capture is not None
        capture.observe(run)
    table.abort(aborted, 0.0)
    table.finish(finished, "length", 0.0)
    stranger, retry = CallIdentity("r7", "c77"), held.next_attempt()
    answers = Shell(table, [*calls, stranger, retry]).run()
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
    [answer] = Shell(table, calls).run()
    assert (answer.tokens, answer.finish_reason) == (3, "stop")


def test_a_write_under_way_at_the_deadline_is_sealed_and_the_rest_rolls_back() -> None:
    table, calls = table_with(*[2] * 9)
    shell = Shell(table, calls, put=lambda *_: None, config=SMALL)
    assert shell.run() == () and shell.run(DeadlinePassed(10.1)) == ()
    for number, (batch, packed) in list(shell.batches.items()):
        answers = shell.run(PutDone(number, honest(batch, packed), 12.0))
    assert [a.reason for a in answers] == [None] * 6 + ["control_deadline"] * 3
    assert shell.receipt is not None and shell.receipt.numbers["failed_control_deadline"] == 3


def test_past_the_deadline_a_call_with_nothing_new_keeps_its_chain() -> None:
    table, calls = table_with(*[2] * 9)
    first = Shell(table, calls).run()
    for call in calls[:8]:
        capture = table.get(call)
        assert capture is not None
        capture.observe(tokens(2, 1))
    shell = Shell(table, calls, put=lambda *_: None, config=SMALL)
    shell.run()
    shell.run(DeadlinePassed(10.1))
    for number, (batch, packed) in list(shell.batches.items()):
        answers = shell.run(PutDone(number, honest(batch, packed), 12.0))
    assert [a.reason for a in answers] == [None] * 6 + ["control_deadline"] * 2 + [None]
    assert answers[8] == first[8]


def test_the_deadline_is_checked_again_when_a_batch_is_packed() -> None:
    table, calls = table_with(2)
    cut = CutTransaction(Inventory.of("k", calls), table, SMALL)
    [batch] = cut.handle(Started(0.0))
    assert isinstance(batch, PackBatch)
    [delivered] = cut.handle(BatchPacked(batch.number, pack(batch.keys, batch.chunks).sent, 10.1))
    assert isinstance(delivered, Deliver)
    assert [a.reason for a in delivered.receipt.acknowledgements] == ["control_deadline"]


def test_a_call_that_ends_while_its_chunk_is_written_is_not_said_to_be_whole() -> None:
    table, calls = table_with(3)
    capture = table.get(calls[0])
    assert capture is not None

    def ends(batch: PackBatch, packed: Packed) -> Event:
        capture.observe(tokens(3, 2))
        capture.end("stop")
        return PutDone(batch.number, honest(batch, packed), 0.0)

    [answer] = Shell(table, calls, put=ends).run()
    assert (answer.tokens, answer.finish_reason) == (3, None)


def test_an_answer_to_nothing_is_an_error() -> None:
    table, calls = table_with(2)
    cut = CutTransaction(Inventory.of("k", calls), table, SMALL)
    [batch] = cut.handle(Started(0.0))
    assert isinstance(batch, PackBatch)
    sent = pack(batch.keys, batch.chunks).sent
    for event in (
        BatchPacked(9, sent, 0.0), PackFailed(9, "?", 0.0), PutFailed(0, "?", True, 0.0), ClearDone(9, 0, 0.0),
        ClearFailed(9, 0.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"on its way|being packed"):
            cut.handle(event)
