"""What is published and where rows are found: the values that travel between units, controller and clients.

Their plain forms are msgpack-able: arrays become bytes (`policies.codec.pack_ints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from policies.codec import pack_ints, unpack_ints
from policies.columns import JAGGED
from policies.errors import WireError


@dataclass(frozen=True, slots=True, eq=False)
class FieldSchema:
    """One field of a block: dtype name, row shape with -1 for the one jagged dimension (see `policies.columns`), and
    ``lengths`` int64 ``(rows,)`` of that dimension, None when no dimension is jagged."""

    dtype: str
    shape: tuple[int, ...]
    lengths: NDArray[np.int64] | None = None


SchemaEntry = tuple[str, str, tuple[int, ...]]
"""Name, dtype and row shape of one field."""

Lengths = int | NDArray[np.int64]
"""The sizes of a block's rows in the jagged dimension of one field: one for all of them, or int64 ``(rows,)``."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockSchema:
    """What the puts of one kind have in common: their fields, in order. ``jagged``: how many of them need lengths.
    ``packed``: its form in messages.

    Schemas are interned (`block_schema`), so whoever has seen one knows it by its identity.
    """

    fields: tuple[SchemaEntry, ...]
    jagged: int
    packed: bytes


class Publication(NamedTuple):
    """A unit says: ``block`` (unique over the plane's life) holds the rows ``keys`` of ``partition``, row i at
    position i. ``lengths`` has an entry for each jagged field of the schema, in its order. ``tags[i]`` are merged into
    row i's tags. ``batch_id`` is the writer's name for the put."""

    batch_id: str
    unit: str
    block: int
    partition: str
    keys: tuple[str, ...]
    schema: BlockSchema
    lengths: tuple[Lengths, ...] = ()
    tags: tuple[Mapping[str, Any] | None, ...] | None = None

    @classmethod
    def of(
        cls,
        batch_id: str,
        unit: str,
        block: int,
        partition: str,
        keys: tuple[str, ...],
        fields: Mapping[str, FieldSchema],
        tags: tuple[Mapping[str, Any] | None, ...] | None = None,
    ) -> Publication:
        """The publication of a block with ``fields``."""
        schema = block_schema(tuple([(name, field.dtype, field.shape) for name, field in fields.items()]))
        lengths = tuple([_lengths(field.lengths) for field in fields.values() if field.lengths is not None])
        return cls(batch_id, unit, block, partition, keys, schema, lengths, tags)


def _lengths(lengths: NDArray[np.int64]) -> Lengths:
    """One number where all rows agree: it travels and is counted at the cost of one row."""
    return int(lengths[0]) if len(lengths) and (lengths == lengths[0]).all() else lengths


@lru_cache(maxsize=4_096)
def block_schema(fields: tuple[SchemaEntry, ...]) -> BlockSchema:
    """The schema with these fields; the same object for the same fields."""
    jagged = sum(JAGGED in shape for _, _, shape in fields)
    return BlockSchema(fields, jagged, msgpack.packb(fields))


class UnitLocation(NamedTuple):
    """Where a unit is reached. ``node``: the node whose object store it shares references on, and ``actor`` its name in
    Ray; None for a unit that has no part in Ray, or that does not share."""

    endpoint: str
    node: str | None = None
    actor: str | None = None


class Read(NamedTuple):
    """``fields`` of rows at ``positions`` of ``block``; entry i is for the asked key number ``rows[i]``."""

    unit: str
    block: int
    fields: tuple[str, ...]
    positions: Sequence[int]
    rows: Sequence[int]


class Located(NamedTuple):
    """The answer to a lookup: ``verdicts[i]`` (``"ok"`` or ``"missing"``) of asked key i, why a key is missing, the
    fields found (those asked, or those that all found rows have), and the reads that fetch them."""

    verdicts: tuple[str, ...]
    causes: Mapping[str, str]
    fields: tuple[str, ...]
    reads: tuple[Read, ...]


def publication_to_plain(publication: Publication) -> dict[str, Any]:
    return {
        "batch_id": publication.batch_id,
        "unit": publication.unit,
        "block": publication.block,
        "partition": publication.partition,
        "keys": publication.keys,
        "schema": publication.schema.packed,
        "lengths": [lengths if isinstance(lengths, int) else pack_ints(lengths) for lengths in publication.lengths],
        "tags": publication.tags,
    }


def publication_from_plain(plain: Mapping[str, Any]) -> Publication:
    """The publication that a unit sent; `WireError` when it is not one."""
    try:
        tags = plain["tags"]
        return Publication(
            str(plain["batch_id"]),
            str(plain["unit"]),
            int(plain["block"]),
            str(plain["partition"]),
            tuple(map(str, plain["keys"])),
            unpack_schema(plain["schema"]),
            tuple([lengths if type(lengths) is int else unpack_ints(lengths) for lengths in plain["lengths"]]),
            None if tags is None else tuple([None if given is None else dict(given) for given in tags]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, msgpack.UnpackException) as error:
        raise WireError(f"this is no publication of a block: {type(error).__name__}: {error}") from None


@lru_cache(maxsize=4_096)
def unpack_schema(packed: bytes) -> BlockSchema:
    """The schema with this packed form; what msgpack or the form of a schema forbid raises whatever it raises."""
    fields = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in msgpack.unpackb(packed))
    if len({name for name, _, _ in fields}) != len(fields):
        raise ValueError("two fields of one name")
    return block_schema(fields)


def located_to_plain(located: Located) -> dict[str, Any]:
    return {
        "verdicts": located.verdicts,
        "causes": located.causes,
        "fields": located.fields,
        "reads": [[r.unit, r.block, r.fields, r.positions, r.rows] for r in located.reads],
    }


def located_from_plain(plain: Mapping[str, Any]) -> Located:
    reads: Sequence[Any] = plain["reads"]
    return Located(
        verdicts=tuple(plain["verdicts"]),
        causes=plain["causes"],
        fields=tuple(plain["fields"]),
        reads=tuple(
            [Read(unit, block, tuple(fields), positions, rows) for unit, block, fields, positions, rows in reads]
        ),
    )
