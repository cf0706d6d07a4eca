"""The shell of one cut: it does what the transaction says and tells it what became of that.

Every packing, PUT and clear is a task of its own which ends by posting one event, whatever happens to it, so the
transaction always comes to its receipt. An interruption is one more event: nothing is abandoned half-way.

New tokens have their turn after every event. A batch is packed right before its PUT and let go right after it. Large
ones are packed on a thread, which lets the event loop have the interpreter every few rows.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

from actors.chunk_cleanup import ChunkCleanup
from actors.plane_protocol import STAGING, Plane
from policies.chunks import Packed, Sent, pack
from policies.cut import CutTransaction
from policies.cut_events import (
    BatchPacked,
    ClearDone,
    ClearFailed,
    ClearKeys,
    DeadlinePassed,
    Deliver,
    Event,
    GoneOn,
    GoOn,
    Instruction,
    Interrupted,
    LeaveKeys,
    PackBatch,
    PackFailed,
    PutBatch,
    PutDone,
    PutFailed,
    Started,
)
from policies.errors import Refused
from policies.receipts import Receipt

PACKED_ON_THE_LOOP: Final = 1 << 19
"""Bytes up to which handing a batch to a thread takes longer than packing it."""

PAUSE_S: Final = 2e-5
"""Long enough for a thread that waits for the interpreter to get it, which no shorter release of it makes sure."""


class CutRun:
    """Runs ``transaction`` once. ``timeout_s``: from its start to its deadline."""

    def __init__(
        self,
        plane: Plane,
        transaction: CutTransaction,
        timeout_s: float,
        cleanup: ChunkCleanup,
        clock: Callable[[], float],
    ) -> None:
        self._plane, self._transaction, self._cleanup, self._clock = plane, transaction, cleanup, clock
        self._timeout_s = timeout_s
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._packed: dict[int, tuple[tuple[str, ...], Packed]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds = dict.fromkeys(("freeze_s", "pack_s", "write_s", "seal_s", "longest_frozen_s"), 0.0)
        self._first_put_at: float | None = None
        self.began = clock()
        self._events.put_nowait(Started(self.began))

    async def run(self) -> Receipt:
        """The receipt, its numbers complete but for the rates of decoding."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._say_deadline)
        try:
            while True:
                for instruction in self._feed(await self._events.get()):
                    if isinstance(instruction, Deliver):
                        receipt = instruction.receipt
                        return replace(receipt, numbers={**receipt.numbers, **self._seconds})
                    self._obey(instruction)
                await asyncio.sleep(0)
        finally:
            timer.cancel()

    def interrupt(self) -> None:
        """Come to the receipt without further writes."""
        self._events.put_nowait(Interrupted(self._clock()))

    def _feed(self, event: Event) -> list[Instruction]:
        began, sealed = self._clock(), self._transaction.sealed_rows
        instructions = self._transaction.handle(event)
        self._held("seal_s" if self._transaction.sealed_rows > sealed else "freeze_s", began)
        if isinstance(event, PutDone | PutFailed) and self._first_put_at is not None:
            self._seconds["write_s"] = event.now - self._first_put_at
        if isinstance(event, BatchPacked) and PutBatch(event.number) not in instructions:
            del self._packed[event.number]
        return instructions

    def _held(self, phase: str, began: float) -> None:
        """Since ``began`` the event loop was held, so that no call could take new tokens."""
        seconds = self._clock() - began
        self._seconds[phase] += seconds
        self._seconds["longest_frozen_s"] = max(self._seconds["longest_frozen_s"], seconds)

    def _obey(self, instruction: GoOn | PackBatch | PutBatch | ClearKeys | LeaveKeys) -> None:
        match instruction:
            case GoOn():
                self._events.put_nowait(GoneOn(self._clock()))
            case PackBatch():
                self._spawn(self._pack(instruction))
            case PutBatch(number):
                if self._first_put_at is None:
                    self._first_put_at = self._clock()
                self._spawn(self._put(number, *self._packed.pop(number)))
            case ClearKeys():
                self._spawn(self._clear(instruction))
            case LeaveKeys(keys, in_doubt):
                self._cleanup.discard(keys, in_doubt)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pack(self, batch: PackBatch) -> None:
        began = self._clock()
        try:
            if batch.nbytes <= PACKED_ON_THE_LOOP:
                sent = self._pack_now(batch)
                self._held("pack_s", began)
            else:
                sent = await asyncio.to_thread(self._pack_now, batch, partial(time.sleep, PAUSE_S))
                self._seconds["pack_s"] += self._clock() - began
        except BaseException as error:
            self._events.put_nowait(PackFailed(batch.number, f"{type(error).__name__}: {error}", self._clock()))
            if not isinstance(error, Exception):
                raise
        else:
            self._events.put_nowait(BatchPacked(batch.number, sent, self._clock()))

    def _pack_now(self, batch: PackBatch, pause: Callable[[], None] | None = None) -> Sent:
        """The batch is kept here and not handed back, since a thread may hold on to what it returned for a while."""
        packed = pack(batch.keys, batch.chunks, pause)
        self._packed[batch.number] = batch.keys, packed
        return packed.sent

    async def _put(self, number: int, keys: tuple[str, ...], packed: Packed) -> None:
        try:
            ack = await self._plane.put(STAGING, keys, packed.columns, tags=packed.tags)
        except BaseException as error:  # whatever it was, it costs the rows of this put and nothing else
            in_doubt = not isinstance(error, Refused)
            cause = f"{type(error).__name__}: {error}"
            self._events.put_nowait(PutFailed(number, cause, in_doubt, self._clock()))
            if not isinstance(error, Exception):
                raise
        else:
            self._events.put_nowait(PutDone(number, ack, self._clock()))

    async def _clear(self, clear: ClearKeys) -> None:
        try:
            removed = await self._plane.clear(STAGING, clear.keys)
        except BaseException as error:
            self._events.put_nowait(ClearFailed(clear.number, self._clock()))
            if not isinstance(error, Exception):
                raise
        else:
            self._events.put_nowait(ClearDone(clear.number, removed, self._clock()))

    def _say_deadline(self) -> None:
        after = math.nextafter(self._transaction.deadline, math.inf)
        self._events.put_nowait(DeadlinePassed(max(self._clock(), after)))
