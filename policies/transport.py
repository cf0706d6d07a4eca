"""How bytes travel: in the frames of a message, or by reference to an object of Ray's store.

Both ends of a reference must share a node: there it costs the same at any size, while a frame is copied through the
kernel. A small payload is faster as a frame, since a reference is handed on by calls through Ray. The thresholds are
measured by ``recipes.bench_transport``. References need room in the store, which the job's own objects share: where
little is left, frames take over, and nobody fails.
"""

from __future__ import annotations

import math

from policies.config import TransportConfig


class Transport:
    """The choices of one client. ``node``: the node it is on, None when it has no part in Ray."""

    def __init__(self, config: TransportConfig, node: str | None) -> None:
        self._config = config
        self._node = node if config.by_reference else None
        self._room: dict[str, float] = {}

    def shares(self, unit_node: str | None) -> bool:
        """Whether references can be used between here and a unit on ``unit_node``."""
        return self._node is not None and self._node == unit_node

    def learn_room(self, unit: str, room: int | None) -> None:
        """The store of the unit's node has ``room`` bytes to give (None: nobody knows)."""
        self._room[unit] = math.inf if room is None else room

    def put_by_reference(self, nbytes: int, unit: str, unit_node: str | None) -> bool:
        room = self._room.get(unit, math.inf)
        return self.shares(unit_node) and self._config.put_by_reference_bytes <= nbytes <= room


def lend(config: TransportConfig, wanted_bytes: int, block_bytes: int) -> bool:
    """Whether a read of ``wanted_bytes`` out of a block is better served by lending the whole block."""
    enough = wanted_bytes >= config.get_by_reference_bytes
    return enough and wanted_bytes >= config.get_by_reference_fraction * block_bytes
