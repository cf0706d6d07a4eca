"""Blocks on disk: what is read back is what was written, or a `CheckpointDamaged` that says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from actors.block_files import read_blocks, write_blocks
from policies.checksums import block_checksum
from policies.columns import Column, bytes_rows, plain_rows
from policies.errors import CheckpointDamaged
from policies.stored_block import StoredBlock
from tests.test_columns import row_lists, rows_of, same


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(row_lists(), min_size=1, max_size=3), st.data())
def test_blocks_round_trip(tmp_path: Path, fields: list[list[np.ndarray]], data: st.DataObject) -> None:
    """Every block comes back with its id and its live rows at their positions; of dead rows nothing is written."""
    blocks = []
    for number, rows in enumerate(fields):
        block = StoredBlock.of(number << 33, len(rows), {"x": rows_of(rows), "odd/name": rows_of(rows)})
        dead = data.draw(st.sets(st.integers(0, len(rows) - 1)))
        if dead:
            block.free(np.array(sorted(dead)))
        if block.live:
            blocks.append(block)
    written = write_blocks(str(tmp_path / "unit.safetensors"), blocks)
    assert written.size == (tmp_path / "unit.safetensors").stat().st_size
    back = read_blocks(str(tmp_path / "unit.safetensors"))
    assert [b.id for b in back] == [b.id for b in blocks]
    for before, after in zip(blocks, back, strict=True):
        assert (after.rows, after.live, after.kept) == (before.rows, before.live, before.live)
        everywhere = np.arange(before.rows)
        parts = [block.read(["x", "odd/name"], everywhere) for block in (before, after)]
        assert parts[0].bad == parts[1].bad
        for name in before.columns:
            pairs = zip(parts[0].columns[name], parts[1].columns[name], strict=True)
            assert all(same(a, b) for a, b in pairs)


def test_types_that_numpy_lacks_and_types_of_our_own(tmp_path: Path) -> None:
    columns = {
        "bf": Column.dense(np.array([1, 2, 3], np.uint16), "bfloat16"),
        "f8": Column.dense(np.array([1, 2, 3], np.uint8), "float8_e8m0fnu"),
        "c": Column.dense(np.array([1j, 2, 3], np.complex128)),
        "raw": bytes_rows([b"", b"ab", b"c"]),
        "plain": plain_rows([{"a": 1}, None, [1, "x"]]),
    }
    write_blocks(str(tmp_path / "u"), [StoredBlock.of(5, 3, columns)])
    (block,) = read_blocks(str(tmp_path / "u"))
    assert {n: c.dtype for n, c in block.columns.items()} == {n: c.dtype for n, c in columns.items()}
    assert list(block.columns["raw"]) == [b"", b"ab", b"c"]
    assert list(block.columns["plain"]) == [{"a": 1}, None, [1, "x"]]
    assert list(block.columns["bf"].values) == [1, 2, 3] and list(block.columns["c"].values) == [1j, 2, 3]


def test_anyone_can_open_a_file_with_the_safetensors_library(tmp_path: Path) -> None:
    column = Column.jagged(np.arange(5, dtype=np.int32), [2, 3])
    write_blocks(str(tmp_path / "u.safetensors"), [StoredBlock.of(7, 2, {"ids": column})])
    tensors = load_file(tmp_path / "u.safetensors")
    assert tensors["7/ids/values"].tolist() == [0, 1, 2, 3, 4]
    assert tensors["7/ids/offsets"].tolist() == [0, 2, 5]


def test_every_truncation_and_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "u"
    write_blocks(str(path), [StoredBlock.of(7, 2, {"ids": Column.jagged(np.arange(5, dtype=np.int32), [2, 3])})])
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointDamaged):
            read_blocks(str(path))
    for position in range(len(whole) - 40, len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(CheckpointDamaged, match="u: "):
            read_blocks(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointDamaged, match="nowhere"):
        read_blocks(str(tmp_path / "nowhere"))


ENTRY = {
    "id": 7,
    "rows": 2,
    "positions": None,
    "checksum": 0,
    "fields": [{"name": "x", "dtype": "int32", "shape": [-1]}],
}
FIELD = ENTRY["fields"][0]  # type: ignore[index]


@pytest.mark.parametrize(
    "entry",
    [
        {**ENTRY, "positions": [0, 2]},
        {**ENTRY, "positions": [-1, 0]},
        {**ENTRY, "positions": [1, 0]},
        {**ENTRY, "positions": [0, 0]},
        {**ENTRY, "positions": [0]},
        {**ENTRY, "positions": []},
        {**ENTRY, "positions": [0.5, "x"]},
        {**ENTRY, "rows": 1 << 62},
        {**ENTRY, "rows": 1 << 62, "positions": [0, 1]},
        {**ENTRY, "rows": 1 << 62, "positions": [0, 1 << 61]},
        {**ENTRY, "rows": 1 << 62, "fields": [], "positions": [0]},
        {**ENTRY, "rows": -2},
        {**ENTRY, "rows": 3},
        {**ENTRY, "id": "7"},
        {**ENTRY, "id": None},
        {**ENTRY, "fields": [{**FIELD, "shape": [1 << 62, 4]}]},
        {**ENTRY, "fields": [{**FIELD, "shape": [-1, -1]}]},
        {**ENTRY, "fields": [{**FIELD, "shape": [2]}]},
        {**ENTRY, "fields": [{**FIELD, "dtype": "object"}]},
        {**ENTRY, "fields": [{**FIELD, "name": "nosuch"}]},
        {**ENTRY, "fields": "x"},
        {},
        "entry",
        None,
    ],
)
def test_a_crafted_description_is_damage_and_claims_no_memory(tmp_path: Path, entry: Any) -> None:
    """Whoever made the file also made its checksum fit."""
    column = Column.jagged(np.arange(5, dtype=np.int32), [2, 3])
    path = tmp_path / "u"
    write_blocks(str(path), [StoredBlock.of(7, 2, {"x": column})])
    if isinstance(entry, dict) and "checksum" in entry:
        entry = {**entry, "checksum": block_checksum({"x": column} if entry["fields"] else {})}
    redescribe(path, json.dumps([entry]))
    with pytest.raises(CheckpointDamaged, match="u: "):
        read_blocks(str(path))


@pytest.mark.parametrize("blocks", ["[" * 100_000, "{}{}", "7", "null", '"x"', ""])
def test_a_description_that_is_no_list_is_damage(tmp_path: Path, blocks: str) -> None:
    path = tmp_path / "u"
    write_blocks(str(path), [StoredBlock.of(7, 2, {"x": Column.dense(np.arange(2))})])
    redescribe(path, blocks)
    with pytest.raises(CheckpointDamaged):
        read_blocks(str(path))


@pytest.mark.parametrize("length", [1 << 63, 1 << 40, 0, (1 << 64) - 1])
def test_a_header_of_any_announced_length_is_damage(tmp_path: Path, length: int) -> None:
    (tmp_path / "u").write_bytes(length.to_bytes(8, "little") + b"{}" * 100)
    with pytest.raises(CheckpointDamaged):
        read_blocks(str(tmp_path / "u"))


def redescribe(path: Path, blocks: str) -> None:
    """Put another description of the blocks into a file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header["__metadata__"]["blocks"] = blocks
    packed = json.dumps(header).encode()
    path.write_bytes(len(packed).to_bytes(8, "little") + packed + raw[8 + size :])
