"""A state machine that plays the coordinator, its engines, the plane and the clock by hand around the real policies of
a cut, and checks design invariants 2 to 8 after every step.

What an engine produced is a numbered run per call, so a token that is lost, doubled or moved shows in the chain. The
background cleanup is the real policy, too: in the end nothing may be stored but sealed chunks, also when the outcome of
a PUT stays unknown and its rows become visible long after they were cleared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.answers import PutAck
from policies.calls import CallIdentity, StepDelta, Tokens
from policies.capture import State
from policies.capture_table import CaptureTable
from policies.chain import Chain, ChainDigest
from policies.chunks import Packed, pack
from policies.cleanup import Cleanup, CleanupLimits, Discard, SetTimer, StartClear, TimerFired, Unneed
from policies.cleanup import ClearDone as SweepDone
from policies.cleanup import ClearFailed as SweepFailed
from policies.cleanup import Event as CleanupEvent
from policies.config import RolloutRecoveryConfig
from policies.cut import PUTS_IN_FLIGHT, CutTransaction
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
    Interrupted,
    LeaveKeys,
    PackBatch,
    PackFailed,
    PutBatch,
    PutDone,
    PutFailed,
    Started,
)
from policies.receipts import Acknowledgement, Inventory, Receipt
from tests.fake_plane import spoiled
from tests.generated_tokens import tokens

SMALL = RolloutRecoveryConfig(
    generation_prefix_batch_size=3,
    generation_prefix_batch_max_tokens=8,
    generation_prefix_batch_max_bytes=90,
    control_timeout_s=10.0,
    terminal_evidence_s=1e6,
)
PATIENT = CleanupLimits(batch_keys=2, attempts=1000, retry_after_s=1e-9, looks_after_s=(1.0, 5.0, 1e6))
"""However long a run of the machine is, its clock stays before the last look."""

FATES = (
    "ok", "ok", "ok", "stored_late", "stored_late", "refused", "never_stored", "stored_half", "stored",
    "wrong_checksum", "wrong_bytes", "missing_key",
)  # fmt: skip
Row = dict[str, list[Any]]


class Cuts(RuleBasedStateMachine):
    @initialize(lengths=st.lists(st.integers(1, 4), min_size=3, max_size=8))
    def start(self, lengths: list[int]) -> None:
        self.table = CaptureTable(SMALL.terminal_evidence_s)
        self.table.expect_vocabulary(10_000)
        self.cleanup = Cleanup(PATIENT)
        self.now = 0.0
        self.version = 0
        self.store: dict[str, Row] = {}
        self.hidden: list[dict[str, Row]] = []  # PUTs that were stored and will be published at some time
        self.owed: set[str] = set()  # keys in the hands of the cleanup
        self.sweep: tuple[str, ...] = ()  # what it is clearing now
        self.timer: float | None = None
        self.doubted: set[str] = set()  # keys whose put did not get the acknowledgement it should have
        self.made: dict[CallIdentity, list[tuple[bool, int]]] = {}  # per token: whether cuttable, and its version
        self.layers: dict[CallIdentity, int] = {}
        self.tries: dict[tuple[str, str, int], int] = {}  # puts of a chunk in this cut
        self.cut: CutTransaction | None = None
        self.packs: dict[int, tuple[PackBatch, Packed]] = {}
        self.puts: dict[int, tuple[PackBatch, Packed]] = {}
        self.clears: dict[int, ClearKeys] = {}
        self.receipts = 0
        self.going_on = False
        for length in lengths:
            self.begin([True] * length, 0)

    # What engines and workers do, at any moment.

    @rule(flags=st.lists(st.booleans(), max_size=4), layers=st.sampled_from((0, 1)))
    def begin(self, flags: list[bool], layers: int) -> None:
        identity = CallIdentity(f"r{len(self.made) % 2}", f"c{len(self.made)}")
        self.table.admit(identity, self.now)
        self.made[identity], self.layers[identity] = [], layers
        self.deliver({identity: flags})

    @rule(flags=st.lists(st.booleans(), min_size=1, max_size=5), update=st.booleans())
    def step(self, flags: list[bool], update: bool) -> None:
        self.version += update
        self.deliver({c.identity: flags for c in self.trusted() if c.finish_reason is None})

    @rule(
        data=st.data(),
        what=st.sampled_from(("end", "end", "end", "abort_end", "placeholder", "uneven", "finish", "abort")),
    )
    def happen(self, data: st.DataObject, what: str) -> None:
        identity = data.draw(st.sampled_from(list(self.made)), label="call")
        if self.table.get(identity) is None:
            return
        if what in ("end", "abort_end"):
            self.table.observe(StepDelta((), (), {identity: "stop" if what == "end" else "abort"}))
        elif what == "placeholder":
            self.table.observe(StepDelta((identity,), (tokens(-1, 1),), {}))
        elif what == "uneven":
            run = tokens(len(self.made[identity]), 2, layers=1)
            uneven = Tokens(run.ids, run.logprobs, run.versions, run.cuttable, {"routes": run.extras["routes"][:1]})
            self.table.observe(StepDelta((identity,), (uneven,), {}))
        else:
            ended = self.table.finish(identity, "stop", self.now) if what == "finish" else None
            self.unneed(self.table.abort(identity, self.now) if ended is None else ended)

    @rule(data=st.data(), engine=st.integers(0, 3))
    def engine_dies(self, data: st.DataObject, engine: int) -> None:
        """A replacement goes on with its calls: from a chain that a receipt may have named, or from their prompts."""
        for capture in self.table.captures()[engine::4]:
            old = capture.identity
            count = data.draw(st.integers(0, len(capture.keys)), label=f"chunks that {old} is resumed with")
            keys = capture.keys[:count]
            new = old.next_attempt()
            admission = self.table.admit(new, self.now, keys)
            self.unneed(admission.unneeded)
            rows = [self.store[key] for key in keys]
            length = sum(len(row["ids"]) for row in rows)
            self.made[new], self.layers[new] = self.made[old][:length], self.layers[old]
            if keys:
                self.made[new][-1] = True, self.made[new][-1][1]  # it was cut here; its call may have ended here
                versions = np.array([version for _, version in self.made[new]], np.int32)
                run = tokens(0, length, layers=self.layers[new])
                admission.capture.adopt(keys, Chain(run.ids, run.logprobs, versions, run.extras))

    # The cut.

    @precondition(lambda self: self.cut is None)
    @rule(data=st.data(), pack_at_once=st.booleans())
    def begin_cut(self, data: st.DataObject, pack_at_once: bool) -> None:
        strangers = [CallIdentity("r9", "c9"), CallIdentity("r0", "c1", 77)]
        calls = [*strangers, *self.made]
        first = data.draw(st.integers(0, len(calls)), label="first")
        left_out = data.draw(st.integers(0, 2), label="left out")
        self.ask([*calls[first:], *calls[:first]][left_out:])
        if pack_at_once:
            while self.going_on:
                self.go_on()
            for number in sorted(self.packs):
                self.packed(number)

    @precondition(lambda self: self.going_on)
    @rule(whole_way=st.booleans())
    def goes_on(self, whole_way: bool) -> None:
        self.go_on()
        while whole_way and self.going_on:
            self.go_on()

    @precondition(lambda self: self.packs)
    @rule(works=st.sampled_from((True, True, True, False)))
    def packs_end(self, works: bool) -> None:
        for number in sorted(self.packs):
            if works:
                self.packed(number)
            else:
                del self.packs[number]
                self.tell(PackFailed(number, "no memory", self.now))

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), both=st.booleans())
    def puts_end(self, data: st.DataObject, both: bool) -> None:
        numbers = data.draw(st.permutations(sorted(self.puts)), label="puts")
        for number in numbers if both else numbers[:1]:
            self.put_ends(number, data.draw(st.sampled_from(FATES), label="fate"))

    def put_ends(self, number: int, fate: str) -> None:
        batch, packed = self.puts.pop(number)
        first_only = fate in ("wrong_bytes", "missing_key")
        self.doubted.update(() if fate == "ok" else batch.keys[:1] if first_only else batch.keys)
        rows = stored(batch, packed)
        assert not rows.keys() & self.store.keys(), "a key was put twice"
        if fate == "stored_late":
            self.hidden.append(rows)
        elif fate == "stored_half":
            self.store.update(list(rows.items())[: (len(rows) + 1) // 2])
        elif fate not in ("refused", "never_stored"):
            self.store.update(rows)
        if fate in ("refused", "never_stored", "stored_half", "stored_late", "stored"):
            return self.tell(PutFailed(number, fate, fate != "refused", self.now))
        held = [c for chunk in batch.chunks if (c := self.table.get(chunk.identity)) is not None and c.holds(chunk)]
        interrupted = self.cut is not None and self.cut.interrupted
        self.tell(PutDone(number, spoiled(honest(batch, packed), fate), self.now))
        while self.going_on:
            self.go_on()
        for key, chunk in list(zip(batch.keys, batch.chunks, strict=True))[1 if first_only else 0 :]:
            if fate != "wrong_checksum" and not interrupted:
                sealed = [c for c in held if c.identity == chunk.identity]
                assert all(key in c.keys for c in sealed), "a row that was stored well failed with another"
        return None

    @precondition(lambda self: self.clears)
    @rule(works=st.booleans())
    def clear_ends(self, works: bool) -> None:
        number, clear = self.clears.popitem()
        if works:
            self.tell(ClearDone(number, self.remove(clear.keys), self.now))
        else:
            self.tell(ClearFailed(number, self.now))

    @rule(seconds=st.sampled_from((0.5, 1.5, 4.0, 11.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.cut is not None and self.now > self.cut.deadline:
            self.tell(DeadlinePassed(self.now))
        if self.timer is not None and self.timer <= self.now:
            self.tidy(TimerFired(self.now))

    @precondition(lambda self: self.cut is not None)
    @rule(really=st.sampled_from((False, False, True)))
    def interrupt(self, really: bool) -> None:
        if really:
            self.tell(Interrupted(self.now))

    # The plane and the background.

    @precondition(lambda self: self.hidden)
    @rule(really=st.sampled_from((False, False, True)))
    def a_late_publish(self, really: bool) -> None:
        if really:
            self.store.update(self.hidden.pop())

    @precondition(lambda self: self.sweep)
    @rule(works=st.sampled_from((True, True, False)))
    def sweep_ends(self, works: bool) -> None:
        keys, self.sweep = self.sweep, ()
        if works:
            removed = self.remove(keys)
            if removed or not self.doubted & set(keys):
                self.owed -= set(keys)
            self.tidy(SweepDone(removed, self.now))
        else:
            self.tidy(SweepFailed("lost", self.now))

    # How all of this is carried out.

    def deliver(self, flags: dict[CallIdentity, list[bool]]) -> None:
        runs = []
        for identity, new in flags.items():
            made = self.made[identity]
            runs.append(tokens(len(made), len(new), self.version, new, self.layers[identity]))
            made += [(flag, self.version) for flag in new]
        self.table.observe(StepDelta(tuple(flags), tuple(runs), {}))

    def ask(self, calls: Sequence[CallIdentity]) -> None:
        self.inventory = Inventory.of(f"k{self.receipts}", calls)
        self.tries.clear()
        self.cut = CutTransaction(self.inventory, self.table, SMALL, rows_at_once=2)
        self.tell(Started(self.now))

    def go_on(self) -> None:
        self.going_on = False
        self.tell(GoneOn(self.now))

    def acknowledge(self, number: int) -> None:
        """A PUT goes well."""
        batch, packed = self.puts.pop(number)
        self.store.update(stored(batch, packed))
        self.tell(PutDone(number, honest(batch, packed), self.now))

    def packed(self, number: int) -> None:
        self.ready = self.packs.pop(number)
        self.tell(BatchPacked(number, self.ready[1].sent, self.now))

    def tell(self, event: Event) -> None:
        assert self.cut is not None
        for instruction in self.cut.handle(event):
            self.obey(instruction)

    def obey(self, instruction: Instruction) -> None:
        assert self.cut is not None
        match instruction:
            case GoOn():
                assert not self.going_on
                self.going_on = True
            case PackBatch(number, keys, chunks):
                self.packs[number] = instruction, pack(keys, chunks)
                self.check_batch(instruction)
            case PutBatch(number):
                assert self.now <= self.cut.deadline, "a write started after the deadline"
                assert not self.cut.interrupted, "a write started after the interruption"
                self.puts[number] = self.ready
            case ClearKeys(number):
                self.clears[number] = instruction
            case LeaveKeys(keys, in_doubt):
                self.owed.update(keys)
                self.tidy(Discard(keys, in_doubt, self.now))
            case Deliver(receipt):
                assert not (self.packs or self.puts or self.clears or self.going_on), (
                    "the receipt came before all was settled"
                )
                self.cut = None
                self.receipts += 1
                self.check(receipt)

    def tidy(self, event: CleanupEvent) -> None:
        for instruction in self.cleanup.handle(event):
            match instruction:
                case StartClear(keys):
                    assert not self.sweep, "two clears at once"
                    self.sweep = keys
                case SetTimer(at):
                    self.timer = at

    def unneed(self, keys: Sequence[str]) -> None:
        self.owed.update(keys)
        if keys:
            self.tidy(Unneed(tuple(keys), self.now))

    def remove(self, keys: Sequence[str]) -> int:
        return sum(self.store.pop(key, None) is not None for key in keys)

    def trusted(self) -> list[Any]:
        return [c for c in self.table.captures() if c.state is not State.POISONED]

    # What must hold.

    def check_batch(self, batch: PackBatch) -> None:
        for chunk in batch.chunks:
            place = chunk.identity.rollout_id, str(chunk.identity), chunk.start
            self.tries[place] = self.tries.get(place, 0) + 1
            assert self.tries[place] <= 2, "a row was put more often than in its batch and alone"
        lengths = [chunk.tokens for chunk in batch.chunks]
        assert len({chunk.layout for chunk in batch.chunks}) == 1
        assert len(lengths) == 1 or (len(lengths) <= 3 and sum(lengths) <= 8 and batch.nbytes <= 90)

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
        assert self.store.keys() - self.owed - self.doubted <= sealed, "rows were left that no call received"
        assert sealed <= self.store.keys()
        assert all(capture.state is not State.FROZEN for capture in self.table.captures())

    def check_prefix(self, answer: Acknowledgement) -> None:
        made, layers = self.made[answer.identity], self.layers[answer.identity]
        run = tokens(0, answer.tokens, layers=layers)
        versions = np.array([version for _, version in made[: answer.tokens]], np.int32)
        whole = Chain(run.ids, run.logprobs, versions, run.extras)
        assert answer.digest == ChainDigest.of(whole).hexdigest()
        if answer.keys:
            assert answer.extras == (("routes",) if layers else ())
        if answer.keys and self.table.get(answer.identity) is not None:
            assert joined(self.store[key] for key in answer.keys) == joined([as_row(whole)])
        if answer.finish_reason is not None:
            assert answer.tokens == len(made), "only part of a call was said to be all of it"

    @invariant()
    def captures_hold_the_truth(self) -> None:
        """Invariants 2, 7 and 8 at every moment."""
        if not hasattr(self, "table"):
            return
        for capture in self.table.captures():
            made, sealed = self.made[capture.identity], capture.sealed_tokens
            assert [t for key in capture.keys for t in self.store[key]["ids"]] == list(range(sealed))
            assert sealed + capture.live_tokens == len(made)
            assert not self.doubted & set(capture.keys), "sealed without a valid acknowledgement"
            assert sealed == 0 or made[sealed - 1][0] or capture.finish_reason is not None
        assert len(self.puts) + len(self.packs) <= PUTS_IN_FLIGHT

    def teardown(self) -> None:
        """From wherever it got to, a cut without faults has every token of every call; nothing else stays stored."""
        if not hasattr(self, "table"):
            return
        self.settle()
        for capture in self.table.captures():
            capture.end("stop")
        self.ask(self.table.active())
        self.settle()
        for capture in self.table.captures():
            assert capture.state is State.POISONED or capture.live_tokens == 0
        while self.hidden:
            self.a_late_publish(True)
        while self.sweep or self.timer is not None:
            if not self.sweep:
                self.now, self.timer = max(self.now, self.timer or 0.0), None
                self.tidy(TimerFired(self.now))
            else:
                self.sweep_ends(True)
        assert self.store.keys() == {key for c in self.table.captures() for key in c.keys}, "rows were left behind"
        assert self.cleanup.drained and self.cleanup.statistics()["cleanup_in_doubt"] == 0

    def settle(self) -> None:
        """The cut under way goes on without faults."""
        while self.cut is not None:
            assert self.packs or self.puts or self.clears or self.going_on, (
                "the cut waits for nothing and does not deliver"
            )
            while self.going_on:
                self.go_on()
            for number in sorted(self.packs):
                self.packed(number)
            for number in sorted(self.puts):
                self.acknowledge(number)
            while self.clears:
                self.clear_ends(True)


def honest(batch: PackBatch, packed: Packed) -> PutAck:
    """The acknowledgement of a unit that stored everything."""
    row_bytes = np.asarray(sum(column.row_bytes() for column in packed.columns.values()))
    return PutAck("u0", 1, batch.keys, tuple(row_bytes.tolist()), packed.sent.checksum)


def stored(batch: PackBatch, packed: Packed) -> dict[str, Row]:
    return {
        key: {name: column.row(i).tolist() for name, column in packed.columns.items()}
        for i, key in enumerate(batch.keys)
    }


def as_row(chain: Chain) -> Row:
    arrays = {"ids": chain.ids, "logprobs": chain.logprobs, "versions": chain.versions, **chain.extras}
    return {name: array.tolist() for name, array in arrays.items()}


def joined(rows: Any) -> Row:
    whole: Row = {}
    for row in rows:
        for name, values in row.items():
            whole[name] = whole.get(name, []) + values
    return whole
