"""Clears chunk rows that nobody needs any more, in the background.

Keys wait in one queue and go in batches, one clear at a time. A clear that fails is tried again later, a bounded number
of times; what is given up is counted and logged. A pause is a fence: once it has been granted, no row goes until
resumption, so a checkpoint that is being saved keeps its rows. Whoever schedules waits while the queue is over its
bound, except during a pause, which such a wait could otherwise keep from ending.

Runs on one event loop; costs one message per `BATCH_KEYS` keys.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from actors.plane_protocol import Plane

logger = logging.getLogger(__name__)

BATCH_KEYS: Final = 1024
CAPACITY_KEYS: Final = 65_536
ATTEMPTS: Final = 5
RETRY_AFTER_S: Final = 1.0


class ChunkCleanup:
    def __init__(self, plane: Plane, partition: str) -> None:
        self._plane, self._partition = plane, partition
        self._waiting: deque[tuple[str, int]] = deque()  # (key, attempts made)
        self._task: asyncio.Task[None] | None = None
        self._progress = asyncio.Event()
        self._busy = self._paused = self._closing = False
        self._cleared = self._failures = self._given_up = 0

    def add(self, keys: Iterable[str]) -> None:
        """Queue ``keys`` without waiting."""
        self._waiting.extend((key, 0) for key in keys)
        self._start()

    async def schedule(self, keys: Iterable[str]) -> None:
        """Queue ``keys``, then wait while more than `CAPACITY_KEYS` wait and no pause is on."""
        self.add(keys)
        while len(self._waiting) > CAPACITY_KEYS and not self._paused:
            await self._next_progress()

    async def pause(self) -> None:
        """When this returns no clear is under way, and none starts before `resume`."""
        self._paused = True
        self._progress.set()
        while self._busy:
            await self._next_progress()

    def resume(self) -> None:
        self._paused = False
        self._start()

    async def drain(self) -> None:
        """Wait until everything that was queued is cleared or given up; during a pause, until after it."""
        while self._waiting or self._busy:
            await self._next_progress()

    async def close(self) -> None:
        """Try once to clear what waits; during a pause nothing is cleared."""
        self._closing = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._start()
        if not self._paused:
            await self.drain()

    def statistics(self) -> Mapping[str, int]:
        return {
            "cleanup_waiting": len(self._waiting),
            "cleanup_cleared": self._cleared,
            "cleanup_failures": self._failures,
            "cleanup_given_up": self._given_up,
        }

    def _start(self) -> None:
        if self._waiting and not self._paused and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _run(self) -> None:
        while self._waiting and not self._paused:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_KEYS, len(self._waiting)))]
            if not await self._clear(batch) and not self._closing:
                await asyncio.sleep(RETRY_AFTER_S)

    async def _clear(self, batch: list[tuple[str, int]]) -> bool:
        self._busy = True
        try:
            await self._plane.clear(self._partition, [key for key, _ in batch])
        except asyncio.CancelledError:
            self._waiting.extendleft(reversed(batch))
            raise
        except Exception as error:  # whatever it was, it must not end the clearing of all other rows
            self._failed(batch, error)
            return False
        else:
            self._cleared += len(batch)
            return True
        finally:
            self._busy = False
            self._progress.set()

    def _failed(self, batch: list[tuple[str, int]], error: Exception) -> None:
        self._failures += 1
        again = [(key, attempts + 1) for key, attempts in batch if attempts + 1 < ATTEMPTS and not self._closing]
        self._waiting.extend(again)
        lost = len(batch) - len(again)
        self._given_up += lost
        if lost:
            logger.error("%d rows of %r stay behind, they could not be cleared: %s", lost, self._partition, error)
