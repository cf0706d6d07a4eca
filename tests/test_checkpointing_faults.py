"""Saves and restores that go wrong: a full disk, a saver that dies, a unit that is gone, bytes that are made up."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import storage_unit
from actors.checkpoint_files import PartialCheckpoint, StoredCheckpoint
from actors.checkpointing import restore_plane, save_plane
from actors.client import DataPlaneClient
from policies.catalog_snapshot import restore_snapshot
from policies.errors import CheckpointDamaged, CheckpointError, DtypeConflict, RegraftError, RemoteError, Unreachable
from policies.manifest import CONTROLLER_FILE, JOB_FILE
from policies.operations import Ask
from tests.plane_in_process import InProcessPlane, in_process_plane
from tests.test_client import held_bytes, wait_until


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane(timeout=3.0) as running:
        yield running


@pytest.fixture
def client(plane: InProcessPlane) -> DataPlaneClient:
    return plane.client()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in which no file can grow beyond 1 MiB; a write past that fails in its middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    yield tmp_path
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("filled_by", ["a unit", "the job"])
def test_a_full_disk_leaves_the_earlier_checkpoint_and_nothing_else(
    client: DataPlaneClient, small_disk: Path, filled_by: str
) -> None:
    client.put("t", ["a"], {"x": np.arange(4)[None]})
    save_plane(client, small_disk, {"step": 1}, {}, "c1")
    job: dict[str, Any] = {"step": 2}
    if filled_by == "a unit":
        client.put("t", ["big"], {"x": np.zeros((1, 1 << 19), np.int64)})
    else:
        job["log"] = bytes(2 << 20)
    with pytest.raises((CheckpointError, RemoteError), match="checkpoint-00000002"):
        save_plane(client, small_disk, job, {}, "c2")
    assert [path.name for path in small_disk.iterdir()] == ["checkpoint-00000001"]
    assert StoredCheckpoint.open(small_disk).job == {"step": 1}
    client.clear("t", ["a", "big"])
    client.put("t", ["b"], {"x": np.arange(4)[None]})
    save_plane(client, small_disk, {"step": 3}, {}, "c3")
    assert StoredCheckpoint.open(small_disk).job == {"step": 3}


def test_a_job_state_that_is_not_plain_is_refused_before_anything_is_written(
    client: DataPlaneClient, tmp_path: Path
) -> None:
    for job in ({"x": object()}, {"x": 1 << 80}, {"x": "\ud800"}):
        with pytest.raises(CheckpointError, match="job's state"):
            save_plane(client, tmp_path / "c", job, {}, "c")
    assert not (tmp_path / "c").exists()


def test_a_unit_that_is_gone_fails_the_save_and_the_others_are_released(
    plane: InProcessPlane, client: DataPlaneClient, tmp_path: Path
) -> None:
    units = {key: client.put("t", [key], {"x": np.arange(8)[None]}).unit for key in ("a", "b")}
    plane.units["u1"].close()
    with pytest.raises(Unreachable, match="u1"):
        save_plane(client, tmp_path, {}, {}, "c")
    assert list(tmp_path.iterdir()) == []
    client.clear("t", [key for key, unit in units.items() if unit == "u0"])
    wait_until(lambda: client.ask([Ask("u0", "statistics")])[0].body["bytes"] == 0)


def test_a_saver_that_dies_does_not_hold_a_unit_for_ever(
    plane: InProcessPlane, client: DataPlaneClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_unit, "HOLD_S", 0.3)
    client.put("t", ["a"], {"x": np.arange(8)[None]})
    client.ask([Ask(unit, "hold", {"holder": "dead"}) for unit in plane.units])
    client.clear("t", ["a"])
    assert client.list("t") == []
    wait_until(lambda: held_bytes(plane) == 0)
    with pytest.raises(RegraftError, match="not held by 'dead'"):
        client.ask([Ask("u0", "save", {"holder": "dead", "blocks": [], "path": os.devnull}, repeatable=False)])


def test_two_saves_at_once_are_both_whole_or_refused(
    plane: InProcessPlane, client: DataPlaneClient, tmp_path: Path
) -> None:
    """To different directories they go on side by side; rows cleared meanwhile are in neither's way."""
    client.put("t", [f"k{i}" for i in range(50)], {"x": np.arange(50)})
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save_plane, plane.client(), tmp_path / str(i), {}, {}, "c") for i in range(4)]
        client.clear("t", [f"k{i}" for i in range(25)])
        for save in saves:
            save.result(30)
    for i in range(4):
        with in_process_plane() as restored:
            reader = restored.client()
            restore_plane(reader, tmp_path / str(i), {})
            keys = [key for key, _ in reader.list("t")]
            assert len(keys) in (25, 50)
            assert [int(x) for x in reader.get("t", keys)["x"]] == [int(key[1:]) for key in keys]


def test_a_fresh_plane_takes_shapes_and_dtypes_from_the_checkpoint(client: DataPlaneClient, tmp_path: Path) -> None:
    """Fault: shape learned on first write, checkpoint loaded before any write."""
    ragged = [np.arange(n, dtype=np.int64) for n in (3, 5)]
    client.put("t", ["a", "b"], {"score": np.array([1, 2], np.float32), "ids": ragged})
    save_plane(client, tmp_path, {}, {}, "c")
    with in_process_plane() as fresh:
        reader = fresh.client()
        restore_plane(reader, tmp_path, {})
        batch = reader.get("t", ["b", "a"])
        assert batch.columns["score"].shape == () and batch.columns["score"].dtype == "float32"
        assert [row.tolist() for row in batch["ids"]] == [ragged[1].tolist(), ragged[0].tolist()]
        reader.put("t", ["c"], {"score": np.array([3], np.float32), "ids": [ragged[0]]})
        with pytest.raises(DtypeConflict, match="score"):
            reader.put("t", ["d"], {"score": np.array([3], np.float64)})


CONTROLLERS = [
    b"", b"\xc1", b"\x91" * 100_000, b"\xdd\xff\xff\xff\xff", b"\x81\x90\x01", msgpack.packb(None), msgpack.packb([1]),
    msgpack.packb({}), msgpack.packb({"version": 9}), msgpack.packb({"version": 1}),
    msgpack.packb({"version": 1, "trailing_shapes": 3, "partitions": []}),
    msgpack.packb({"version": 1, "trailing_shapes": [], "partitions": [{}]}),
    msgpack.packb({"version": 1, "trailing_shapes": [], "partitions": [None]}),
    msgpack.packb({"version": 1, "trailing_shapes": [[1 << 62]], "partitions": "x"}),
]  # fmt: skip


@pytest.mark.parametrize("content", CONTROLLERS)
def test_a_made_up_controller_state_is_damage_and_an_earlier_checkpoint_still_restores(
    tmp_path: Path, content: bytes
) -> None:
    with in_process_plane(units=1) as plane:
        client = plane.client()
        client.put("t", ["a", "b"], {"x": np.arange(2)})
        good = save_plane(client, tmp_path, {}, {}, "c1").path
        client.clear("t", ["a"])
        later = save_plane(client, tmp_path, {}, {}, "c2").path
    with PartialCheckpoint(tmp_path) as partial:
        (partial.path / "unit-u0.safetensors").write_bytes((later / "unit-u0.safetensors").read_bytes())
        partial.write("unit-u0.safetensors", (later / "unit-u0.safetensors").read_bytes())
        partial.write(CONTROLLER_FILE, content)
        partial.write(JOB_FILE, msgpack.packb({}))
        bad = partial.publish("c3", {}, ["unit-u0.safetensors"])
    with in_process_plane(units=1) as plane:
        client = plane.client()
        with pytest.raises(CheckpointDamaged):
            restore_plane(client, bad, {})
        assert held_bytes(plane) == 0
        restore_plane(client, good, {})
        assert [int(x) for x in client.get("t", ["a", "b"])["x"]] == [0, 1]


ODD: list[Any] = [None, -1, 1 << 62, "x", b"\xff", [], {}, [[]], {"dtype": "int64", "data": b"123"}, 0.5, True]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_part_of_a_controller_state_replaced_is_at_worst_damage(
    saved_state: tuple[Any, set[int]], data: st.DataObject
) -> None:
    """One part of a real snapshot, at any depth, becomes something odd: it restores, or it is `CheckpointDamaged`."""
    plain, blocks = saved_state
    changed = node = msgpack.unpackb(msgpack.packb(plain), strict_map_key=False)
    while True:
        at = data.draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        if not (isinstance(node[at], dict | list) and node[at] and data.draw(st.integers(0, 4))):
            break
        node = node[at]
    node[at] = data.draw(st.sampled_from(ODD))
    with suppress(CheckpointDamaged):
        restore_snapshot(changed, dict.fromkeys(blocks, "u0"), False)


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, set[int]]:
    with in_process_plane(units=1) as plane:
        client = plane.client()
        ids = [np.arange(n) for n in (1, 2, 3)]
        client.put("t", ["a", "b", "c"], {"x": np.arange(3), "ids": ids}, tags=[{"n": 1}] * 3)
        client.put("t", ["b"], {"y": np.zeros((1, 2, 3))})
        client.claim("t", "actor", ["x"], 2)
        path = save_plane(client, tmp_path_factory.mktemp("saved"), {}, {}, "c").path
        blocks = set(client.ask([Ask("controller", "snapshot")])[0].body["blocks"]["u0"])
    return msgpack.unpackb((path / CONTROLLER_FILE).read_bytes(), strict_map_key=False), blocks
