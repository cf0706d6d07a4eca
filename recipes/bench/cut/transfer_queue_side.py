"""TransferQueue: the same prefixes through its key-value interface, set up as its documentation recommends.

Two storage units on the node, its asynchronous client, many rows in one `async_kv_batch_put`; per token ids int64, mask
float32 and logprobs float32, rows of one length as dense tensors. Importing this needs the extra.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import closing
from typing import Any, Final

import torch
import transfer_queue
from tensordict import TensorDict

from recipes.bench.cut.load import ROUTES, Load, PeakMemory, Staged, Waits, require_same
from recipes.bench.servers import local_ray, transfer_queue_servers

PARTITION: Final = "staging"


def serve(load: Load) -> Generator[Any, Any, None]:
    with local_ray(), transfer_queue_servers(), closing(asyncio.new_event_loop()) as loop:
        yield None
        while True:
            yield loop.run_until_complete(_staged(load))


async def _staged(load: Load) -> Staged:
    waits, memory = Waits(time.perf_counter), PeakMemory()
    homes = [range(index, load.calls, load.coordinators) for index in range(load.coordinators)]
    wall, peak_bytes = 0.0, 0
    for cut in range(load.cuts):
        rows = {call: _row(load, call, cut) for call in range(load.calls)}
        memory.begin()
        waits.begin()
        began = time.perf_counter()
        await asyncio.gather(*(_stage(load, home, cut, rows, waits) for home in homes))
        wall += time.perf_counter() - began
        peak_bytes = max(peak_bytes, memory.end())
        del rows
    for call in load.checked():
        for cut in range(load.cuts):
            found = await transfer_queue.async_kv_batch_get(keys=[_key(call, cut)], partition_id=PARTITION)
            require_same(call, found["ids"][0], load.ids(call, cut))
    for cut in range(load.cuts):
        await transfer_queue.async_kv_clear([_key(call, cut) for call in range(load.calls)], PARTITION)
    return Staged(wall, waits.mean(), waits.puts, peak_bytes)


async def _stage(load: Load, home: range, cut: int, rows: dict[int, dict[str, torch.Tensor]], waits: Waits) -> None:
    """What a coordinator does: its calls, batch after batch."""
    for at in range(0, len(home), load.rows_per_put):
        calls = home[at : at + load.rows_per_put]
        fields = {name: torch.stack([rows[call][name] for call in calls]) for name in rows[calls[0]]}
        await transfer_queue.async_kv_batch_put(
            keys=[_key(call, cut) for call in calls],
            partition_id=PARTITION,
            fields=TensorDict(fields, batch_size=len(calls)),
            tags=[{"call": call, "cut": cut} for call in calls],
        )
        waits.acknowledged(len(calls))


def _row(load: Load, call: int, cut: int) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(load.ids(call, cut)).to(torch.int64)
    row = {"ids": ids, "mask": torch.ones(len(ids)), "logprobs": torch.zeros(len(ids))}
    if load.routes:
        row["routes"] = torch.ones((len(ids), *ROUTES), dtype=torch.int16)
    return row


def _key(call: int, cut: int) -> str:
    return f"r/c{call}#{cut}"
