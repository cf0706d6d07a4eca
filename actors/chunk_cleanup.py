"""Clears rows of the staging partition in the background: the shell of `policies.cleanup`, on one event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from actors.plane_protocol import Plane
from policies.cleanup import (
    Cleanup,
    CleanupLimits,
    ClearDone,
    ClearFailed,
    Closing,
    Discard,
    Event,
    FenceMoved,
    StartClear,
    TimerFired,
    Unneed,
)
from policies.errors import CleanupFailed

logger = logging.getLogger(__name__)


class ChunkCleanup:
    """``clock``: seconds, monotonic."""

    def __init__(
        self, plane: Plane, partition: str, clock: Callable[[], float], limits: CleanupLimits | None = None
    ) -> None:
        self._plane, self._partition, self._clock = plane, partition, clock
        self._policy = Cleanup(limits or CleanupLimits())
        self._progress = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def unneed(self, keys: Iterable[str]) -> None:
        """Queue chunks that nobody needs any more, without waiting."""
        listed = tuple(keys)
        if listed:
            self._feed(Unneed(listed, self._clock()))

    async def schedule(self, keys: Iterable[str]) -> None:
        """Queue chunks that nobody needs any more, then wait while too many wait and no pause is on."""
        self.unneed(keys)
        while self._policy.over_capacity:
            await self._next_progress()

    def discard(self, keys: tuple[str, ...], in_doubt: bool) -> None:
        """Queue rows of one PUT that belong to no call. ``in_doubt``: they may become visible only later."""
        self._feed(Discard(keys, in_doubt, self._clock()))

    async def pause(self, epoch: int) -> None:
        """When this returns no chunk of a call is being cleared, and none is before ``epoch`` or a later one is
        resumed. Raises `Refused` when it is over already, also when that happens meanwhile."""
        self._policy.fence.pause(epoch)
        self._feed(FenceMoved(self._clock()))
        while not self._policy.fence_is_granted:
            await self._next_progress()
        self._policy.fence.require(epoch)

    def resume(self, epoch: int) -> None:
        self._policy.fence.resume(epoch)
        self._feed(FenceMoved(self._clock()))

    async def drain(self) -> None:
        """Wait until everything that was queued is cleared or given up; during a pause, until after it. Rows in doubt
        that have not been seen are not waited for. Raises `CleanupFailed`, once, for what was given up."""
        while not self._policy.drained:
            await self._next_progress()
        failure = self._policy.take_failure()
        if failure is not None:
            raise CleanupFailed(f"partition {self._partition!r}: {failure}; drop the partition or clear them by hand")

    async def close(self) -> None:
        """Try once to clear what waits; during a pause only what no receipt names."""
        self._feed(Closing(self._clock()))
        while not self._policy.idle:
            await self._next_progress()
        if self._timer is not None:
            self._timer.cancel()

    def statistics(self) -> Mapping[str, int]:
        return self._policy.statistics()

    def _feed(self, event: Event) -> None:
        for instruction in self._policy.handle(event):
            if isinstance(instruction, StartClear):
                self._task = asyncio.get_running_loop().create_task(self._clear(instruction.keys))
                continue
            if self._timer is not None:
                self._timer.cancel()
            delay = max(0.0, instruction.at - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay, self._fire, instruction.at)
        self._progress.set()

    def _fire(self, at: float) -> None:
        self._timer = None
        self._feed(TimerFired(max(at, self._clock())))

    async def _next_progress(self) -> None:
        self._progress.clear()
        await self._progress.wait()

    async def _clear(self, keys: tuple[str, ...]) -> None:
        try:
            removed = await self._plane.clear(self._partition, keys)
        except BaseException as error:  # whatever it was, it must not end the clearing of all other rows
            logger.warning("%d rows of %r could not be cleared: %s", len(keys), self._partition, error)
            self._feed(ClearFailed(f"{type(error).__name__}: {error}", self._clock()))
            if not isinstance(error, Exception):
                raise
        else:
            self._feed(ClearDone(removed, self._clock()))
