"""TransferQueue: the same prefixes through its key-value interface, set up as its documentation recommends.

Two storage units on the node, its asynchronous client, one per process; per token ids int64, mask float32 and logprobs
float32. Restored call by call with one `async_kv_batch_get` each, or ideally: in reads of 256 keys that are known in
advance, two at a time. It has no chains to verify, so ids are compared. Importing this needs the extra.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final

import ray
import torch
import transfer_queue
from tensordict import TensorDict

from recipes.bench.restore.load import (
    PER_REQUEST,
    ROWS_PER_PUT,
    ROWS_PER_READ,
    Load,
    Restored,
    require_same,
    restore_all,
)
from recipes.bench.servers import local_ray, transfer_queue_servers

PARTITION: Final = "staging"
READS_AT_ONCE: Final = 2


def store(load: Load) -> Generator[Any, Any, None]:
    """The system, with all rows in it: the address of its Ray. All processes need one ``RAY_AUTH_TOKEN``."""
    with local_ray(), transfer_queue_servers():
        for chunk in range(load.chunks):
            for first in range(0, load.calls, ROWS_PER_PUT):
                _put(load, range(first, min(load.calls, first + ROWS_PER_PUT)), chunk)
        yield ray.get_runtime_context().gcs_address


def work(load: Load, address: str, workers: range) -> Generator[Any, Any, None]:
    ray.init(address=address, log_to_driver=False)
    transfer_queue.init()
    try:
        with closing(asyncio.new_event_loop()) as loop:
            yield None
            while True:
                restored = _one_by_one if load.mode == PER_REQUEST else _together
                yield loop.run_until_complete(restored(load, workers))
    finally:
        ray.shutdown()


async def _one_by_one(load: Load, workers: range) -> Restored:
    async def restore(call: int) -> None:
        await _read(load, [call])

    began, ended, seconds = await restore_all(load, workers, lambda _: restore)
    return Restored(began, ended, seconds, len(seconds), len(seconds) * load.chunks)


async def _together(load: Load, workers: range) -> Restored:
    calls = [call for number in workers for call in load.calls_of(number)]
    size = max(1, ROWS_PER_READ // load.chunks)
    places, seconds = asyncio.Semaphore(READS_AT_ONCE), []

    async def read(some: list[int]) -> None:
        async with places:
            await _read(load, some)
        seconds.extend([time.perf_counter() - began] * len(some))

    batches = [calls[at : at + size] for at in range(0, len(calls), size)]
    began = time.perf_counter()
    await asyncio.gather(*map(read, batches))
    return Restored(began, time.perf_counter(), tuple(seconds), len(batches), len(calls) * load.chunks)


async def _read(load: Load, calls: list[int]) -> None:
    keys = [_key(call, chunk) for call in calls for chunk in range(load.chunks)]
    found = await transfer_queue.async_kv_batch_get(keys=keys, partition_id=PARTITION)
    for place, call in enumerate(calls):
        rows = [found["ids"][place * load.chunks + chunk] for chunk in range(load.chunks)]
        require_same(call, torch.cat(rows), load.ids(call))


def _put(load: Load, calls: range, chunk: int) -> None:
    first, last = load.span(chunk)
    ids = torch.stack([torch.from_numpy(load.ids(call)[first:last]) for call in calls]).to(torch.int64)
    fields = {"ids": ids, "mask": torch.ones(ids.shape), "logprobs": torch.zeros(ids.shape)}
    transfer_queue.kv_batch_put(
        keys=[_key(call, chunk) for call in calls],
        partition_id=PARTITION,
        fields=TensorDict(fields, batch_size=len(calls)),
        tags=[{"call": call, "chunk": chunk} for call in calls],
    )


def _key(call: int, chunk: int) -> str:
    return f"r/c{call}#{chunk}"
