"""Client, controller and units together, over real sockets in one process."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.checkpointing import restore_plane, save_plane
from actors.client import AsyncDataPlaneClient, DataPlaneClient, PlaneAddress
from actors.wire.secret import Secret
from policies.errors import (
    CapacityExceeded,
    ClosedError,
    DtypeConflict,
    DuplicateKey,
    KeyMissing,
    Refused,
    RequestTimeout,
    Unauthorized,
    UnknownField,
    UnknownPartition,
    WireError,
)
from policies.stored_block import OVERHEAD_BYTES
from tests.plane_in_process import InProcessPlane, in_process_plane


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane() as running:
        yield running


@pytest.fixture
def client(plane: InProcessPlane) -> DataPlaneClient:
    return plane.client()


def ids(*lengths: int) -> list[np.ndarray]:
    return [np.arange(n, dtype=np.int64) + 100 * i for i, n in enumerate(lengths)]


def test_rows_of_many_puts_come_back_in_the_order_asked(client: DataPlaneClient) -> None:
    rows = {}
    for batch in range(5):
        keys = [f"g{batch}_s{i}_c0" for i in range(4)]
        values = [np.arange(3 * batch + i, dtype=np.int64) for i in range(4)]
        scores = np.arange(4, dtype=np.float32) + batch
        client.put("train", keys, {"ids": values, "score": scores})
        rows.update({k: (v, s) for k, v, s in zip(keys, values, scores, strict=True)})
    asked = list(reversed(rows))[::2] + list(rows)[:3]
    batch = client.get("train", asked)
    assert batch.keys == tuple(asked) and set(batch.verdicts) == {"ok"}
    for (key, row), wanted in zip(batch.rows(), asked, strict=True):
        assert key == wanted
        assert np.array_equal(row["ids"], rows[key][0]) and row["ids"].dtype == np.int64
        assert row["score"] == rows[key][1] and row["score"].dtype == np.float32 and row["score"].shape == ()


def test_a_mapping_of_torch_tensors_goes_in_and_comes_out(client: DataPlaneClient) -> None:
    values = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    client.put("train", ["a", "b"], {"x": values, "plain": [{"n": 1}, None], "raw": [b"", b"ab"]})
    batch = client.get("train", ["b", "a"])
    assert torch.equal(batch["x"][0], values[1])
    assert list(batch["plain"]) == [None, {"n": 1}] and list(batch["raw"]) == [b"ab", b""]


def test_fields_of_several_puts_meet_in_one_row(client: DataPlaneClient) -> None:
    client.put("train", ["a", "b"], {"ids": ids(3, 4)})
    client.put("train", ["b"], {"score": np.array([0.5])})
    assert list(client.get("train", ["a", "b"]).columns) == ["ids"]
    both = client.get("train", ["b"], ["score", "ids"])
    assert float(both["score"][0]) == 0.5 and len(both["ids"][0]) == 4
    partial = client.get("train", ["a", "b"], ["ids", "score"], partial=True)
    assert partial.verdicts == ("missing", "ok") and len(partial["ids"]) == 1


def test_a_replaced_field_is_read_new_and_the_old_bytes_go(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"ids": ids(1000)})
    client.put("train", ["a"], {"ids": ids(5)})
    assert len(client.get("train", ["a"])["ids"][0]) == 5
    wait_until(lambda: held_bytes(plane) < 1000 + OVERHEAD_BYTES)


def test_tags_alone_leave_fields_alone(client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"ids": ids(50)}, tags=[{"status": "running"}])
    assert list(client.claim("train", "actor", ["ids"], 1)) == ["a"]
    client.tag("train", ["a"], [{"status": "pending"}])
    assert client.list("train", {"status": "pending"}) == [("a", {"status": "pending"})]
    assert np.array_equal(client.get("train", ["a"])["ids"][0], ids(50)[0])
    with pytest.raises(RequestTimeout):
        client.claim("train", "actor", ["ids"], 1, timeout=0.1)


def test_clear_of_a_mixed_list_is_idempotent(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a", "b"], {"ids": ids(10, 10)})
    assert client.clear("train", ["a", "nosuch", "b"]) == 2
    assert client.clear("train", ["a", "nosuch", "b"]) == 0
    assert client.clear("nosuch", ["a"]) == 0
    assert client.list("train") == []
    wait_until(lambda: held_bytes(plane) == 0)


def test_a_bad_key_fails_by_name_and_a_partial_read_goes_on(client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"ids": ids(3)})
    with pytest.raises(KeyMissing, match="'nosuch'") as raised:
        client.get("train", ["a", "nosuch"])
    assert raised.value.details["keys"] == ["nosuch"]
    batch = client.get("train", ["nosuch", "a", "nosuch"], partial=True)
    assert batch.verdicts == ("missing", "ok", "missing") and len(batch["ids"]) == 1


def test_refusals_name_key_and_field_and_change_nothing(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"ids": ids(3)})
    with pytest.raises(DtypeConflict, match="ids"):
        client.put("train", ["a", "b"], {"ids": [np.zeros(1, np.float32)] * 2})
    with pytest.raises(DuplicateKey, match="'b'"):
        client.put("train", ["b", "b"], {"ids": ids(1, 2)})
    with pytest.raises(Refused, match="'ids' has 1 rows for 2 keys"):
        client.put("train", ["b", "c"], {"ids": ids(1)})
    with pytest.raises(WireError, match="field 'odd'"):
        client.put("train", ["b"], {"odd": [(1, 2)]})
    assert [key for key, _ in client.list("train")] == ["a"]
    assert np.array_equal(client.get("train", ["a"])["ids"][0], ids(3)[0])
    wait_until(lambda: held_bytes(plane) == 3 * 8 + 2 * 8 + OVERHEAD_BYTES)


def test_a_strict_plane_has_declared_partitions_only() -> None:
    with in_process_plane(strict=True) as plane:
        client = plane.client()
        with pytest.raises(UnknownPartition, match="nosuch"):
            client.put("nosuch", ["a"], {"ids": ids(1)})
        client.create_partition("train", {"ids": "int64"}, expected_rows=2)
        with pytest.raises(UnknownField, match="'other'"):
            client.put("train", ["a"], {"other": ids(1)})
        client.put("train", ["a", "b"], {"ids": ids(1, 2)})
        assert client.drop_partition("train") == 2
        with pytest.raises(UnknownPartition):
            client.get("train", ["a"])
        wait_until(lambda: held_bytes(plane) == 0)


def test_dropping_a_partition_answers_those_who_wait_in_it(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"x": np.arange(1)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.client().claim, "train", "actor", ["x"], 2, timeout=30)
        wait_until(lambda: client.describe()["parked"] == 1)
        assert client.drop_partition("train") == 1
        with pytest.raises(UnknownPartition, match="train"):
            waiting.result(10)


def test_a_full_unit_refuses_and_takes_rows_again_after_a_clear() -> None:
    with in_process_plane(units=1, capacity=1000 + OVERHEAD_BYTES) as plane:
        client = plane.client()
        client.put("train", ["a"], {"x": np.zeros((1, 100))})
        with pytest.raises(CapacityExceeded, match="holds 1824 of 2024 bytes and the put has 1824") as raised:
            client.put("train", ["b"], {"x": np.zeros((1, 100))})
        assert raised.value.details["unit"] == "u0"
        client.clear("train", ["a"])
        wait_until(lambda: held_bytes(plane) == 0)
        client.put("train", ["b"], {"x": np.zeros((1, 100))})


def test_a_claim_waits_for_the_put_that_completes_it_and_blocks_nobody(plane: InProcessPlane) -> None:
    producer, consumer = plane.client(), plane.client()
    producer.put("train", [f"k{i}" for i in range(31)], {"x": np.arange(31)})
    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(consumer.claim, "train", "actor", ["x"], 32, timeout=30)
        for _ in range(20):
            assert len(producer.list("train")) == 31
        assert not claimed.done()
        producer.put("train", ["k31"], {"x": np.arange(1)})
        assert sorted(claimed.result(10)) == sorted(f"k{i}" for i in range(32))


def test_a_claim_that_times_out_has_claimed_nothing(client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"x": np.arange(1)})
    with pytest.raises(RequestTimeout, match="nothing was claimed"):
        client.claim("train", "actor", ["x"], 2, timeout=0.1)
    assert list(client.claim("train", "actor", ["x"], 1)) == ["a"]


def test_wait_returns_when_every_key_has_every_field(plane: InProcessPlane) -> None:
    client = plane.client()
    client.put("train", ["a", "b"], {"x": np.arange(2)})
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.client().wait, "train", ["a", "b"], ["x", "y"], timeout=30)
        client.put("train", ["a"], {"y": np.arange(1)})
        assert not waiting.done()
        client.put("train", ["b"], {"y": np.arange(1)})
        waiting.result(10)
    with pytest.raises(RequestTimeout):
        client.wait("train", ["a"], ["z"], timeout=0.1)


def test_producers_a_consumer_and_a_cleaner_never_disagree(plane: InProcessPlane) -> None:
    """Fault: two threads on one controller's state. Each row is claimed once, and what was cleared is gone."""
    producers, each = 4, 100
    claimed: list[str] = []

    def produce(number: int) -> None:
        client = plane.client()
        for i in range(each):
            client.put("train", [f"p{number}-{i}"], {"x": np.array([i])})

    def consume() -> None:
        client = plane.client()
        for _ in range(producers * each // 8):
            keys = client.claim("train", "actor", ["x"], 8, timeout=60)
            assert set(client.get("train", keys).verdicts) == {"ok"}
            claimed.extend(keys)
            assert client.clear("train", keys) == 8

    with ThreadPoolExecutor(producers + 1) as pool:
        for job in [pool.submit(produce, n) for n in range(producers)] + [pool.submit(consume)]:
            job.result(120)
    assert sorted(claimed) == sorted(f"p{n}-{i}" for n in range(producers) for i in range(each))
    assert plane.client().list("train") == []


def test_a_dead_unit_costs_its_own_keys_only(plane: InProcessPlane, client: DataPlaneClient) -> None:
    where = {}
    for i in range(6):
        where[f"k{i}"] = client.put("train", [f"k{i}"], {"x": np.array([i])}).unit
    plane.units["u1"].close()
    batch = client.get("train", list(where), partial=True, timeout=3)
    assert batch.verdicts == tuple("ok" if unit == "u0" else "unreachable" for unit in where.values())
    lost = next(key for key, unit in where.items() if unit == "u1")
    assert "u1" in str(batch.errors()[lost])


async def test_the_async_client_does_the_same(plane: InProcessPlane) -> None:
    client = AsyncDataPlaneClient(plane.address)
    waiting = asyncio.create_task(client.claim("train", "actor", ["x"], 8, timeout=30))
    acks = await asyncio.gather(*(client.put("train", [f"k{i}"], {"x": np.array([i])}) for i in range(8)))
    assert [ack.keys for ack in acks] == [(f"k{i}",) for i in range(8)]
    keys = await waiting
    batch = await client.get("train", keys)
    assert sorted(int(v) for v in batch["x"]) == list(range(8))
    await client.tag("train", ["k0"], [{"done": True}])
    assert await client.list("train", {"done": True}) == [("k0", {"done": True})]
    assert await client.clear("train", keys) == 8
    await client.close()
    with pytest.raises(ClosedError):
        await client.list("train")


async def test_cancelling_one_call_hurts_no_other(plane: InProcessPlane) -> None:
    client = AsyncDataPlaneClient(plane.address)
    doomed = asyncio.create_task(client.claim("train", "actor", ["x"], 1, timeout=30))
    await asyncio.sleep(0.05)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await client.put("train", ["a"], {"x": np.arange(1)})
    assert [key for key, _ in await client.list("train")] == ["a"]
    await client.close()


def test_close_ends_waiting_calls_and_is_idempotent(plane: InProcessPlane) -> None:
    client = plane.client()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.claim, "train", "actor", ["x"], 1, timeout=30)
        wait_until(lambda: plane.client().describe()["parked"] == 1)
        client.close()
        client.close()
        with pytest.raises(ClosedError):
            waiting.result(10)


def test_a_stranger_gets_nothing(plane: InProcessPlane) -> None:
    with (
        DataPlaneClient(PlaneAddress(plane.address.endpoint, Secret("guess"), 5)) as stranger,
        pytest.raises(Unauthorized),
    ):
        stranger.list("train")
    assert plane.client().describe()["peers_refused"] >= 1
    assert "guess" not in repr(PlaneAddress("tcp://127.0.0.1:1", Secret("guess")))


def test_a_forked_child_gets_an_error_and_the_parent_goes_on(plane: InProcessPlane, client: DataPlaneClient) -> None:
    client.put("train", ["a"], {"x": np.arange(1)})
    child = os.fork()
    if child == 0:
        try:
            client.list("train")
        except BaseException as error:
            os._exit(7 if type(error).__name__ == "ForkedProcessError" else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    for i in range(10):
        client.put("train", [f"b{i}"], {"x": np.arange(1)})
    assert len(client.list("train")) == 11


@pytest.mark.parametrize("units", [1, 2, 5])
def test_a_checkpoint_restores_into_any_number_of_units(tmp_path: Path, units: int) -> None:
    with in_process_plane(units=3) as plane:
        client = plane.client()
        for i in range(40):
            client.put("train", [f"k{i}"], {"ids": ids(i)}, tags=[{"n": i}])
        assert len(client.claim("train", "actor", ["ids"], 10)) == 10
        client.clear("train", ["k3", "k4"])
        saved = save_plane(client, tmp_path, {"step": 7}, {"model": "m"}, "c1")
        client.clear("train", ["k5"])
    with in_process_plane(units=units) as plane:
        client = plane.client()
        stored = restore_plane(client, tmp_path, {"model": "m"})
        assert (stored.path, stored.job) == (saved.path, {"step": 7})
        present = [i for i in range(40) if i not in (3, 4)]
        assert client.list("train") == [(f"k{i}", {"n": i}) for i in present]
        batch = client.get("train", [f"k{i}" for i in present])
        assert all(np.array_equal(row, ids(i)[0]) for i, row in zip(present, batch["ids"], strict=True))
        assert client.get("train", ["k3"], partial=True).verdicts == ("missing",)
        assert len(client.claim("train", "actor", ["ids"], 28)) == 28
        with pytest.raises(Refused, match="already holds"):
            restore_plane(client, tmp_path, {"model": "m"})


def test_a_save_while_writers_and_cleaners_work_is_whole(plane: InProcessPlane, tmp_path: Path) -> None:
    """Fault: one writer does not take the barrier. Every row of the checkpoint has the bytes it had at one moment."""
    client, stop = plane.client(), threading.Event()
    client.put("train", [f"k{i}" for i in range(100)], {"x": np.arange(100)})

    def churn() -> None:
        other, n = plane.client(), 0
        while not stop.is_set():
            other.put("train", [f"k{n % 100}"], {"y": np.array([n % 100])})
            other.clear("train", [f"k{(n * 7 + 50) % 100}"])
            n += 1

    with ThreadPoolExecutor(1) as pool:
        churning = pool.submit(churn)
        for _ in range(3):
            save_plane(client, tmp_path, {}, {}, "c")
        stop.set()
        churning.result(30)
    with in_process_plane() as restored:
        reader = restored.client()
        restore_plane(reader, tmp_path, {})
        keys = [key for key, _ in reader.list("train")]
        for field in ("x", "y"):
            batch = reader.get("train", keys, [field], partial=True)
            assert set(batch.verdicts) <= {"ok", "missing"}
            for key, row in batch.rows():
                assert int(row[field]) == int(key[1:])


def held_bytes(plane: InProcessPlane) -> int:
    from policies.operations import Ask

    asks = [Ask(unit, "statistics") for unit in plane.units]
    with DataPlaneClient(plane.address) as client:
        return sum(answer.body["bytes"] for answer in client.ask(asks))


def wait_until(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
