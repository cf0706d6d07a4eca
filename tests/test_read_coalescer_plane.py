"""The coalescer over a whole plane: real sockets, real units, of which one stops and comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from actors.read_coalescer import ReadCoalescer
from policies.calls import CallIdentity
from policies.chain import CHUNK_FIELDS, Chain, ChainDigest, ChainRefusal
from policies.columns import Column
from policies.config import CoalescerConfig
from policies.errors import KeyMissing, RequestTimeout, Unreachable
from policies.receipts import Continuation
from tests.generated_tokens import chain, request
from tests.plane_in_process import InProcessPlane, in_process_plane

TOKENS = 8
CALLS = 64


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane(units=4) as made:
        yield made


def stage(plane: InProcessPlane) -> dict[str, list[Continuation]]:
    """64 cut calls, a chunk each, spread over the units: unit → its calls."""
    client, whole = plane.client(), chain(TOKENS)
    digest = ChainDigest.of(whole).hexdigest()
    staged: dict[str, list[Continuation]] = {unit: [] for unit in plane.units}
    for first in range(0, CALLS, 4):
        calls = [CallIdentity(f"r{n}", "c") for n in range(first, first + 4)]
        fields = {name: Column.jagged(np.tile(getattr(whole, name), 4), [TOKENS] * 4) for name in CHUNK_FIELDS}
        ack = client.put("staging", [call.chunk_key(0) for call in calls], fields)
        staged[ack.unit] += [
            Continuation(request(call.next_attempt()), (call.chunk_key(0),), TOKENS, digest) for call in calls
        ]
    assert {len(calls) for calls in staged.values()} == {CALLS // 4}
    return staged


@contextmanager
def stopped(plane: InProcessPlane, unit: str) -> Iterator[threading.Event]:
    """The unit does nothing until the event is set, or the block ends."""
    go_on, stands = threading.Event(), threading.Event()

    def stand_still() -> None:
        stands.set()
        go_on.wait()

    plane.units[unit]._loop.call_soon(stand_still)
    stands.wait()
    try:
        yield go_on
    finally:
        go_on.set()


def restore(reader: ReadCoalescer, calls: Sequence[Continuation]) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(reader.read_chain(call, 0)) for call in calls]


async def test_a_mass_resume_is_one_read(plane: InProcessPlane) -> None:
    staged = stage(plane)
    reader = ReadCoalescer(plane.address, CoalescerConfig())
    chains = await asyncio.gather(*restore(reader, [call for calls in staged.values() for call in calls]))
    assert all(isinstance(found, Chain) and found.ids.tolist() == list(range(TOKENS)) for found in chains)
    statistics = reader.statistics()
    assert (statistics["gets"], statistics["keys_per_get"], statistics["chains_restored"]) == (1, CALLS, CALLS)
    assert statistics["unit_gets"] == dict.fromkeys(plane.units, 1)
    await reader.close()


async def test_a_unit_that_is_down_during_a_mass_resume_costs_its_own_calls_only(plane: InProcessPlane) -> None:
    """All restores of a worker leave together. Those on other units are done while the unit stands still; those on it
    are refused by its name, later ones at once, and restored again when it is back."""
    staged = stage(plane)
    reader = ReadCoalescer(plane.address, CoalescerConfig(timeout_s=0.6, probe_after_s=0.1))
    with stopped(plane, "u1") as go_on:
        lost = restore(reader, staged["u1"])
        others = restore(reader, [call for unit, calls in staged.items() if unit != "u1" for call in calls])
        assert all(isinstance(found, Chain) for found in await asyncio.gather(*others))
        assert not any(read.done() for read in lost)
        refusals = await asyncio.gather(*lost)
        for _ in range(4):
            refusals += await asyncio.gather(*restore(reader, staged["u1"]))
            assert isinstance((await asyncio.gather(*restore(reader, staged["u0"][:1])))[0], Chain)
        assert all(isinstance(found, ChainRefusal) for found in refusals)
        assert {found.reason for found in refusals} == {"chunk_unreachable"}
        assert all("unit u1" in found.cause for found in refusals)
        statistics = reader.statistics()
        assert statistics["unit_gets"]["u1"] - statistics["probes"] == 3, "one read, and the halves of it"
        assert statistics["refused_chunk_unreachable"] == len(refusals) == 5 * CALLS // 4
        go_on.set()
        while isinstance((await asyncio.gather(*restore(reader, staged["u1"][:1])))[0], ChainRefusal):
            await asyncio.sleep(0.02)
    assert all(isinstance(found, Chain) for found in await asyncio.gather(*restore(reader, staged["u1"])))
    await reader.close()


async def test_restores_on_a_unit_that_comes_back_in_time_succeed(plane: InProcessPlane) -> None:
    staged = stage(plane)
    reader = ReadCoalescer(plane.address, CoalescerConfig(timeout_s=30.0))
    with stopped(plane, "u1") as go_on:
        late = restore(reader, staged["u1"])
        others = restore(reader, staged["u0"] + staged["u2"] + staged["u3"])
        assert all(isinstance(found, Chain) for found in await asyncio.gather(*others))
        go_on.set()
    assert all(isinstance(found, Chain) for found in await asyncio.gather(*late))
    assert reader.statistics()["unit_gets"] == dict.fromkeys(plane.units, 1)
    await reader.close()


async def test_a_key_that_was_never_sealed_fails_alone_among_units_that_work_and_one_that_does_not(
    plane: InProcessPlane,
) -> None:
    staged = stage(plane)
    reader = ReadCoalescer(plane.address, CoalescerConfig(timeout_s=0.4))
    keys = {unit: [call.keys[0] for call in calls] for unit, calls in staged.items()}
    asked = [*keys["u0"], "never sealed", *keys["u1"][:6], *keys["u2"], *keys["u3"]]
    with stopped(plane, "u1"):
        answers = await asyncio.gather(*(reader.read([key]) for key in asked), return_exceptions=True)
    kinds = [type(answer) for answer in answers]
    assert (kinds.count(list), kinds.count(KeyMissing)) == (48, 1)
    failures = [answer for answer in answers if isinstance(answer, Unreachable)]
    assert len(failures) == 6 and all("unit u1" in str(answer) for answer in failures)
    await reader.close()


async def test_rows_larger_than_the_limits_are_read_in_order_within_them(plane: InProcessPlane) -> None:
    """Ten large rows, of which four fit into a read: the first tells how large they are."""
    client = plane.client()
    rows = np.arange(10, dtype=np.float32).repeat(1 << 18).reshape(10, -1)
    ids = np.zeros((10, 1), np.int32)
    client.put("staging", [f"k{n}" for n in range(10)], {"ids": ids, "logprobs": rows, "versions": ids})
    reader = ReadCoalescer(plane.address, CoalescerConfig(max_bytes=4 * rows[0].nbytes + 100, max_in_flight=1))
    await reader.read(["k0"])
    found = await reader.read([f"k{n}" for n in range(10)])
    assert [float(row["logprobs"][-1]) for row in found] == list(range(10))
    assert reader.statistics()["gets"] == 4, "the first, and ten in reads of four"
    await reader.close()


async def test_a_read_past_its_deadline_frees_its_place(plane: InProcessPlane) -> None:
    staged = stage(plane)
    reader = ReadCoalescer(plane.address, CoalescerConfig(timeout_s=0.3, max_in_flight=1))
    with stopped(plane, "u1"):
        with pytest.raises(Unreachable) as failure:
            await reader.read(staged["u1"][0].keys)
        assert not isinstance(failure.value, RequestTimeout), "the plane's own answer, which names the unit"
        assert "unit u1" in str(failure.value)
        assert len(await reader.read(staged["u0"][0].keys)) == 1, "there is one place, and it is free again"
    await reader.close()
