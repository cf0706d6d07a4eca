"""Claims over the wire, in both clients: samplers, ranks, progress, and that who waits is in nobody's way."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.checkpointing import restore_plane, save_plane
from actors.client import AsyncDataPlaneClient, DataPlaneClient
from policies.answers import Claim, Progress
from policies.errors import Refused, RequestTimeout
from policies.samplers_sequential import Sequential
from policies.sampling import Candidate, SamplerSpec, balanced, groups, ranks, sampler, staleness
from tests.plane_in_process import InProcessPlane, in_process_plane


class Unlucky(Sequential):
    def offer(self, row: Candidate) -> None:
        if row.key == "k13":
            raise ZeroDivisionError("unlucky")
        super().offer(row)


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane(units=1, samplers={"unlucky": Unlucky}) as running:
        yield running


@pytest.fixture
def client(plane: InProcessPlane) -> DataPlaneClient:
    return plane.client()


def put_groups(client: DataPlaneClient, groups: int, size: int, version: int = 0) -> None:
    """Sibling by sibling, so that the groups end one after the other; row i has i + 1 tokens."""
    for i in range(groups * size):
        tags = {"group": f"g{i % groups}", "version": version}
        client.put("train", [f"g{i % groups}_s{i // groups}"], {"ids": [np.zeros(i + 1, np.int64)]}, tags=[tags])


def parked(client: DataPlaneClient, count: int) -> None:
    deadline = time.monotonic() + 10
    while client.describe()["parked"] != count:
        assert time.monotonic() < deadline, "it was not parked"
        time.sleep(0.01)


def test_a_claim_of_groups_in_micro_batches(client: DataPlaneClient) -> None:
    put_groups(client, 3, 4)
    claim = client.claim("train", "actor", ["ids"], 8, sampler=balanced(2, "ids", of=groups(4)))
    assert list(claim) == [f"g{g}_s{s}" for g in (0, 1) for s in range(4)]
    assert sorted(claim.micro_batches[0] + claim.micro_batches[1]) == sorted(claim.keys)
    tokens = [sum(len(row) for row in client.get("train", batch)["ids"]) for batch in claim.micro_batches]
    assert tokens == [24, 24]
    plain = client.claim("train", "critic", ["ids"], 2)
    assert (plain.micro_batches, plain.skipped) == ((("g0_s0", "g1_s0"),), {})


def test_two_ranks_that_ask_in_any_order(plane: InProcessPlane, client: DataPlaneClient) -> None:
    spec = ranks(2, of=groups(2))
    with ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(plane.client().claim, "train", "actor", ["ids"], 2, sampler=spec, rank=rank, timeout=30)
            for rank in (1, 0)
        ]
        parked(client, 2)
        put_groups(client, 2, 2)
        assert [list(asking.result(10)) for asking in asked] == [["g1_s0", "g1_s1"], ["g0_s0", "g0_s1"]]


def test_old_rows_are_reported(client: DataPlaneClient) -> None:
    put_groups(client, 1, 2, version=3)
    client.put("train", ["old"], {"ids": [np.zeros(1, np.int64)]}, tags=[{"version": 2}])
    claim = client.claim("train", "actor", ["ids"], 2, sampler=staleness(), oldest_version=3)
    assert claim == Claim(("g0_s0", "g0_s1"), {"old": "version 2 is older than 3.0"}, ((0, 1),))
    with pytest.raises(RequestTimeout, match="0 rows are older than version 3"):
        client.claim("train", "actor", ["ids"], 1, sampler=staleness(), oldest_version=3, timeout=0)


def test_a_timeout_says_what_there_was(client: DataPlaneClient) -> None:
    put_groups(client, 2, 3)
    with pytest.raises(RequestTimeout, match=r"1 whole groups of 4 asked for; 0 are ready, 2 incomplete groups hold 6"):
        client.claim("train", "actor", ["ids"], 4, sampler=groups(4), timeout=0.05)
    with pytest.raises(RequestTimeout, match=r"no row has ever come to partition 'trian'.* 'train'"):
        client.claim("trian", "actor", ["ids"], 4, timeout=0)
    with pytest.raises(RequestTimeout, match=r"'b' of 2 keys lack them"):
        client.wait("train", ["g0_s0", "b"], ["ids"], timeout=0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"count": "two"}, "count must be a number"),
        ({"count": True}, "count must be a number"),
        ({"rank": 1.5}, "rank must be a number"),
        ({"rank": 0}, "its sampler knows no ranks"),
        ({"oldest_version": "new"}, "oldest_version must be a number"),
        ({"oldest_version": math.nan, "sampler": staleness()}, "oldest_version must be"),
        ({"sampler": "groups"}, "must be a SamplerSpec"),
        ({"sampler": groups(3)}, "2 rows asked for in groups of 3"),
        ({"sampler": sampler("mine")}, "there is no sampler 'mine'; this plane has .*'unlucky'"),
        ({"sampler": SamplerSpec("groups", (("size", (1, 2)),))}, "setting 'size' is"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_asked_is_refused(client: DataPlaneClient, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        client.claim("train", "actor", ["ids"], asked.pop("count", 2), timeout=0, **asked)
    assert client.describe()["partitions"] == {}


def test_a_users_sampler_that_fails_harms_no_put_and_no_other(plane: InProcessPlane, client: DataPlaneClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = {"sampler": sampler("unlucky"), "timeout": 30}
        waiting = pool.submit(plane.client().claim, "train", "actor", ["x"], 20, **asked)  # type: ignore[arg-type]
        parked(client, 1)
        for i in range(20):
            client.put("train", [f"k{i}"], {"x": np.array([i])})
        with pytest.raises(Refused, match="'unlucky' of task 'actor' failed in offer: ZeroDivisionError: unlucky"):
            waiting.result(10)
    assert len(client.claim("train", "actor", ["x"], 20)) == 20


def test_progress_and_reset(client: DataPlaneClient) -> None:
    client.create_partition("train", expected_rows=3)
    client.put("train", ["a", "b"], {"x": np.arange(2)})
    client.claim("train", "actor", ["x"], 2)
    assert client.produced("train") == client.consumed("train", "actor") == Progress(2, 3)
    assert not client.produced("train").complete
    client.reset_task("train", "actor")
    assert client.consumed("train", "actor") == Progress(0, 3)
    client.put("train", ["c"], {"x": np.arange(1)})
    assert len(client.claim("train", "actor", ["x"], 3)) == 3
    assert client.produced("train").complete and client.consumed("train", "actor").complete
    assert client.consumed("nosuch", "actor") == Progress(0, None)


def test_a_reset_wakes_who_waits_for_it(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"x": np.arange(1)})
    client.claim("train", "actor", ["x"], 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.client().claim, "train", "actor", ["x"], 1, timeout=30)
        parked(client, 1)
        client.reset_task("train", "actor")
        assert list(waiting.result(10)) == ["a"]


async def test_the_async_client_does_the_same(plane: InProcessPlane) -> None:
    client = AsyncDataPlaneClient(plane.address)
    tags = [{"group": "g", "version": 1}, {"group": "g", "version": 1}]
    await client.put("train", ["a", "b"], {"x": np.arange(2)}, tags=tags)
    spec = ranks(1, of=staleness(of=groups(2)))
    claim = await client.claim("train", "actor", ["x"], 2, sampler=spec, rank=0, oldest_version=1)
    assert claim.keys == ("a", "b")
    assert await client.consumed("train", "actor") == await client.produced("train") == Progress(2, None)
    await client.reset_task("train", "actor")
    assert (await client.consumed("train", "actor")).rows == 0
    await client.close()


def test_a_claim_that_waits_delays_no_other_request(plane: InProcessPlane, client: DataPlaneClient) -> None:
    """It is parked for 5 s on the real loop; meanwhile every kind of request is answered, and it is still parked."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.client().claim, "train", "actor", ["x"], 4, sampler=groups(4), timeout=5)
        parked(client, 1)
        for i in range(50):
            client.put("train", [f"k{i}"], {"x": np.array([i])}, tags=[{"n": i}])
            assert client.get("train", [f"k{i}"]).verdicts == ("ok",)
            client.tag("train", [f"k{i}"], [{"seen": True}])
            assert len(client.list("train", {"n": i})) == 1
            assert list(client.claim("train", "other", ["x"], 1)) == [f"k{i}"]
            assert client.consumed("train", "other").rows == i + 1
            client.wait("train", [f"k{i}"], ["x"])
            assert client.clear("train", [f"k{i}"]) == 1
        assert client.describe()["parked"] == 1 and not waiting.done()
        with pytest.raises(RequestTimeout, match="nothing was claimed"):
            waiting.result(20)


def test_ranks_and_groups_go_on_after_a_checkpoint(plane: InProcessPlane, tmp_path: Path) -> None:
    """6 finished groups and 2 partly consumed rounds; what follows is what would have followed."""
    spec, client = ranks(2, of=groups(2)), plane.client()
    put_groups(client, 6, 2)
    first = client.claim("train", "actor", ["ids"], 2, sampler=spec, rank=0)
    save_plane(client, tmp_path, {}, {}, "c1")
    with in_process_plane(units=1) as other:
        again = other.client()
        restore_plane(again, tmp_path, {})
        for reader in (client, again):
            got = [list(reader.claim("train", "actor", ["ids"], 2, sampler=spec, rank=r)) for r in (1, 1, 0, 0, 1)]
            assert [list(first), *got] == [[f"g{g}_s0", f"g{g}_s1"] for g in (0, 1, 3, 2, 4, 5)]
