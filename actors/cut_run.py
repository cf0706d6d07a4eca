"""The shell of one cut: it does what the transaction says and tells it what became of that.

Every PUT and clear is a task of its own which ends by posting one event, whatever happens to it, so the transaction
always comes to its receipt. An interruption is one more event: nothing is abandoned half-way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from actors.chunk_cleanup import ChunkCleanup
from actors.plane_protocol import STAGING, Plane
from policies.cut import (
    ClearDone,
    ClearFailed,
    ClearKeys,
    CutTransaction,
    DeadlinePassed,
    Deliver,
    Event,
    Instruction,
    Interrupted,
    PutDone,
    PutFailed,
    StageBatch,
    Started,
)
from policies.receipts import Receipt


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
        self._tasks: set[asyncio.Task[None]] = set()
        self._seconds = {"freeze_s": 0.0, "seal_s": 0.0, "write_s": 0.0}
        self._first_put_at: float | None = None
        self._events.put_nowait(Started(clock()))

    async def run(self) -> Receipt:
        """The receipt; its numbers tell also how long freezing (``freeze_s``), sealing (``seal_s``, both with the
        packing of batches) and all PUTs together, from the first to the last (``write_s``), took."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, self._say_deadline)
        try:
            while True:
                for instruction in self._feed(await self._events.get()):
                    if isinstance(instruction, Deliver):
                        receipt = instruction.receipt
                        return replace(receipt, numbers={**receipt.numbers, **self._seconds})
                    self._begin(instruction)
        finally:
            timer.cancel()

    def interrupt(self) -> None:
        """Come to the receipt without further writes."""
        self._events.put_nowait(Interrupted(self._clock()))

    def _feed(self, event: Event) -> list[Instruction]:
        began = self._clock()
        instructions = self._transaction.handle(event)
        ended = self._clock()
        match event:
            case Started():
                self._seconds["freeze_s"] = ended - began
                self._first_put_at = ended
            case PutDone() | PutFailed():
                self._seconds["seal_s"] += ended - began
                if self._first_put_at is not None:
                    self._seconds["write_s"] = event.now - self._first_put_at
            case _:
                pass
        return instructions

    def _begin(self, instruction: StageBatch | ClearKeys) -> None:
        work = self._put(instruction) if isinstance(instruction, StageBatch) else self._clear(instruction)
        self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _put(self, stage: StageBatch) -> None:
        try:
            ack = await self._plane.put(STAGING, stage.keys, stage.columns, tags=stage.tags)
        except asyncio.CancelledError:
            self._events.put_nowait(PutFailed(stage.number, "the put was cancelled", self._clock()))
            raise
        except Exception as error:  # whatever it was, it costs the rows of this put and nothing else
            self._events.put_nowait(PutFailed(stage.number, f"{type(error).__name__}: {error}", self._clock()))
        else:
            self._events.put_nowait(PutDone(stage.number, ack, self._clock()))

    async def _clear(self, clear: ClearKeys) -> None:
        try:
            await self._plane.clear(STAGING, clear.keys)
        except BaseException as error:
            self._cleanup.add(clear.keys)
            self._events.put_nowait(ClearFailed(clear.number, self._clock()))
            if not isinstance(error, Exception):
                raise
        else:
            self._events.put_nowait(ClearDone(clear.number, self._clock()))

    def _say_deadline(self) -> None:
        after = math.nextafter(self._transaction.deadline, math.inf)
        self._events.put_nowait(DeadlinePassed(max(self._clock(), after)))
