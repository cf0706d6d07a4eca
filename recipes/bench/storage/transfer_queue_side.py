"""TransferQueue: its key-value interface, set up as its documentation recommends; importing this needs the extra.

Two storage units, many rows in one `kv_batch_put` of a `TensorDict` of dense tensors, read back by `kv_batch_get`;
where many calls are made at once, its asynchronous form.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import torch
import transfer_queue
from numpy.typing import NDArray
from tensordict import TensorDict

from recipes.bench.scenario import CheckFailed
from recipes.bench.servers import transfer_queue_servers
from recipes.bench.storage.load import Fields

PARTITION: Final = "rows"


class TransferQueueClient:
    def __init__(self, address: None) -> None:
        transfer_queue.init()

    def batch(self, keys: Sequence[str], fields: Fields) -> TensorDict:
        tensors = {name: torch.from_numpy(values) for name, values in fields.items()}
        return TensorDict(tensors, batch_size=len(keys))

    def put(self, keys: Sequence[str], batch: TensorDict) -> None:
        transfer_queue.kv_batch_put(keys=list(keys), partition_id=PARTITION, fields=batch)

    def get(self, keys: Sequence[str]) -> TensorDict:
        return transfer_queue.kv_batch_get(keys=list(keys), partition_id=PARTITION)

    async def get_together(self, keys: Sequence[str]) -> TensorDict:
        return await transfer_queue.async_kv_batch_get(keys=list(keys), partition_id=PARTITION)

    def lengths(self, found: TensorDict) -> list[NDArray[Any]]:
        return [np.diff(_edges(values)) for values in found.values()]

    def row(self, found: TensorDict, place: int) -> Fields:
        rows = {}
        for name, values in found.items():
            begin, end = _edges(values)[place : place + 2]
            rows[name] = _flat(values)[begin:end].copy()
        return rows

    def touch(self, found: TensorDict) -> float:
        return sum(float(_flat(values).sum()) for values in found.values())

    def clear(self, keys: Sequence[str]) -> None:
        transfer_queue.kv_clear(list(keys), PARTITION)


def _flat(values: torch.Tensor) -> NDArray[Any]:
    """All elements of a field, without a copy where they lie side by side; it answers nested or dense tensors."""
    return (values.values() if values.is_nested else values.reshape(-1)).numpy()


def _edges(values: torch.Tensor) -> NDArray[Any]:
    if values.is_nested:
        return values.offsets().numpy()
    rows, length = values.shape
    return np.arange(rows + 1) * length


class TransferQueueSide:
    connect = TransferQueueClient
    address = None
    unit_processes = "ray::SimpleStorageUnit"

    def __init__(self) -> None:
        self._running = ExitStack()
        self._running.enter_context(transfer_queue_servers())

    def settle(self) -> None:
        """Its `kv_clear` returns when its units have forgotten the rows."""
        left = transfer_queue.kv_list(PARTITION)
        if any(left.values()):
            raise CheckFailed(f"{sum(map(len, left.values()))} rows are left after all were cleared")

    def close(self) -> None:
        self._running.close()
