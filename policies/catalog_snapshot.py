"""The catalog as plain data and back: msgpack-able, versioned, no pickle.

Kept: partitions with their fields, rows, places, tags, tasks, what they have claimed and what their samplers hold
(`policies.task_snapshot`); the batch ids and claims that may come again. Not kept: parked requests (whoever asked is
gone) and units (a restart has new ones; blocks are bound to those that loaded them). Shape counts, readiness and live
rows are counted anew from the places, and so agree with them.

Arrays are ``{"dtype": name, "data": little-endian bytes}``; sets of fields or tasks are listed once and numbered, so
their number is not bounded by a word. Cost: O(rows) of Python both ways, and O(rows * fields) to count shapes anew.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.blocks import Block
from policies.catalog import Catalog
from policies.dtypes import storage_dtype
from policies.errors import CheckpointDamaged, CheckpointError, Refused, error_from_plain, error_to_plain
from policies.locations import unpack_schema
from policies.partition import Partition
from policies.rows import Place, Row
from policies.sampler_registry import SamplerRegistry
from policies.shapes import ShapeKeys, Shapes
from policies.task_snapshot import grant_from_plain, grant_to_plain, restore_task, task_to_plain

SNAPSHOT_VERSION = 2


def take_snapshot(catalog: Catalog) -> dict[str, Any]:
    """All of the catalog that a restart can use."""
    return {
        "version": SNAPSHOT_VERSION,
        "trailing_shapes": [list(shape) for shape in catalog.shapes.trailing],
        "partitions": [_partition_to_plain(partition) for partition in catalog.partitions.values()],
        "batches": [
            [batch_id, outcome if isinstance(outcome, int) else error_to_plain(outcome)]
            for batch_id, outcome in catalog.batches.items()
        ],
        "grants": [grant_to_plain(answer) for answer in catalog.grants.values()],
        "repeated_batches": catalog.repeated_batches,
    }


def restore_snapshot(
    plain: Mapping[str, Any], block_units: Mapping[int, str], strict: bool, samplers: SamplerRegistry | None = None
) -> Catalog:
    """The catalog of a snapshot. ``block_units`` says which unit holds each block now; units are yet to register.
    ``strict`` and ``samplers`` are the running plane's, not of what was saved.

    Raises `CheckpointDamaged` when the snapshot does not read or a block is held by no unit, `CheckpointError` when a
    task uses a sampler that is not among ``samplers`` or cannot take over its state.
    """
    catalog = Catalog(strict, samplers)
    version = plain.get("version") if isinstance(plain, Mapping) else None
    if version != SNAPSHOT_VERSION:
        raise CheckpointDamaged(
            f"the controller's snapshot has version {version!r}, this release reads {SNAPSHOT_VERSION}"
        )
    try:
        catalog.shapes = Shapes(tuple(shape) for shape in plain["trailing_shapes"])
        for partition in plain["partitions"]:
            _restore_partition(catalog, partition, block_units)
        for batch_id, outcome in plain["batches"]:
            catalog.batches[batch_id] = outcome if isinstance(outcome, int) else _refusal(outcome)
        for grant in plain["grants"]:
            answer = grant_from_plain(catalog, grant)
            catalog.grants[answer.claim_id] = answer
        catalog.repeated_batches = plain["repeated_batches"]
    except CheckpointError:
        raise
    except Exception as error:  # whatever it is that the bytes of a snapshot cause, it is damage
        raise CheckpointDamaged(f"the controller's snapshot cannot be read: {type(error).__name__}: {error}") from error
    return catalog


def _refusal(plain: Mapping[str, Any]) -> Refused:
    error = error_from_plain(plain)
    return error if isinstance(error, Refused) else Refused(error.message, **error.details)


class _Numbering:
    """Numbers things in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, thing: Any) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def __iter__(self) -> Any:
        return iter(self._numbers)


def _partition_to_plain(partition: Partition) -> dict[str, Any]:
    blocks, masks, claims = _Numbering(), _Numbering(), _Numbering()
    rows = list(partition.rows.values())
    places = [
        (index, blocks(place.block), place.position, masks(place.mask))
        for index, row in enumerate(rows)
        for place in row.places()
    ]
    claimed = [claims(row.claimed) for row in rows]
    fields = list(partition.fields.values())
    tasks = list(partition.consumers.tasks.values())
    return {
        "name": partition.name,
        "strict": partition.strict,
        "expected": partition.expected,
        "arrivals": partition.arrivals,
        "produced": partition.produced,
        "fields": [[field.name, field.dtype, field.declared] for field in fields],
        "blocks": _blocks_to_plain(list(blocks)),
        "masks": [[number for number in range(len(fields)) if mask >> number & 1] for mask in masks],
        "places": [_ints([place[column] for place in places]) for column in range(4)],
        "keys": [row.key for row in rows],
        "row_arrivals": _ints([row.arrival for row in rows]),
        "tags": [[index, row.tags] for index, row in enumerate(rows) if row.tags],
        "claims": [[number for number in range(len(tasks)) if mask >> number & 1] for mask in claims],
        "claimed": _ints(claimed),
        "tasks": [task_to_plain(task, partition) for task in tasks],
    }


def _blocks_to_plain(blocks: list[Block]) -> dict[str, Any]:
    schemas = _Numbering()
    numbers = [schemas(block.layout.schema) for block in blocks]
    return {
        "ids": _ints([block.id for block in blocks]),
        "rows": _ints([block.rows for block in blocks]),
        "schemas": [schema.packed for schema in schemas],
        "schema": _ints(numbers),
        "shapes": [[keys if isinstance(keys, int) else _ints(keys) for keys in block.shapes] for block in blocks],
    }


def _restore_partition(catalog: Catalog, plain: Mapping[str, Any], block_units: Mapping[int, str]) -> None:
    partition = Partition(plain["name"], catalog.shapes, None, plain["expected"])
    partition.strict = plain["strict"]
    partition.arrivals, partition.produced = plain["arrivals"], plain["produced"]
    fields = [partition.add_field(name, dtype, declared) for name, dtype, declared in plain["fields"]]
    blocks = _restore_blocks(plain["blocks"], partition, block_units)
    rows = [
        Row(key, arrival) for key, arrival in zip(plain["keys"], _read(plain["row_arrivals"]).tolist(), strict=True)
    ]
    masks = [sum(fields[number].bit for number in numbers) for numbers in plain["masks"]]
    for index, block, position, mask in zip(*(_read(column).tolist() for column in plain["places"]), strict=True):
        _restore_place(rows[index], Place(blocks[block], position, masks[mask]))
    for index, tags in plain["tags"]:
        rows[index].tags = dict(tags)
    tasks = [partition.consumers.task(task["name"]) for task in plain["tasks"]]
    claims = [sum(tasks[number].bit for number in numbers) for numbers in plain["claims"]]
    for row, number in zip(rows, _read(plain["claimed"]).tolist(), strict=True):
        row.claimed = claims[number]
        partition.restore_row(row)
    for block in blocks:
        catalog.blocks.add(block)
    for task, saved in zip(tasks, plain["tasks"], strict=True):
        restore_task(task, saved, partition, catalog.samplers)
    catalog.partitions[partition.name] = partition


def _restore_place(row: Row, place: Place) -> None:
    """Rows are stored place by place, the first of them first."""
    if not 0 <= place.position < place.block.rows or row.mask & place.mask:
        raise ValueError(f"key {row.key!r} has a place that cannot be: position {place.position}")
    if row.block is None:
        row.block, row.position = place.block, place.position
    else:
        row.more = [*(row.more or ()), place]
    row.mask |= place.mask
    place.block.live += 1


def _restore_blocks(plain: Mapping[str, Any], partition: Partition, block_units: Mapping[int, str]) -> list[Block]:
    layouts = [partition.layout(unpack_schema(packed)) for packed in plain["schemas"]]
    blocks = []
    columns = (_read(plain[name]).tolist() for name in ("ids", "rows", "schema"))
    for block_id, rows, schema, shapes in zip(*columns, plain["shapes"], strict=True):
        if block_id not in block_units:
            raise CheckpointDamaged(f"block {block_id} is in the controller's snapshot, but no unit has loaded it")
        keys: list[ShapeKeys] = [keys if isinstance(keys, int) else array("q", _read(keys).tolist()) for keys in shapes]
        blocks.append(Block(block_id, block_units[block_id], rows, layouts[schema], keys, 0))
    return blocks


def _ints(values: Sequence[int]) -> dict[str, Any]:
    return _array(np.array(values, np.int64))


def _array(values: NDArray[np.int64]) -> dict[str, Any]:
    return {"dtype": "int64", "data": values.astype("<i8").tobytes()}


def _read(plain: Mapping[str, Any]) -> NDArray[Any]:
    return np.frombuffer(plain["data"], storage_dtype(plain["dtype"]))
