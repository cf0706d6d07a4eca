"""The coordinator over a plane that misbehaves: cuts interleave with observation, cancellation and everything that ends
calls, and in the end a cut without faults holds exactly what the engine produced."""

from __future__ import annotations

import asyncio
import pickle
import tracemalloc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import cut_run
from actors.cut_coordinator import CutCoordinator
from policies.answers import PutAck
from policies.calls import CallIdentity, StepDelta, Tokens
from policies.chain import Chain, ChainDigest
from policies.checksums import block_checksum
from policies.chunks import Packed, pack
from policies.cleanup import CleanupLimits
from policies.config import RolloutRecoveryConfig
from policies.cut import CutTransaction
from policies.errors import CleanupFailed, ClosedError, CutRefused, Refused
from policies.receipts import Continuation, Inventory, Receipt
from tests.fake_plane import PUT_FAULTS, FakePlane
from tests.generated_tokens import chain, request, tokens

CALLS = tuple(CallIdentity("r0", f"c{i}") for i in range(5))
SMALL = RolloutRecoveryConfig(generation_prefix_batch_size=2)
AT_ONCE = CleanupLimits(attempts=100, retry_after_s=0.0, looks_after_s=(0.0,) * 8)


def coordinator_of(plane: FakePlane, config: RolloutRecoveryConfig = SMALL) -> CutCoordinator:
    return CutCoordinator(plane, config, limits=AT_ONCE)


class Engine:
    """Numbered tokens for each call, told to a coordinator step by step."""

    def __init__(self, coordinator: CutCoordinator, calls: tuple[CallIdentity, ...] = CALLS) -> None:
        self.coordinator = coordinator
        self.made = dict.fromkeys(calls, 0)
        for call in calls:
            coordinator.begin(call)

    def step(self, count: int = 1, finished: dict[CallIdentity, str] | None = None) -> None:
        parts: list[Tokens] = []
        for call, made in self.made.items():
            parts.append(tokens(made, count))
            self.made[call] = made + count
        self.coordinator.observe([StepDelta(tuple(self.made), tuple(parts), finished or {})])


async def settled(coordinator: CutCoordinator, plane: FakePlane, engine: Engine) -> Receipt:
    """A last cut, with what must hold after it: every active call's chain is exactly what was produced, nothing else is
    stored, also after everything that units kept back was published."""
    receipt = await coordinator.cut(Inventory.of("last", coordinator.active_calls()))
    plane.publish_late()
    while coordinator.statistics()["cleanup_in_doubt"]:
        await asyncio.sleep(0)
    await coordinator.drain()
    stored: list[str] = []
    for answer in receipt.acknowledgements:
        assert answer.disposition == "durable_prefix", answer
        ids = [int(token) for key in answer.keys for token in plane.rows[key]["ids"]]
        assert ids == list(range(engine.made[answer.identity]))
        assert answer.digest == ChainDigest.of(chain(len(ids))).hexdigest()
        stored += answer.keys
    assert set(plane.rows) == set(stored)
    return receipt


@given(
    st.lists(st.sampled_from(("ok", "ok", *PUT_FAULTS)), max_size=14),
    st.lists(st.sampled_from(("ok", "fail")), max_size=4),
    st.lists(st.integers(0, 25), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 25), st.sampled_from(("finish", "abort")), st.integers(0, 4)), max_size=3),
)
@settings(max_examples=80)
def test_nothing_is_lost_doubled_or_left_behind(
    puts: list[str], clears: list[str], cancel_at: list[int], endings: list[tuple[int, str, int]]
) -> None:
    """Invariants 2 to 5 and 7: cuts are cancelled at any turn, puts and clears fail in every way, calls end."""

    async def scenario() -> None:
        plane = FakePlane(puts, clears)
        coordinator = coordinator_of(plane)
        engine = Engine(coordinator)
        for number, turns in enumerate(cancel_at):
            if number % 2:
                plane.publish_late()
            inventory = Inventory.of(f"k{number}", CALLS)
            cut = asyncio.ensure_future(coordinator.cut(inventory))
            for turn in range(turns):
                engine.step()
                for at, how, index in endings:
                    if at == turn and CALLS[index] in engine.made:
                        reason = ("stop",) if how == "finish" else ()
                        await getattr(coordinator, how)(CALLS[index], *reason)
                        del engine.made[CALLS[index]]
                await asyncio.sleep(0)
            cut.cancel()
            (answer,) = await asyncio.gather(cut, return_exceptions=True)
            if isinstance(answer, Receipt):
                assert tuple(a.identity for a in answer.acknowledgements) == CALLS
                assert await coordinator.cut(inventory) is answer
        plane.heal()
        engine.step()
        await settled(coordinator, plane, engine)

    asyncio.run(scenario())


async def test_decoding_goes_on_during_a_cut_and_the_next_cut_stages_only_what_is_new() -> None:
    plane = FakePlane(["hang"])
    coordinator = coordinator_of(plane, RolloutRecoveryConfig())
    engine = Engine(coordinator)
    engine.step(3)
    cut = asyncio.ensure_future(coordinator.cut(Inventory.of("a", CALLS)))
    while not plane.put_keys:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
        engine.step()
    assert not cut.done()
    plane.gate.set()
    first = await cut
    assert [a.tokens for a in first.acknowledgements] == [3] * 5
    second = await settled(coordinator, plane, engine)
    assert [(a.tokens, len(a.keys)) for a in second.acknowledgements] == [(13, 2)] * 5
    assert [plane.tags[key] for key in second.acknowledgements[0].keys] == [
        {"rollout_id": "r0", "call_id": "c0", "attempt": 0, "index": 0, "start": 0, "tokens": 3},
        {"rollout_id": "r0", "call_id": "c0", "attempt": 0, "index": 1, "start": 3, "tokens": 10},
    ]
    assert second.numbers["puts"] == 1 and second.numbers["tokens"] == 50
    assert {"freeze_s", "pack_s", "write_s", "seal_s", "longest_frozen_s", "longest_unsealed_s"} <= set(second.numbers)
    assert first.numbers["decode_during_per_s"] > 0
    assert pickle.loads(pickle.dumps(second)) == second


async def test_the_same_question_has_the_same_answer_without_a_write() -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    Engine(coordinator).step()
    inventory = Inventory.of("a", CALLS)
    first = await coordinator.cut(inventory)
    puts = len(plane.put_keys)
    assert await coordinator.cut(inventory) == first
    assert len(plane.put_keys) == puts


async def test_a_second_cut_is_told_that_one_runs() -> None:
    plane = FakePlane(["hang"])
    coordinator = coordinator_of(plane)
    Engine(coordinator).step()
    first = asyncio.ensure_future(coordinator.cut(Inventory.of("a", CALLS)))
    await asyncio.sleep(0)
    with pytest.raises(CutRefused, match="another one runs"):
        await coordinator.cut(Inventory.of("b", CALLS))
    plane.gate.set()
    await first
    await coordinator.cut(Inventory.of("b", CALLS))


async def test_an_inventory_that_does_not_match_its_digest_is_refused() -> None:
    with pytest.raises(CutRefused, match="digest"):
        await coordinator_of(FakePlane()).cut(Inventory("a", CALLS, "0"))


async def test_the_deadline_comes_while_a_put_hangs() -> None:
    plane = FakePlane(["hang", "hang"])
    config = RolloutRecoveryConfig(generation_prefix_batch_size=1, control_timeout_s=0.05)
    coordinator = coordinator_of(plane, config)
    engine = Engine(coordinator)
    engine.step()
    cut = asyncio.ensure_future(coordinator.cut(Inventory.of("a", CALLS)))
    await asyncio.sleep(2 * config.control_timeout_s)
    assert coordinator.statistics()["calls_frozen"] == 2
    plane.gate.set()
    receipt = await cut
    assert [a.reason for a in receipt.acknowledgements] == [None, None] + ["control_deadline"] * 3
    assert len(plane.put_keys) == 2


async def test_a_cut_that_breaks_off_leaves_the_tokens_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    engine = Engine(coordinator)
    engine.step(3)

    def broken(*_: object) -> None:
        raise RuntimeError("a fault in the cut itself")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(CutTransaction, "_begin_put", broken)
        await coordinator.cut(Inventory.of("a", CALLS))
    await settled(coordinator, plane, engine)


@pytest.mark.parametrize("on_the_loop", [0, 1 << 30])
async def test_a_batch_that_cannot_be_packed_costs_nobody_else(
    on_the_loop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    engine = Engine(coordinator)
    engine.step(3)

    def exhausted(keys: tuple[str, ...], chunks: tuple[Any, ...], pause: Any) -> Packed:
        if any(chunk.identity == CALLS[2] for chunk in chunks):
            raise MemoryError("no room to pack a batch")
        return pack(keys, chunks, pause)

    with monkeypatch.context() as patch:
        patch.setattr(cut_run, "PACKED_ON_THE_LOOP", on_the_loop)
        patch.setattr(cut_run, "pack", exhausted)
        receipt = await coordinator.cut(Inventory.of("a", CALLS))
    assert [a.reason for a in receipt.acknowledgements] == [None, None, "cut_error", None, None]
    assert "no room" in receipt.acknowledgements[2].cause
    await settled(coordinator, plane, engine)


class Counting(FakePlane):
    """Stores nothing, and knows how many bytes of columns it was given that somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[Any]] = []
        self.most = 0

    async def put(self, partition: str, keys: Any, fields: Any, **_: Any) -> PutAck:
        buffers = [
            column.values.base if column.values.base is not None else column.values for column in fields.values()
        ]
        self.held += [weakref.ref(buffer) for buffer in buffers]
        self.most = max(self.most, sum(b.nbytes for ref in self.held if (b := ref()) is not None))
        row_bytes = sum(column.row_bytes() for column in fields.values()).tolist()
        ack = PutAck("u0", 1, tuple(keys), tuple(row_bytes), block_checksum(fields))
        del buffers, fields
        for _turn in range(3):
            await asyncio.sleep(0)
        return ack


@pytest.mark.parametrize("calls", [8, 64])
async def test_the_memory_of_a_cut_with_routes_is_bounded_by_two_batches(calls: int) -> None:
    """Routes of 48 layers, top 8; measured twice: what was allocated, and which packed buffers were alive at once."""
    limit, length = 1 << 20, 300
    row = length * (12 + 48 * 8 * 2)
    plane = Counting()
    coordinator = coordinator_of(plane, RolloutRecoveryConfig(generation_prefix_batch_max_bytes=limit))
    names = tuple(CallIdentity("r0", f"c{i}") for i in range(calls))
    run = tokens(0, length)
    run = Tokens(run.ids, run.logprobs, run.versions, run.cuttable, {"routes": np.zeros((length, 48, 8), np.int16)})
    for name in names:
        coordinator.begin(name)
        coordinator.observe([StepDelta((name,), (run,), {})])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        receipt = await coordinator.cut(Inventory.of("a", names))
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    rows_a_batch = limit // row
    assert receipt.numbers["puts"] == calls // rows_a_batch
    assert receipt.numbers["largest_put_bytes"] == rows_a_batch * row <= limit
    assert plane.most <= 2 * limit
    assert peak <= 2 * limit + 300_000, "beside two batches: receipt, digests, tags"


async def test_closing_interrupts_a_cut_and_clears_what_it_wrote() -> None:
    plane = FakePlane(["hang"])
    coordinator = coordinator_of(plane)
    Engine(coordinator).step()
    cut = asyncio.ensure_future(coordinator.cut(Inventory.of("a", CALLS)))
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(coordinator.close())
    await asyncio.sleep(0)
    plane.gate.set()
    receipt = await cut
    await closing
    assert {a.reason for a in receipt.acknowledgements} == {"interrupted"}
    assert plane.rows == {} and plane.closed
    with pytest.raises(ClosedError):
        await coordinator.cut(Inventory.of("b", CALLS))
    with pytest.raises(ClosedError):
        coordinator.begin(CallIdentity("r1", "c1"))


async def test_a_finished_call_is_terminal_and_its_chunks_go() -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    engine = Engine(coordinator)
    engine.step(2)
    await coordinator.cut(Inventory.of("a", CALLS))
    engine.step(1, {CALLS[0]: "length"})
    await coordinator.finish(CALLS[0], "stop")
    await coordinator.drain()
    assert CALLS[0] not in coordinator.active_calls()
    assert not any(key.startswith(str(CALLS[0])) for key in plane.rows)
    receipt = await coordinator.cut(Inventory.of("b", CALLS))
    terminal = receipt.acknowledgements[0]
    assert (terminal.disposition, terminal.finish_reason, terminal.tokens) == ("durable_prefix", "length", 3)
    assert terminal.keys == () and terminal.digest == ChainDigest.of(chain(3)).hexdigest()


async def test_a_fence_keeps_the_chunks_of_calls_that_finish_during_a_save() -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    Engine(coordinator).step()
    receipt = await coordinator.cut(Inventory.of("a", CALLS))
    await coordinator.pause_cleanup(1)
    for call in CALLS:
        await coordinator.finish(call, "stop")
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(plane.rows) == {key for a in receipt.acknowledgements for key in a.keys}
    coordinator.resume_cleanup(1)
    await coordinator.drain()
    assert plane.rows == {}


def continuation(call: CallIdentity, keys: tuple[str, ...], count: int, max_tokens: int = 1000) -> Continuation:
    return Continuation(request(call, max_tokens), keys, count, ChainDigest.of(chain(count)).hexdigest())


async def test_a_resumed_call_goes_on_from_its_chain() -> None:
    plane = FakePlane()
    old = coordinator_of(plane)
    engine = Engine(old)
    engine.step(4)
    receipt = await old.cut(Inventory.of("a", CALLS))
    new = coordinator_of(plane)
    lives = tuple(call.next_attempt() for call in CALLS)
    for life, answer in zip(lives, receipt.acknowledgements, strict=True):
        for _ in range(2):  # a message that is sent again changes nothing
            new.adopt(continuation(life, answer.keys, 4), chain(4))
    new.observe([StepDelta(lives, tuple(tokens(4, 2) for _ in lives), {})])
    engine.made = dict.fromkeys(lives, 6)
    second = await settled(new, plane, engine)
    assert second.acknowledgements[0].keys == (CALLS[0].chunk_key(0), lives[0].chunk_key(1))
    for life in lives:
        await new.finish(life, "stop")
    await new.drain()
    assert plane.rows == {}


async def test_a_chain_that_is_the_whole_call_is_terminal_at_once() -> None:
    coordinator = coordinator_of(FakePlane())
    coordinator.adopt(continuation(CALLS[0], (CALLS[0].chunk_key(0),), 4, max_tokens=4), chain(4))
    receipt = await coordinator.cut(Inventory.of("a", CALLS[:1]))
    assert receipt.acknowledgements[0].finish_reason == "length"


async def test_a_takeover_keeps_the_chain_and_clears_what_lies_outside_it() -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    engine = Engine(coordinator, CALLS[:1])
    engine.step(3)
    await coordinator.cut(Inventory.of("a", CALLS[:1]))
    engine.step(2)
    await coordinator.cut(Inventory.of("b", CALLS[:1]))
    life = CALLS[0].next_attempt()
    coordinator.adopt(continuation(life, (CALLS[0].chunk_key(0),), 3), chain(3))
    await coordinator.drain()
    assert coordinator.active_calls() == (life,)
    assert set(plane.rows) == {CALLS[0].chunk_key(0)}
    with pytest.raises(Refused, match="attempt 1"):
        coordinator.begin(CallIdentity("r0", "c0", 0))


async def test_a_call_that_ended_is_not_begun_again() -> None:
    coordinator = coordinator_of(FakePlane())
    coordinator.begin(CALLS[0])
    coordinator.begin(CALLS[0])
    await coordinator.abort(CALLS[0])
    with pytest.raises(Refused, match="next attempt"):
        coordinator.begin(CALLS[0])


async def test_one_nonsense_delta_costs_one_call() -> None:
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    coordinator.expect_vocabulary(1000)
    engine = Engine(coordinator)
    engine.step()
    coordinator.observe([StepDelta((CALLS[2],), (tokens(-1, 1),), {})])
    receipt = await coordinator.cut(Inventory.of("a", CALLS))
    assert [a.reason for a in receipt.acknowledgements] == [None, None, "poisoned", None, None]
    assert coordinator.statistics()["poisoned"] == 1


async def test_an_engine_that_reports_nothing_is_never_cut_and_takes_all_knobs() -> None:
    """An engine without cut support: its calls regenerate, which is always right."""
    coordinator = coordinator_of(FakePlane(), RolloutRecoveryConfig(1, 1, 1, 0.5))
    for call in CALLS:
        coordinator.begin(call)
    receipt = await coordinator.cut(Inventory.of("a", CALLS))
    assert {a.reason for a in receipt.acknowledgements} == {"no_tokens"}


async def test_what_could_not_be_cleared_is_said() -> None:
    plane = FakePlane(clears=["fail"] * 100)
    coordinator = coordinator_of(plane)
    Engine(coordinator).step()
    await coordinator.cut(Inventory.of("a", CALLS))
    await coordinator.finish(CALLS[0], "stop")
    with pytest.raises(CleanupFailed, match="1 rows stay behind"):
        await coordinator.drain()


async def test_a_step_whose_lists_disagree_costs_its_calls_only() -> None:
    coordinator = coordinator_of(FakePlane())
    Engine(coordinator).step()
    coordinator.observe([StepDelta(CALLS[:2], (tokens(1, 1),), {})])
    receipt = await coordinator.cut(Inventory.of("a", CALLS))
    assert [a.reason for a in receipt.acknowledgements] == ["poisoned", "poisoned", None, None, None]


async def test_unexpected_aborts_of_the_engine_are_counted_and_not_sealed_as_complete() -> None:
    """Setting a new weight version aborts what a pause had kept."""
    plane = FakePlane()
    coordinator = coordinator_of(plane)
    engine = Engine(coordinator)
    engine.step(2, dict.fromkeys(CALLS, "abort"))
    receipt = await settled(coordinator, plane, engine)
    assert [a.finish_reason for a in receipt.acknowledgements] == [None] * 5
    assert all("abort" in a.cause for a in receipt.acknowledgements)
    assert coordinator.statistics()["unexpected_ends"] == 5


async def test_tokens_of_a_call_nobody_began_are_counted_and_dropped() -> None:
    coordinator = coordinator_of(FakePlane())
    coordinator.observe([StepDelta(CALLS[:1], (tokens(5, 1),), {})])
    assert coordinator.statistics()["deltas_of_unknown_calls"] == 1
    assert coordinator.active_calls() == ()


def test_a_chain_is_no_less_than_what_crosses_a_process() -> None:
    whole: Any = pickle.loads(pickle.dumps(chain(3)))
    assert isinstance(whole, Chain) and whole.ids.tolist() == [0, 1, 2]
