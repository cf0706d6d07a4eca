"""A leader in one process: real engine (tiny), coordinator, coalescer and plane, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from actors.client import AsyncDataPlaneClient
from actors.cut_coordinator import CutCoordinator
from actors.engines.registry import EngineSpec
from actors.generation_worker import TRAIN, Completion, GenerationWorker
from actors.read_coalescer import ReadCoalescer
from policies.calls import CallIdentity, GenerationRequest, StepDelta
from policies.config import CoalescerConfig, RolloutRecoveryConfig
from policies.errors import ClosedError, EngineError, FingerprintMismatch
from policies.receipts import DURABLE_PREFIX, Acknowledgement, Continuation, Inventory
from tests.handles import Handle
from tests.plane_in_process import InProcessPlane, in_process_plane

PROMPT = (256, 72, 105)
TINY = EngineSpec("tiny", {})


class Leader:
    """One leader over a plane; several may follow each other on the same plane, as before and after a restart."""

    def __init__(self, plane: InProcessPlane, engine: EngineSpec = TINY, weight_version: int = 0) -> None:
        self.plane = plane
        self.coordinator = CutCoordinator(plane.address, RolloutRecoveryConfig())
        self.coalescer = ReadCoalescer(plane.address, CoalescerConfig())
        self.worker = GenerationWorker(
            engine, plane.address, Handle(self.coordinator), Handle(self.coalescer), weight_version
        )

    async def cut(self, identity: CallIdentity, tokens: int) -> Acknowledgement:
        """Cut ``identity`` once it has at least ``tokens`` tokens."""
        await until(lambda: self.made(identity) >= tokens)
        receipt = await self.coordinator.cut(Inventory.of(f"cut-{tokens}", [identity]))
        return receipt.acknowledgements[0]

    def made(self, identity: CallIdentity) -> int:
        return sum(step.tokens.get(identity, 0) for step in self.worker._steps)

    async def row(self, key: str) -> dict[str, np.ndarray]:
        client = AsyncDataPlaneClient(self.plane.address)
        try:
            ((_, row),) = (await client.get(TRAIN, [key])).rows()
            return row
        finally:
            await client.close()

    async def close(self) -> None:
        await self.worker.close()
        await self.coordinator.close()
        await self.coalescer.close()


Start = Callable[..., Leader]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    with in_process_plane() as plane:
        leaders: list[Leader] = []

        def begin(*arguments: object, **options: object) -> Leader:
            leaders.append(Leader(plane, *arguments, **options))  # type: ignore[arg-type]
            return leaders[-1]

        yield begin
        for leader in leaders:
            await leader.close()


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.005)

    await asyncio.wait_for(poll(), seconds)


def request(call: str = "c0", max_tokens: int = 400, rollout: str = "r0") -> GenerationRequest:
    return GenerationRequest(CallIdentity(rollout, call), PROMPT, max_tokens, temperature=0.9, seed=7)


def following(acknowledgement: Acknowledgement, first: GenerationRequest) -> Continuation:
    return Continuation.of(acknowledgement, first.with_identity(first.identity.next_attempt()))


async def interrupted(leader: Leader, first: GenerationRequest, *cuts: int) -> Acknowledgement:
    """Start a call, cut it at ``cuts``, and abandon it as a stop would."""
    running = asyncio.create_task(leader.worker.generate(first))
    for tokens in cuts:
        acknowledgement = await leader.cut(first.identity, tokens)
    running.cancel()
    return acknowledgement


async def test_a_finished_call_is_a_row_and_no_chunk_is_left(start: Start) -> None:
    leader = start()
    first = request()
    running = asyncio.create_task(leader.worker.generate(first))
    assert (await leader.cut(first.identity, 20)).disposition == DURABLE_PREFIX
    completion = await running
    assert completion == Completion(first.identity, "r0/c0", 400, "length")
    row = await leader.row("r0/c0")
    assert {name: (a.dtype.name, a.shape) for name, a in row.items()} == {
        "ids": ("int32", (400,)), "logprobs": ("float32", (400,)), "versions": ("int32", (400,)),
    }  # fmt: skip
    await leader.coordinator.drain()
    client = AsyncDataPlaneClient(leader.plane.address)
    assert await client.list("staging") == []
    assert [key for key, _ in await client.list(TRAIN)] == ["r0/c0"]
    await client.close()


@pytest.mark.parametrize("mode", ["exact", "fast"])
async def test_a_cut_call_goes_on_under_another_leader_as_if_nothing_had_happened(start: Start, mode: str) -> None:
    before, after = start(), start()
    await before.worker.generate(request("c0", rollout="reference"))
    wanted = await before.row("reference/c0")
    first = request()
    acknowledgement = await interrupted(before, first, 50, 90)
    assert len(acknowledgement.keys) == 2 and acknowledgement.tokens >= 80
    completion = await after.worker.resume(following(acknowledgement, first), mode)  # type: ignore[arg-type]
    assert (completion.tokens, completion.prefix_tokens) == (400, acknowledgement.tokens)
    assert completion.refusal is None
    row = await after.row("r0/c0")
    assert np.array_equal(row["ids"], wanted["ids"])
    if mode == "exact":
        assert row["logprobs"].tobytes() == wanted["logprobs"].tobytes()
    assert after.made(completion.identity) == 400 - acknowledgement.tokens, "tokens of the prefix are not made again"
    assert after.coalescer.statistics()["chains_restored"] == 1


async def test_a_resumed_call_can_be_cut_again_and_its_chain_grows(start: Start) -> None:
    before, after, last = start(), start(), start()
    first = request()
    acknowledgement = await interrupted(before, first, 40)
    second = following(acknowledgement, first)
    running = asyncio.create_task(after.worker.resume(second, "exact"))
    again = await after.cut(second.request.identity, 30)
    running.cancel()
    assert again.keys[: len(acknowledgement.keys)] == acknowledgement.keys
    assert len(again.keys) == len(acknowledgement.keys) + 1 and again.tokens > acknowledgement.tokens
    completion = await last.worker.resume(following(again, second.request), "exact")
    assert (completion.tokens, completion.prefix_tokens) == (400, again.tokens)


async def test_a_chain_that_does_not_verify_is_regenerated_and_counted(start: Start) -> None:
    before, after = start(), start()
    first = request()
    acknowledgement = await interrupted(before, first, 50)
    forged = replace(acknowledgement, digest="0" * 32)
    completion = await after.worker.resume(following(forged, first), "exact")
    assert completion.refusal is not None and completion.refusal.reason == "wrong_digest"
    assert (completion.tokens, completion.prefix_tokens) == (400, 0)
    statistics = after.coalescer.statistics()
    assert statistics["refused_wrong_digest"] == 1 and "chains_restored" not in statistics
    client = AsyncDataPlaneClient(after.plane.address)
    assert await client.list("staging") == [], "nobody needs the chunks of a refused chain"
    await client.close()


async def test_a_chain_whose_rows_are_gone_is_regenerated(start: Start) -> None:
    before, after = start(), start()
    first = request()
    acknowledgement = await interrupted(before, first, 50)
    client = AsyncDataPlaneClient(before.plane.address)
    await client.clear("staging", acknowledgement.keys)
    await client.close()
    completion = await after.worker.resume(following(acknowledgement, first), "exact")
    assert completion.refusal is not None and completion.refusal.reason == "chunk_missing"
    assert completion.tokens == 400


async def test_tokens_newer_than_the_weights_are_not_trusted(start: Start) -> None:
    after = start(weight_version=-1)
    before = start()
    first = request()
    acknowledgement = await interrupted(before, first, 50)
    completion = await after.worker.resume(following(acknowledgement, first), "exact")
    assert completion.refusal is not None and completion.refusal.reason == "version_too_new"


async def test_every_token_keeps_the_version_of_the_weights_that_made_it(start: Start) -> None:
    before, after = start(weight_version=3), start(weight_version=6)
    first = request()
    acknowledgement = await interrupted(before, first, 50)
    completion = await after.worker.resume(following(acknowledgement, first), "exact")
    assert completion.refusal is None
    versions = (await after.row("r0/c0"))["versions"].tolist()
    assert versions == [3] * acknowledgement.tokens + [6] * (400 - acknowledgement.tokens)


async def test_a_call_cut_at_its_end_needs_no_engine(start: Start) -> None:
    before, after = start(), start(EngineSpec("tiny", {"rows": 1}))
    first = request(max_tokens=30)

    async def not_told(*_: object) -> None:
        """The leader stops between the last token and this message."""

    before.coordinator.finish = not_told  # type: ignore[assignment, method-assign]
    await before.worker.generate(first)
    acknowledgement = await before.cut(first.identity, 30)
    assert (acknowledgement.tokens, acknowledgement.finish_reason) == (30, "length")
    completion = await after.worker.resume(following(acknowledgement, first), "exact")
    assert (completion.tokens, completion.finish_reason) == (30, "length")
    assert after.made(completion.identity) == 0


async def test_an_unknown_resume_mode_is_refused(start: Start) -> None:
    leader = start()
    with pytest.raises(EngineError, match=r"'slow'.*'exact', 'fast'"):
        await leader.worker.resume(Continuation(request(), (), 0, ""), "slow")  # type: ignore[arg-type]


async def test_a_call_that_was_never_cut_starts_from_its_prompt(start: Start) -> None:
    leader = start()
    completion = await leader.worker.resume(Continuation(request(), (), 0, ""), "exact")
    assert (completion.tokens, completion.prefix_tokens, completion.refusal) == (400, 0, None)


async def test_an_engine_of_another_model_resumes_nothing(start: Start) -> None:
    before, after = start(), start(EngineSpec("tiny", {"seed": 1}))
    first = request()
    acknowledgement = await interrupted(before, first, 50)
    made_by = asdict(await before.worker.ready())
    with pytest.raises(FingerprintMismatch, match=r"model 'tiny-0.*this job has 'tiny-1"):
        await after.worker.resume(following(acknowledgement, first), "exact", made_by)
    assert after.coordinator.active_calls() == ()


async def test_an_engine_that_cannot_load_fails_its_calls_by_name(start: Start) -> None:
    leader = start(EngineSpec("nosuch"))
    for attempt in (leader.worker.ready, lambda: leader.worker.generate(request())):
        with pytest.raises(EngineError, match="'nosuch'"):
            await attempt()


async def test_a_call_the_engine_cannot_take_fails_alone(start: Start) -> None:
    leader = start(EngineSpec("tiny", {"max_context": 100}))
    results = await asyncio.gather(
        leader.worker.generate(request("long", 400)), leader.worker.generate(request("short", 50)),
        return_exceptions=True,
    )  # fmt: skip
    assert isinstance(results[0], EngineError) and "100" in str(results[0])
    assert isinstance(results[1], Completion) and results[1].tokens == 50
    assert leader.coordinator.active_calls() == (), "nobody could go on with a call that no engine takes"


async def test_an_aborted_call_ends_for_its_caller_and_its_chunks_go(start: Start) -> None:
    leader = start()
    first = request(max_tokens=4000)
    running = asyncio.create_task(leader.worker.generate(first))
    await leader.cut(first.identity, 20)
    await leader.worker.abort(first.identity)
    with pytest.raises(EngineError, match="was aborted"):
        await running
    await leader.coordinator.drain()
    client = AsyncDataPlaneClient(leader.plane.address)
    assert await client.list("staging") == [] and leader.coordinator.active_calls() == ()
    await client.close()


async def test_a_call_that_runs_is_not_started_twice(start: Start) -> None:
    leader = start()
    first = request(max_tokens=300)
    running = asyncio.create_task(leader.worker.generate(first))
    await until(lambda: leader.made(first.identity) > 0)
    with pytest.raises(EngineError, match="already"):
        await leader.worker.generate(first)
    assert (await running).tokens == 300, "the first is not hurt by the second"


async def test_an_abort_while_the_engine_is_still_loading_is_not_lost(start: Start) -> None:
    leader = start()
    first = request(max_tokens=4000)
    running = asyncio.create_task(leader.worker.generate(first))
    await asyncio.sleep(0)
    await leader.worker.abort(first.identity)
    with pytest.raises(EngineError, match="was aborted"):
        await running
    assert (await leader.worker.generate(request("other", 20))).tokens == 20
    assert leader.made(first.identity) == 0
    assert leader.coordinator.active_calls() == ()


async def test_closing_answers_everybody_and_leaves_the_tokens_with_the_coordinator(start: Start) -> None:
    leader = start()
    first = request(max_tokens=4000)
    running = asyncio.create_task(leader.worker.generate(first))
    await until(lambda: leader.made(first.identity) > 20)
    await leader.worker.close()
    with pytest.raises(ClosedError):
        await running
    receipt = await leader.coordinator.cut(Inventory.of("after", [first.identity]))
    assert receipt.acknowledgements[0].tokens > 10
    with pytest.raises(ClosedError):
        await leader.worker.generate(request("late"))


async def test_a_replacement_takes_the_calls_of_a_dead_engine_over(start: Start) -> None:
    """The coordinator outlives the engine: it is cut as ever, and a new worker beside it goes on with its chains."""
    leader = start()
    await leader.worker.generate(request("c0", rollout="reference"))
    wanted = await leader.row("reference/c0")
    first = request()
    running = asyncio.create_task(leader.worker.generate(first))
    assert (await leader.cut(first.identity, 30)).disposition == DURABLE_PREFIX
    await until(lambda: leader.made(first.identity) >= 60)

    def dies() -> StepDelta:
        raise MemoryError("the GPU is gone")

    (await leader.worker._engine).step = dies  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the GPU is gone"):
        await running
    receipt = await leader.coordinator.cut(Inventory.of("after", leader.coordinator.active_calls()))
    (acknowledgement,) = receipt.acknowledgements
    assert len(acknowledgement.keys) == 2 and acknowledgement.tokens >= 50
    replacement = GenerationWorker(TINY, leader.plane.address, Handle(leader.coordinator), Handle(leader.coalescer), 0)
    completion = await replacement.resume(following(acknowledgement, first), "exact")
    assert (completion.identity.attempt, completion.prefix_tokens) == (1, acknowledgement.tokens)
    row = await leader.row("r0/c0")
    assert all(row[name].tobytes() == wanted[name].tobytes() for name in ("ids", "logprobs", "versions"))
    assert leader.coordinator.active_calls() == ()
    await leader.coordinator.drain()
    client = AsyncDataPlaneClient(leader.plane.address)
    assert await client.list("staging") == []
    await client.close()
    await replacement.close()


async def test_a_coordinator_that_fails_ends_the_calls_instead_of_losing_their_tokens(start: Start) -> None:
    leader = start()

    def broken(_: object) -> Awaitable[None]:
        raise ConnectionError("gone")

    leader.coordinator.observe = broken  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineError, match="coordinator did not take its tokens: gone"):
        await leader.worker.generate(request())


async def test_many_calls_at_once_each_get_their_own_tokens(start: Start) -> None:
    leader = start()
    together = await asyncio.gather(*(leader.worker.generate(request(f"c{i}", 60)) for i in range(20)))
    alone = await leader.worker.generate(request("again", 60))
    rows = [await leader.row(completion.key) for completion in (*together, alone)]
    assert all(np.array_equal(row["ids"], rows[0]["ids"]) for row in rows), "same prompt and seed, same tokens"
