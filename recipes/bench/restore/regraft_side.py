"""regraft: chunks in a plane of two storage units; workers read them through a coalescer each, or call by call.

Whichever way the rows come, a chain is verified (count, digest, weight versions, identity) before it counts as
restored. The workers of a process share its client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np

from actors.client import AsyncDataPlaneClient, DataPlaneClient, PlaneAddress
from actors.data_plane import DataPlane
from actors.plane_protocol import STAGING
from actors.read_coalescer import ReadCoalescer
from policies.calls import CallIdentity, GenerationRequest
from policies.chain import CHUNK_FIELDS, Chain, ChainDigest, verify_chain
from policies.columns import Column
from policies.config import CoalescerConfig, PlaneConfig
from policies.receipts import Continuation
from recipes.bench.restore.load import (
    PER_REQUEST,
    ROWS_PER_PUT,
    ROWS_PER_READ,
    WINDOW,
    WINDOW_S,
    Load,
    Restore,
    Restored,
    require_same,
    restore_all,
)
from recipes.bench.scenario import CheckFailed
from recipes.bench.servers import RAY

TIMEOUT_S: Final = 120.0


def store(load: Load) -> Generator[Any, Any, None]:
    """The plane, with all rows in it: its address."""
    config = PlaneConfig(units=2, unit_capacity_bytes=64 << 30, request_timeout_s=TIMEOUT_S)
    with DataPlane.launch(config, ray_options=RAY) as plane:
        for chunk in range(load.chunks):
            for first in range(0, load.calls, ROWS_PER_PUT):
                _put(load, plane.client(), range(first, min(load.calls, first + ROWS_PER_PUT)), chunk)
        yield plane.address


def work(load: Load, address: PlaneAddress, workers: range) -> Generator[Any, Any, None]:
    with closing(asyncio.new_event_loop()) as loop:
        client = AsyncDataPlaneClient(address)
        continuations = {call: _continuation(load, call) for number in workers for call in load.calls_of(number)}
        try:
            yield None
            while True:
                yield loop.run_until_complete(_restored(load, client, continuations, workers))
        finally:
            loop.run_until_complete(client.close())


async def _restored(
    load: Load, client: AsyncDataPlaneClient, continuations: dict[int, Continuation], workers: range
) -> Restored:
    if load.mode == PER_REQUEST:
        began, ended, seconds = await restore_all(load, workers, lambda _: _alone(load, client, continuations))
        return Restored(began, ended, seconds, len(seconds), len(seconds) * load.chunks)
    window_s = WINDOW_S if load.mode == WINDOW else 0.0
    config = CoalescerConfig(max_keys=ROWS_PER_READ, window_s=window_s, timeout_s=TIMEOUT_S)
    coalescers = {number: ReadCoalescer(client, config) for number in workers}

    def together(number: int) -> Restore:
        async def restore(call: int) -> None:
            _check(load, call, await coalescers[number].read_chain(continuations[call], 0))

        return restore

    began, ended, seconds = await restore_all(load, workers, together)
    counts = [coalescer.statistics() for coalescer in coalescers.values()]
    return Restored(began, ended, seconds, sum(c["gets"] for c in counts), sum(c["keys_read"] for c in counts))


def _alone(load: Load, client: AsyncDataPlaneClient, continuations: dict[int, Continuation]) -> Restore:
    async def restore(call: int) -> None:
        continuation = continuations[call]
        batch = await client.get(STAGING, continuation.keys, CHUNK_FIELDS)
        _check(load, call, verify_chain(continuation, [row for _, row in batch.rows()], 0))

    return restore


def _check(load: Load, call: int, found: Any) -> None:
    if not isinstance(found, Chain):
        raise CheckFailed(f"call {call} was refused: {found}")
    require_same(call, found.ids, load.ids(call))


def _put(load: Load, client: DataPlaneClient, calls: range, chunk: int) -> None:
    first, last = load.span(chunk)
    ids = np.concatenate([load.ids(call)[first:last] for call in calls])
    lengths = [last - first] * len(calls)
    values = {"ids": ids, "logprobs": np.zeros(len(ids), np.float32), "versions": np.zeros(len(ids), np.int32)}
    client.put(
        STAGING,
        [_identity(call).chunk_key(chunk) for call in calls],
        {name: Column.jagged(array, lengths) for name, array in values.items()},
    )


def _identity(call: int) -> CallIdentity:
    return CallIdentity("r", f"c{call}")


def _continuation(load: Load, call: int) -> Continuation:
    identity, ids = _identity(call), load.ids(call)
    chain = Chain(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32))
    request = GenerationRequest(replace(identity, attempt=1), (1,), load.tokens + 1)
    keys = tuple(identity.chunk_key(chunk) for chunk in range(load.chunks))
    return Continuation(request, keys, load.tokens, ChainDigest.of(chain).hexdigest())
