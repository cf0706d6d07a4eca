"""The shell of background clearing: it waits for what it has to wait for, and says what failed."""

from __future__ import annotations

import asyncio
import time

import pytest

from actors.chunk_cleanup import ChunkCleanup
from actors.plane_protocol import STAGING
from policies.cleanup import CleanupLimits
from policies.errors import CleanupFailed, Refused
from tests.fake_plane import FakePlane

QUICK = CleanupLimits(attempts=3, retry_after_s=0.0, looks_after_s=(0.0, 0.0))


def cleanup(plane: FakePlane, limits: CleanupLimits = QUICK) -> ChunkCleanup:
    return ChunkCleanup(plane, STAGING, time.monotonic, limits)


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_during_a_pause_no_chunk_goes() -> None:
    plane = FakePlane()
    plane.rows = {"a": {}, "b": {}}
    background = cleanup(plane)
    background.unneed(["a"])
    await asyncio.sleep(0)
    await background.pause(1)
    assert set(plane.rows) == {"b"}, "the pause was granted while a clear was under way"
    await background.schedule(["b"])
    await turns()
    assert set(plane.rows) == {"b"}
    background.resume(1)
    await background.drain()
    assert plane.rows == {}


async def test_the_late_pause_of_a_checkpoint_that_was_given_up_is_refused() -> None:
    plane = FakePlane()
    plane.rows = {"a": {}}
    background = cleanup(plane)
    background.resume(4)
    with pytest.raises(Refused, match="epoch 4 was resumed"):
        await background.pause(4)
    background.unneed(["a"])
    await background.drain()
    assert plane.rows == {}


async def test_a_pause_that_is_over_before_it_was_granted_is_refused() -> None:
    background = cleanup(plane := FakePlane(clears=["hang"]))
    background.unneed(["a"])
    await asyncio.sleep(0)
    pausing = asyncio.ensure_future(background.pause(1))
    await turns()
    background.resume(1)
    plane.gate.set()
    with pytest.raises(Refused):
        await pausing


async def test_whoever_schedules_waits_while_the_queue_is_over_its_bound() -> None:
    plane = FakePlane(clears=["hang"])
    background = cleanup(plane, CleanupLimits(capacity_keys=2))
    await background.schedule(["a"])
    await asyncio.sleep(0)
    await background.schedule(["b", "c"])
    held = asyncio.ensure_future(background.schedule(["d"]))
    await turns()
    assert not held.done()
    plane.gate.set()
    await held


async def test_a_pause_lets_those_go_who_wait_for_room() -> None:
    plane = FakePlane(clears=["hang"])
    background = cleanup(plane, CleanupLimits(capacity_keys=1))
    background.unneed(["a"])
    await asyncio.sleep(0)
    held = asyncio.ensure_future(background.schedule(["b", "c"]))
    await asyncio.sleep(0)
    pausing = asyncio.ensure_future(background.pause(1))
    await held
    assert not pausing.done()
    plane.gate.set()
    await pausing


async def test_what_stays_behind_is_told_once() -> None:
    plane = FakePlane(clears=["fail"] * 3)
    plane.rows = {"a": {}}
    background = cleanup(plane)
    background.unneed(["a"])
    with pytest.raises(CleanupFailed, match=r"1 rows stay behind.*did not answer"):
        await background.drain()
    await background.drain()
    assert len(plane.clear_keys) == 3 and background.statistics()["cleanup_given_up"] == 1


async def test_rows_that_appear_late_are_looked_for() -> None:
    plane = FakePlane(clears=["ok", "hang"])
    background = cleanup(plane)
    background.discard(("a",), in_doubt=True)
    while len(plane.clear_keys) < 2:
        await asyncio.sleep(0)
    plane.rows = {"a": {}}
    plane.gate.set()
    while plane.rows:
        await asyncio.sleep(0)
    await turns()
    assert background.statistics()["cleanup_cleared"] == 1


async def test_a_clear_that_is_cancelled_is_tried_again() -> None:
    plane = FakePlane(clears=["hang"])
    plane.rows = {"a": {}}
    background = cleanup(plane)
    background.unneed(["a"])
    await turns()
    assert background._task is not None
    background._task.cancel()
    await background.drain()
    assert plane.rows == {}


async def test_close_tries_once_and_ends() -> None:
    plane = FakePlane(clears=["fail", "fail"])
    plane.rows = {"a": {}}
    background = cleanup(plane, CleanupLimits(retry_after_s=3600.0))
    background.unneed(["a"])
    await turns()
    await background.close()
    assert background.statistics()["cleanup_given_up"] == 1
