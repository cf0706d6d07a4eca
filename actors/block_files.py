"""Blocks as safetensors files: what a unit writes into a checkpoint and reads back.

A file holds live rows only: for each block and field, the tensors ``<block>/<field>/values`` and, for a jagged field,
``<block>/<field>/offsets``; its metadata entry ``blocks`` describes them in JSON. Anyone can open it with the
safetensors library. A file is fsynced before its size and checksum (xxh3-64 of all bytes) are reported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import xxhash
from numpy.typing import NDArray

from policies.checksums import block_checksum
from policies.codec import decode_columns
from policies.errors import CheckpointDamaged
from policies.manifest import FileEntry
from policies.stored_block import MOST_ROWS, StoredBlock

# fmt: off
_SAFETENSORS = frozenset((
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
))
# fmt: on
"""dtypes that safetensors knows by the same name; any other is kept as bytes and named in the metadata."""

_CHUNK = 16 << 20

_deserialize: Any = safetensors.deserialize


def checksum_file(path: Path) -> str:
    """xxh3-64 of a file's bytes, hex."""
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            state.update(chunk)
    return state.hexdigest()


def sync_and_describe(path: Path) -> FileEntry:
    """fsync a finished file and measure it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return FileEntry(path.name, path.stat().st_size, checksum_file(path))


def write_blocks(path: str, blocks: Sequence[StoredBlock]) -> FileEntry:
    """Write the live rows of ``blocks``, straight from their buffers where all rows live, and fsync the file. Raises
    `OSError` as the file system does."""
    tensors: dict[str, safetensors.TensorSpec] = {}
    described = []
    written = []  # the safetensors library is given addresses: what they point to must live until it is done
    for block in blocks:
        columns, positions = block.live_columns(), block.live_positions()
        written.append(columns)
        fields = []
        for name, column in columns.items():
            _add(tensors, f"{block.id}/{name}/values", column.dtype, column.values)
            if column.offsets is not None:
                _add(tensors, f"{block.id}/{name}/offsets", "int64", column.offsets)
            fields.append({"name": name, "dtype": column.dtype, "shape": list(column.shape)})
        described.append(
            {
                "id": block.id,
                "rows": block.rows,
                "positions": None if positions is None else positions.tolist(),
                "checksum": block_checksum(columns),
                "fields": fields,
            }
        )
    try:
        safetensors.serialize_file(tensors, path, {"blocks": json.dumps(described)})
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    return sync_and_describe(Path(path))


def _add(tensors: dict[str, safetensors.TensorSpec], name: str, dtype: str, array: NDArray[Any]) -> None:
    own = dtype in _SAFETENSORS
    tensors[name] = safetensors.TensorSpec(
        dtype=dtype if own else "uint8",
        shape=[array.size if own else array.nbytes],
        data_ptr=array.ctypes.data,
        data_len=array.nbytes,
    )


def read_blocks(path: str) -> list[StoredBlock]:
    """The blocks of a file. Raises `CheckpointDamaged` when it cannot be read or a block's checksum differs."""
    file = Path(path)
    try:
        raw = file.read_bytes()
        header = int.from_bytes(raw[:8], "little")
        described = json.loads(json.loads(raw[8 : 8 + header])["__metadata__"]["blocks"])
        tensors = {name: tensor["data"] for name, tensor in _deserialize(raw)}
        return [_block(entry, tensors, file.name) for entry in described]
    except CheckpointDamaged:
        raise
    except Exception as error:  # whatever it is that the bytes of a file cause, it is damage
        raise CheckpointDamaged(
            f"{file}: cannot be read as a file of blocks: {type(error).__name__}: {error}"
        ) from None


def _block(entry: Mapping[str, Any], tensors: Mapping[str, Any], file: str) -> StoredBlock:
    """The block that ``entry`` describes; its columns are checked like any that come over the wire."""
    positions = None if entry["positions"] is None else np.array(entry["positions"], np.int64)
    kept = entry["rows"] if positions is None else len(positions)
    buffers: list[Any] = []
    described = []
    for field in entry["fields"]:
        column = {**field, "rows": kept, "values": len(buffers)}
        buffers.append(tensors[f"{entry['id']}/{field['name']}/values"])
        offsets = tensors.get(f"{entry['id']}/{field['name']}/offsets")
        if offsets is not None:
            column["offsets"] = len(buffers)
            buffers.append(offsets)
        described.append(column)
    columns = decode_columns(described, buffers)
    if block_checksum(columns) != entry["checksum"]:
        raise CheckpointDamaged(f"{file}: block {entry['id']} does not match its checksum")
    if not columns or type(entry["id"]) is not int:
        raise CheckpointDamaged(f"{file}: block {entry['id']!r} without a number or without fields")
    if positions is None:
        return StoredBlock.of(entry["id"], entry["rows"], columns)
    inside = kept and 0 <= positions[0] <= positions[-1] < entry["rows"] <= MOST_ROWS
    if not inside or (np.diff(positions) <= 0).any():
        raise CheckpointDamaged(f"{file}: block {entry['id']} lists positions that are not ascending, or outside of it")
    return StoredBlock.of_live(entry["id"], entry["rows"], columns, positions)
