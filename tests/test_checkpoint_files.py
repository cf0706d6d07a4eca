"""Checkpoints appear whole or not at all, and a damaged one is refused with what is wrong."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest

from actors.checkpoint_files import PartialCheckpoint, StoredCheckpoint
from policies.errors import CheckpointDamaged, CheckpointError, CheckpointMissing, FingerprintMismatch
from policies.manifest import CONTROLLER_FILE, JOB_FILE, MANIFEST, FileEntry, require_fingerprint


def save(root: Path, job: dict[str, int], model: str = "m") -> Path:
    with PartialCheckpoint(root) as partial:
        partial.write("unit-u0.safetensors", b"blocks")
        partial.write(CONTROLLER_FILE, b"state")
        partial.write(JOB_FILE, msgpack.packb(job))
        return partial.publish("c1", {"model": model}, ["unit-u0.safetensors"])


def test_a_saved_checkpoint_opens_as_it_was(tmp_path: Path) -> None:
    path = save(tmp_path, {"step": 3})
    for given in (path, tmp_path):
        stored = StoredCheckpoint.open(given)
        assert (stored.path, stored.controller, stored.job) == (path, b"state", {"step": 3})
        assert [p.read_bytes() for p in stored.unit_files] == [b"blocks"]


def test_the_newest_whole_one_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, {"step": 1})
    second, third = save(tmp_path, {"step": 2}), save(tmp_path, {"step": 3})
    (third / CONTROLLER_FILE).write_bytes(b"stat")
    assert StoredCheckpoint.open(tmp_path).path == second
    assert "controller.msgpack has 4 bytes, its manifest says 5" in caplog.text
    with pytest.raises(CheckpointDamaged, match="has 4 bytes"):
        StoredCheckpoint.open(third)


@pytest.mark.parametrize("stop", ["before files", "between files", "before manifest"])
def test_a_stop_in_the_middle_leaves_no_checkpoint_and_the_next_save_cleans_up(tmp_path: Path, stop: str) -> None:
    first = save(tmp_path, {"step": 1})
    partial = PartialCheckpoint(tmp_path)
    if stop != "before files":
        partial.write("unit-u0.safetensors", b"blocks")
    if stop == "before manifest":
        partial.write(CONTROLLER_FILE, b"state")
        partial.write(JOB_FILE, msgpack.packb({}))
    assert StoredCheckpoint.open(tmp_path).path == first
    os.close(partial._lock)  # as the system does for a process that is killed
    second = save(tmp_path, {"step": 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([first.name, second.name])


def test_a_failing_save_removes_what_it_wrote(tmp_path: Path) -> None:
    save(tmp_path, {"step": 1})
    with pytest.raises(RuntimeError), PartialCheckpoint(tmp_path) as partial:
        partial.write("unit-u0.safetensors", b"blocks")
        raise RuntimeError("the unit died")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-00000001"]


def test_a_file_that_another_node_wrote_elsewhere_is_noticed(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match=r"reports 6 bytes, here it has None; .*file system that all nodes share"),
        PartialCheckpoint(tmp_path) as partial,
    ):
        partial.add(FileEntry("unit-u1.safetensors", 6, "00"))


@pytest.mark.parametrize("name", ["unit-u0.safetensors", CONTROLLER_FILE, JOB_FILE, MANIFEST])
def test_a_missing_or_altered_file_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, {"step": 1})
    content = (path / name).read_bytes()
    (path / name).unlink()
    with pytest.raises(CheckpointDamaged, match=name):
        StoredCheckpoint.open(path)
    (path / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CheckpointDamaged, match=name):
        StoredCheckpoint.open(path)


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    path = save(tmp_path, {})
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][0]["name"] = "../secrets"
    manifest["unit_files"] = ["../secrets"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointDamaged, match="cannot be its own"):
        StoredCheckpoint.open(path)


def test_nothing_to_restore(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="holds no checkpoint"):
        StoredCheckpoint.open(tmp_path)
    with pytest.raises(CheckpointMissing, match="not a directory"):
        StoredCheckpoint.open(tmp_path / "nowhere")


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        PartialCheckpoint(tmp_path / "file" / "checkpoints")


def test_another_job_is_refused_by_the_name_of_the_field(tmp_path: Path) -> None:
    stored = StoredCheckpoint.open(save(tmp_path, {}, model="llama"))
    require_fingerprint(stored.manifest.fingerprint, {"model": "llama"}, "here")
    with pytest.raises(FingerprintMismatch, match="model 'llama', this job has 'qwen'") as raised:
        require_fingerprint(stored.manifest.fingerprint, {"model": "qwen"}, "here")
    assert raised.value.details["field"] == "model"
    with pytest.raises(FingerprintMismatch, match="tokenizer None"):
        require_fingerprint(stored.manifest.fingerprint, {"model": "llama", "tokenizer": "t"}, "here")


def test_a_schema_of_the_future_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, {})
    manifest = json.loads((path / MANIFEST).read_text())
    (path / MANIFEST).write_text(json.dumps({**manifest, "schema_version": 99}))
    with pytest.raises(FingerprintMismatch, match="schema_version is 99"):
        StoredCheckpoint.open(path)


def test_two_saves_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    """The second would remove the first's files as leftovers, and write under the same name."""
    with PartialCheckpoint(tmp_path) as first:
        first.write("unit-u0.safetensors", b"blocks")
        with pytest.raises(CheckpointError, match="another save is writing"):
            PartialCheckpoint(tmp_path)
        first.write(CONTROLLER_FILE, b"state")
        first.write(JOB_FILE, msgpack.packb({}))
        first.publish("c1", {}, ["unit-u0.safetensors"])
    assert StoredCheckpoint.open(save(tmp_path, {"step": 2})).job == {"step": 2}


@pytest.mark.parametrize("fingerprint", [{"a": object()}, {"a": (1, 2)}, {1: "a"}, {"a": float("nan")}])
def test_a_fingerprint_that_no_job_could_present_again_is_refused(tmp_path: Path, fingerprint: Any) -> None:
    with pytest.raises(CheckpointError, match="fingerprint"), PartialCheckpoint(tmp_path) as partial:
        partial.publish("c1", fingerprint, [])
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot write"), PartialCheckpoint(tmp_path) as partial:
        shutil.rmtree(partial.path)
        partial.write(JOB_FILE, b"")


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "manifest",
    ["", "null", "[]", "{", DEEP, '{"schema_version": 1}', '"text"', "\ud83c", '{"schema_version": 1, "files": 7}'],
)
def test_a_manifest_that_is_none_is_damage(tmp_path: Path, manifest: str) -> None:
    path = save(tmp_path, {})
    (path / MANIFEST).write_bytes(manifest.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointDamaged, match=r"manifest\.json"):
        StoredCheckpoint.open(path)


FILE = {"name": "x", "size": 1, "checksum": "0"}


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": [{**FILE, "size": float("inf")}]},
        {"files": [{**FILE, "size": "big"}]},
        {"files": [{**FILE, "name": "n" * 5_000}]},
        {"files": [{**FILE, "name": "a\0b"}]},
        {"files": [{**FILE, "name": ".."}]},
        {"files": [{**FILE, "name": "/etc/hostname"}]},
        {"files": {"name": "x"}},
        {"unit_files": ["elsewhere"]},
        {"unit_files": 3},
        {"fingerprint": [1]},
    ],
)
def test_a_crafted_manifest_is_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    path = save(tmp_path, {})
    plain = json.loads((path / MANIFEST).read_text())
    if isinstance(change.get("files"), list) and change["files"]:
        change = {"files": [*plain["files"], *change["files"]]}
    (path / MANIFEST).write_text(json.dumps({**plain, **change}))
    with pytest.raises(CheckpointDamaged):
        StoredCheckpoint.open(path)


@pytest.mark.parametrize("job", [b"", b"\xc1", b"\x91" * 100_000, b"\x81\x90\x01", b"\x93", b"\xdd\xff\xff\xff\xff"])
def test_a_job_state_that_cannot_be_read_is_damage(tmp_path: Path, job: bytes) -> None:
    with PartialCheckpoint(tmp_path) as partial:
        partial.write(CONTROLLER_FILE, b"state")
        partial.write(JOB_FILE, job)
        path = partial.publish("c1", {}, [])
    with pytest.raises(CheckpointDamaged):
        StoredCheckpoint.open(path)
