"""Payloads by reference: the same rows as in frames, whoever dies, and nothing that fills the store.

Every test says by the units' own counters that references were used (or were not).
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.client import DataPlaneClient, PlaneAddress
from actors.data_plane import DataPlane
from actors.object_store import ObjectStore
from policies.config import PlaneConfig, TransportConfig
from policies.operations import Ask
from tests.test_client import wait_until
from tests.test_columns import row_lists, same

ANY_SIZE = TransportConfig(put_by_reference_bytes=1, get_by_reference_bytes=1, get_by_reference_fraction=0.0)
FRAMES = TransportConfig(by_reference=False)
MIB = 1 << 20


@pytest.fixture(scope="module")
def plane(ray_cluster: str) -> Iterator[DataPlane]:
    """Everything goes by reference here, whatever its size."""
    with DataPlane.launch(PlaneConfig(units=2, transport=ANY_SIZE), name="references") as running:
        yield running


@pytest.fixture(scope="module")
def frames(ray_cluster: str) -> Iterator[DataPlane]:
    with DataPlane.launch(PlaneConfig(units=2, transport=FRAMES), name="frames") as running:
        yield running


def statistics(plane: DataPlane) -> list[dict[str, Any]]:
    client = plane.client()
    return [dict(m.body) for m in client.ask([Ask(unit, "statistics") for unit in client.units()])]


def by_reference(plane: DataPlane) -> Counter[str]:
    return sum((Counter(unit["by_reference"]) for unit in statistics(plane)), Counter())


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), row_lists()), min_size=1, max_size=3, unique_by=lambda f: f[0])
)
def test_both_transports_give_one_result(plane: DataPlane, frames: DataPlane, fields: list[tuple[str, Any]]) -> None:
    count = min(len(rows) for _, rows in fields)
    keys = [f"k{i}" for i in range(count)]
    put = {name: rows[:count] for name, rows in fields}
    asked = [*reversed(keys), keys[0]]
    batches = []
    for each in (plane, frames):
        before = by_reference(each)
        client = each.client()
        client.put("both", keys, put)
        batches.append(client.get("both", asked))
        client.drop_partition("both")
        used = by_reference(each) - before
        assert used == (Counter(put=1, lend=1) if each is plane else Counter())
    for name, rows in put.items():
        ours, theirs = (batch.columns[name] for batch in batches)
        assert (ours.dtype, ours.shape, ours.rows) == (theirs.dtype, theirs.shape, theirs.rows)
        assert all(same(ours.row(i), rows[int(key[1:])]) for i, key in enumerate(asked))
        assert all(same(ours.row(i), theirs.row(i)) for i in range(len(asked)))


def test_a_small_payload_goes_in_frames_where_the_thresholds_say_so(ray_cluster: str) -> None:
    with DataPlane.launch(PlaneConfig(units=1), name="defaults") as plane:
        client = plane.client()
        client.put("t", ["a"], {"x": np.zeros((1, MIB), np.uint8)})
        client.get("t", ["a"])
        assert by_reference(plane) == Counter()
        client.put("t", ["b"], {"x": np.zeros((1, 6 * MIB), np.uint8)})
        assert len(client.get("t", ["b"])["x"][0]) == 6 * MIB
        assert by_reference(plane) == Counter(put=1, lend=1)


@ray.remote(num_cpus=0, max_restarts=0)
class Writer:
    def write(self, address: PlaneAddress) -> int:
        rows = np.arange(16 * 32_768, dtype=np.int64).reshape(16, -1)
        DataPlaneClient(address).put("dead", [f"w{i}" for i in range(16)], {"x": rows})
        return os.getpid()


def test_rows_outlive_their_writer_and_are_lent_again(plane: DataPlane) -> None:
    """Fault: the row is only a reference to the producer's memory. The writer's object cannot be borrowed any more, so
    the first reader falls back to frames, and from then on the unit lends a copy of its own."""
    before = by_reference(plane)
    writer: Any = Writer.remote()
    os.kill(ray.get(writer.write.remote(plane.address)), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(writer.write.remote(plane.address))
    client = plane.client()
    keys = [f"w{i}" for i in range(16)]
    for lends in (1, 2):
        rows = client.get("dead", keys, timeout=30)["x"]
        assert all(np.array_equal(rows[i], np.arange(i * 32_768, (i + 1) * 32_768)) for i in range(16))
        assert by_reference(plane) - before == Counter(put=1, lend=lends)


def test_a_block_that_lost_rows_is_not_lent_and_lets_go_of_the_object(plane: DataPlane) -> None:
    client = plane.client()
    before = by_reference(plane)
    rows = np.random.default_rng(1).integers(0, 255, (3, MIB), np.uint8)
    client.put("few", ["a", "b", "c"], {"x": rows})
    client.clear("few", ["a", "b"])
    wait_until(lambda: min(s["bytes"] for s in statistics(plane) if s["rows"]) < 2 * MIB)
    assert np.array_equal(client.get("few", ["c"])["x"][0], rows[2])
    assert by_reference(plane) - before == Counter(put=1)


def test_what_a_reader_does_to_its_tensors_no_other_reader_sees(plane: DataPlane) -> None:
    client = plane.client()
    client.put("shared", ["a"], {"x": np.zeros((1, 1000), np.int64)})
    first = client.get("shared", ["a"])["x"][0]
    first += 7
    assert int(client.get("shared", ["a"])["x"][0].sum()) == 0


def test_more_than_the_store_holds_streams_through_it_and_nothing_stays_pinned(plane: DataPlane) -> None:
    """Fault: the store fills because readers' views pin old objects. Ray frees about once a second, so a fast stream
    gets ahead of it; frames take over then, and nobody fails. The caller's last batch stays, in a cycle."""
    client = plane.client()
    before = by_reference(plane)
    store = ObjectStore(reserve=0.0)
    at_start = store.room()
    keys = [f"s{i}" for i in range(20)]
    for number in range(40):
        client.put("stream", keys, {"x": np.full((20, MIB // 2), number, np.uint8)})
        batch = client.get("stream", keys)
        assert all(int(row[0]) == int(row[-1]) == number for row in batch["x"])
        client.clear("stream", keys)
    cycle: list[Any] = [batch]
    cycle.append(cycle)
    used = by_reference(plane) - before
    assert 10 <= used["put"] <= 40, used
    wait_until(lambda: at_start - store.room() < 11 * MIB)
    del batch, cycle
    gc.collect()
    wait_until(lambda: at_start - store.room() < MIB)


def test_a_store_without_room_means_frames_and_a_warning(ray_cluster: str) -> None:
    config = PlaneConfig(units=1, transport=TransportConfig(put_by_reference_bytes=1, store_reserve=1.0))
    with DataPlane.launch(config, name="no room") as plane:
        client = plane.client()
        wait_until(lambda: statistics(plane)[0]["store_room"] == 0)
        client.put("t", ["a"], {"x": np.zeros((1, 1000))})  # its answer tells of the room
        before = by_reference(plane)
        client.put("t", ["b"], {"x": np.zeros((1, 1000))})
        assert len(client.get("t", ["a", "b"])["x"]) == 2
        assert by_reference(plane) - before == Counter()
