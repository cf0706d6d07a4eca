"""The lender: the part of a storage unit that shares its memory with readers on the same node.

A block whose rows came by reference is lent as the object they came in. Any other is copied into the object store when
it is first asked for, and lives there from then on, so that every later reader has it without a copy. What is lent is
whole blocks all of whose rows live; a reader takes what it wants of them.

Copies into the store happen on a thread of their own; all else on the loop's.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from actors.object_store import ObjectStore
from actors.references import ReferredRequest, shared_columns
from actors.wire.loop import Loop
from policies.codec import Buffer, encode_columns
from policies.columns import Column
from policies.config import TransportConfig
from policies.errors import RegraftError
from policies.storage import UnitState

logger = logging.getLogger(__name__)

ROOM_EVERY_S = 1.0
"""How often the store is looked at."""


class Lender:
    """``active`` False: there is no store to share, and nothing is ever lent. ``room``: bytes that the store can take
    now, as last seen; None before the first look."""

    def __init__(self, loop: Loop, unit: str, state: UnitState, config: TransportConfig, active: bool) -> None:
        self._loop, self._unit, self._state, self._config = loop, unit, state, config
        self._store = ObjectStore(config.store_reserve)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"unit-{unit}-store")
        self.active = active
        self.room: int | None = None
        if active:
            self._plan_look()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def lends(self, block_id: int, fields: list[str], rows: int) -> bool:
        """Whether the reader of ``rows`` rows should borrow the block."""
        return self.active and self._state.lends(block_id, fields, rows, self.room or 0, self._config)

    def lend(self, request: ReferredRequest) -> None:
        """References to whole blocks, and how their columns lie in them; None for one that cannot be lent any more."""
        ids = [int(block_id) for block_id in request.body["blocks"]]
        unshared = [block for block in map(self._state.whole, ids) if block is not None and block.backing is None]

        def share_all() -> None:
            try:
                shared = [(block.id, *shared_columns(block.columns)) for block in unshared]
            except RegraftError as error:
                failed = error
                self._loop.call_soon(lambda: request.fail(failed))
            else:
                self._loop.call_soon(lambda: self._answer(request, ids, shared))

        if unshared:
            self._thread.submit(share_all)
        else:
            self._answer(request, ids, [])

    def _answer(
        self, request: ReferredRequest, ids: list[int], shared: list[tuple[int, Any, dict[str, Column]]]
    ) -> None:
        for block_id, reference, columns in shared:
            self._state.adopt(block_id, reference, columns)
        lent: list[list[dict[str, Any]] | None] = []
        references: list[Any] = []
        buffers: list[Buffer] = []
        for block in map(self._state.whole, ids):
            if block is None or block.backing is None:
                lent.append(None)
            else:
                lent.append(encode_columns(block.columns, buffers))
                references.append(block.backing)
        request.answer({"blocks": lent}, references)

    def _plan_look(self) -> None:
        with contextlib.suppress(RuntimeError):  # the unit is closing
            self._thread.submit(self._look)

    def _look(self) -> None:
        room = self._store.room()
        self._loop.call_soon(lambda: self._see(room))

    def _see(self, room: int) -> None:
        enough = self._config.put_by_reference_bytes
        if room < enough and (self.room is None or self.room >= enough):
            logger.warning(
                "the object store of unit %s's node has %d bytes to give; payloads travel in frames", self._unit, room
            )
        self.room = room
        self._loop.call_later(ROOM_EVERY_S, self._plan_look)
