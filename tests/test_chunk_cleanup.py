"""Background clearing: nothing is forgotten, a fence holds, and failures are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import chunk_cleanup
from actors.chunk_cleanup import ATTEMPTS, ChunkCleanup
from actors.plane_protocol import STAGING
from tests.fake_plane import FakePlane


@pytest.fixture(autouse=True, scope="module")
def retries_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_cleanup, "RETRY_AFTER_S", 0.0)
        yield


def cleanup(plane: FakePlane) -> ChunkCleanup:
    return ChunkCleanup(plane, STAGING)


@given(st.lists(st.integers(0, 5), max_size=8), st.lists(st.sampled_from(("ok", "fail")), max_size=12))
@settings(max_examples=40)
def test_every_key_is_cleared_or_given_up_and_counted(sizes: list[int], script: list[str]) -> None:
    async def scenario() -> None:
        plane = FakePlane(clears=script)
        background = cleanup(plane)
        keys = [f"k{i}_{j}" for i, size in enumerate(sizes) for j in range(size)]
        plane.rows = {key: {} for key in keys}
        for i, size in enumerate(sizes):
            await background.schedule([f"k{i}_{j}" for j in range(size)])
            await asyncio.sleep(0)
        await background.drain()
        counts = background.statistics()
        assert counts["cleanup_cleared"] + counts["cleanup_given_up"] == len(keys)
        assert len(plane.rows) == counts["cleanup_given_up"] and counts["cleanup_waiting"] == 0
        assert counts["cleanup_failures"] <= script.count("fail")

    asyncio.run(scenario())


async def test_a_clear_that_keeps_failing_is_given_up() -> None:
    plane = FakePlane(clears=["fail"] * 50)
    background = cleanup(plane)
    background.add(["a"])
    await background.drain()
    assert len(plane.clear_keys) == ATTEMPTS
    assert background.statistics()["cleanup_given_up"] == 1


async def test_during_a_pause_no_row_goes() -> None:
    plane = FakePlane(clears=["ok"])
    plane.rows = {"a": {}, "b": {}}
    background = cleanup(plane)
    background.add(["a"])
    await asyncio.sleep(0)
    await background.pause()
    assert set(plane.rows) == {"b"}, "the pause was granted while a clear was under way"
    await background.schedule(["b"])
    for _ in range(20):
        await asyncio.sleep(0)
    assert set(plane.rows) == {"b"}
    background.resume()
    await background.drain()
    assert plane.rows == {}


async def test_whoever_schedules_waits_while_the_queue_is_over_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cleanup, "CAPACITY_KEYS", 2)
    plane = FakePlane(clears=["hang"])
    background = cleanup(plane)
    await background.schedule(["a"])
    await asyncio.sleep(0)
    await background.schedule(["b", "c"])
    held = asyncio.ensure_future(background.schedule(["d"]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not held.done()
    plane.gate.set()
    await held


async def test_a_pause_lets_those_go_who_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_cleanup, "CAPACITY_KEYS", 1)
    background = cleanup(FakePlane(clears=["hang"]))
    background.add(["a"])
    await asyncio.sleep(0)
    held = asyncio.ensure_future(background.schedule(["b", "c"]))
    await asyncio.sleep(0)
    pausing = asyncio.ensure_future(background.pause())
    await held
    assert not pausing.done()
    pausing.cancel()


async def test_close_tries_once_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    plane = FakePlane(clears=["fail", "fail"])
    plane.rows = {"a": {}}
    monkeypatch.setattr(chunk_cleanup, "RETRY_AFTER_S", 3600.0)
    background = cleanup(plane)
    background.add(["a"])
    for _ in range(10):
        await asyncio.sleep(0)
    await background.close()
    assert background.statistics()["cleanup_given_up"] == 1
