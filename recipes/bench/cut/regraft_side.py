"""regraft: coordinators that hold the calls' tokens and cut them, over a plane of two storage units."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from actors.client import AsyncDataPlaneClient
from actors.cut_coordinator import CutCoordinator
from actors.data_plane import DataPlane
from actors.plane_protocol import STAGING
from policies.answers import PutAck
from policies.calls import CallIdentity, StepDelta, Tokens
from policies.config import PlaneConfig, RolloutRecoveryConfig
from policies.receipts import Inventory
from recipes.bench.cut.load import ROUTES, Load, PeakMemory, Staged, Waits, require_same
from recipes.bench.scenario import CheckFailed
from recipes.bench.servers import RAY


class Waiting(AsyncDataPlaneClient):
    """A client that notes when its rows were acknowledged."""

    waits = Waits(time.perf_counter)

    async def put(self, partition: str, keys: Sequence[str], *arguments: Any, **options: Any) -> PutAck:
        ack = await super().put(partition, keys, *arguments, **options)
        self.waits.acknowledged(len(keys))
        return ack


def serve(load: Load) -> Generator[Any, Any, None]:
    config = PlaneConfig(
        units=2,
        unit_capacity_bytes=64 << 30,
        rollout_recovery=RolloutRecoveryConfig(generation_prefix_batch_size=load.rows_per_put),
    )
    with DataPlane.launch(config, ray_options=RAY) as plane, closing(asyncio.new_event_loop()) as loop:
        client = Waiting(plane.address)
        yield None
        while True:
            yield loop.run_until_complete(_staged(load, config, client))


async def _staged(load: Load, config: PlaneConfig, client: Waiting) -> Staged:
    client.waits = waits = Waits(time.perf_counter)
    coordinators = [CutCoordinator(client, config.rollout_recovery) for _ in range(load.coordinators)]
    calls = [CallIdentity("r", f"c{number}") for number in range(load.calls)]
    homes = [calls[index :: load.coordinators] for index in range(load.coordinators)]
    for coordinator, home in zip(coordinators, homes, strict=True):
        for call in home:
            coordinator.begin(call)
    wall, peak_bytes, memory = 0.0, 0, PeakMemory()
    for cut in range(load.cuts):
        for coordinator, home in zip(coordinators, homes, strict=True):
            for call in home:
                coordinator.observe([StepDelta((call,), (_tokens(load, call, cut),), {})])
        memory.begin()
        waits.begin()
        began = time.perf_counter()
        receipts = await asyncio.gather(
            *(c.cut(Inventory.of(f"cut-{cut}", home)) for c, home in zip(coordinators, homes, strict=True))
        )
        wall += time.perf_counter() - began
        peak_bytes = max(peak_bytes, memory.end())
    answers = {a.identity: a for receipt in receipts for a in receipt.acknowledgements}
    bad = [a for a in answers.values() if a.reason is not None or a.tokens != load.tokens]
    if bad or len(answers) != load.calls:
        raise CheckFailed(f"{len(bad)} of {load.calls} calls are not durable with all their tokens: {bad[:1]}")
    await _check(load, client, {number: answers[calls[number]].keys for number in load.checked()})
    for answer in answers.values():
        await client.clear(STAGING, answer.keys)
    return Staged(wall, waits.mean(), waits.puts, peak_bytes)


def _tokens(load: Load, call: CallIdentity, cut: int) -> Tokens:
    ids = load.ids(int(call.call_id[1:]), cut)
    count = len(ids)
    extras: dict[str, Any] = {"routes": np.ones((count, *ROUTES), np.int16)} if load.routes else {}
    if load.padded:
        extras["mask"] = np.ones(count, np.float32)
    return Tokens(ids, np.zeros(count, np.float32), np.zeros(count, np.int32), np.ones(count, bool), extras)


async def _check(load: Load, client: Waiting, chains: dict[int, tuple[str, ...]]) -> None:
    for number, keys in chains.items():
        batch = await client.get(STAGING, keys, ["ids"])
        for cut, (_, row) in enumerate(batch.rows()):
            require_same(number, row["ids"], load.ids(number, cut))
