"""regraft: a plane of two storage units, its blocking client for one call at a time, its asynchronous one for many."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actors.client import AsyncDataPlaneClient, DataPlaneClient, PlaneAddress
from actors.data_plane import DataPlane
from actors.ragged import TensorBatch
from policies.config import PlaneConfig, TransportConfig
from policies.operations import Ask
from recipes.bench.scenario import CheckFailed
from recipes.bench.storage.load import Fields

PARTITION: Final = "rows"
FIELDS: Final = ("ids", "mask", "logprobs")
UNIT_CAPACITY_BYTES: Final = 64 << 30
TIMEOUT_S: Final = 120.0
_SETTLED_WITHIN_S: Final = 30.0


class RegraftClient:
    """Both forms of client, as a process that needs both would have them."""

    def __init__(self, address: PlaneAddress) -> None:
        self._blocking, self._awaiting = DataPlaneClient(address), AsyncDataPlaneClient(address)

    def batch(self, keys: Sequence[str], fields: Fields) -> Fields:
        return fields

    def put(self, keys: Sequence[str], batch: Fields) -> None:
        self._blocking.put(PARTITION, keys, batch)

    def get(self, keys: Sequence[str]) -> TensorBatch:
        return self._blocking.get(PARTITION, keys, FIELDS)

    async def get_together(self, keys: Sequence[str]) -> TensorBatch:
        return await self._awaiting.get(PARTITION, keys, FIELDS)

    def lengths(self, found: TensorBatch) -> list[NDArray[Any]]:
        columns = [found[name].column for name in FIELDS]
        return [np.diff(column.element_offsets()) for column in columns]

    def row(self, found: TensorBatch, place: int) -> Fields:
        return {name: found[name].column.row(place).copy() for name in FIELDS}

    def touch(self, found: TensorBatch) -> float:
        return sum(float(found[name].column.values.sum()) for name in FIELDS)

    def clear(self, keys: Sequence[str]) -> None:
        self._blocking.clear(PARTITION, keys)


class RegraftSide:
    """A plane called ``name``; ``by_reference`` False keeps it from using Ray's object store."""

    connect = RegraftClient
    unit_processes = "ray::StorageUnit"

    def __init__(self, name: str, by_reference: bool) -> None:
        transport = TransportConfig(by_reference=by_reference)
        config = PlaneConfig(
            units=2, unit_capacity_bytes=UNIT_CAPACITY_BYTES, request_timeout_s=TIMEOUT_S, transport=transport
        )
        self._plane = DataPlane.launch(config, name=name)
        self.address = self._plane.address

    def settle(self) -> None:
        client, until = self._plane.client(), time.monotonic() + _SETTLED_WITHIN_S
        asks = [Ask(unit, "statistics") for unit in client.units()]
        while any(message.body["blocks"] for message in client.ask(asks)):
            if time.monotonic() > until:
                raise CheckFailed(f"cleared rows still fill blocks {_SETTLED_WITHIN_S:g} s later")
            time.sleep(0.005)

    def close(self) -> None:
        self._plane.close()
