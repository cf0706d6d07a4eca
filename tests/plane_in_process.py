"""A whole plane in one process, without Ray: real sockets, real loops, plain classes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from actors.client import DataPlaneClient, PlaneAddress
from actors.controller import PatchedController
from actors.storage_unit import StorageUnit
from actors.wire.secret import new_secret
from policies.config import PlaneConfig
from policies.sampling import Sampler

HOST = "127.0.0.1"
FRAME_LIMIT = 1 << 30
_INCARNATIONS = itertools.count()


class InProcessPlane:
    def __init__(
        self,
        units: int = 2,
        capacity: int = 1 << 30,
        strict: bool = False,
        timeout: float = 10.0,
        encryption: str = "none",
        undelivered: int = 256 << 20,
        host: str = HOST,
        samplers: Mapping[str, type[Sampler]] | None = None,
    ) -> None:
        self.secret, self._host = new_secret(encryption), host
        self.config = PlaneConfig(
            unit_capacity_bytes=capacity,
            strict_partitions=strict,
            request_timeout_s=timeout,
            max_frame_bytes=FRAME_LIMIT,
            max_undelivered_bytes=undelivered,
            encryption=encryption,
        )
        self.controller = PatchedController(host, self.secret, self.config, samplers)
        self.address: PlaneAddress = self.controller.address()
        self.units = {f"u{i}": self.make_unit(f"u{i}", next(_INCARNATIONS)) for i in range(units)}
        for unit in self.units.values():
            unit.connect(self.address.endpoint)
        self.controller.register_units({name: unit.location() for name, unit in self.units.items()})
        self._clients: list[DataPlaneClient] = []

    def make_unit(self, name: str, incarnation: int) -> StorageUnit:
        return StorageUnit(name, incarnation, self._host, self.secret, self.config)

    def replace_unit(self, name: str) -> None:
        """The unit ends, without its rows, and comes back at another address."""
        self.units[name].close()
        self.units[name] = unit = self.make_unit(name, next(_INCARNATIONS))
        unit.connect(self.address.endpoint)
        self.controller.register_units({name: unit.location()})

    def client(self) -> DataPlaneClient:
        client = DataPlaneClient(self.address)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()
        for unit in self.units.values():
            unit.close()
        self.controller.close()


@contextmanager
def in_process_plane(units: int = 2, **options: Any) -> Iterator[InProcessPlane]:
    plane = InProcessPlane(units, **options)
    try:
        yield plane
    finally:
        plane.close()
