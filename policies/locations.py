"""What is published and where rows are found: the values that travel between units, controller and clients.

Their plain forms are msgpack-able: arrays become bytes (`policies.codec.pack_ints`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.codec import pack_ints, unpack_ints
from policies.errors import WireError


@dataclass(frozen=True, slots=True, eq=False)
class FieldSchema:
    """One field of a block: dtype name, row shape with -1 for the one jagged dimension (see `policies.columns`), and
    ``lengths`` int64 ``(rows,)`` of that dimension, None when no dimension is jagged."""

    dtype: str
    shape: tuple[int, ...]
    lengths: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Publication:
    """A unit says: ``block`` (unique over the plane's life) holds the rows ``keys`` of ``partition``, row i at
    position i. ``tags[i]`` are merged into row i's tags. ``batch_id`` is the writer's name for the put."""

    batch_id: str
    unit: str
    block: int
    partition: str
    keys: tuple[str, ...]
    fields: Mapping[str, FieldSchema]
    tags: tuple[Mapping[str, Any] | None, ...] | None = None


class Read(NamedTuple):
    """``fields`` of rows at ``positions`` of ``block``; entry i is for the asked key number ``rows[i]``. Both int64."""

    unit: str
    block: int
    fields: tuple[str, ...]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]


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
        "keys": list(publication.keys),
        "fields": {
            name: [schema.dtype, list(schema.shape), None if schema.lengths is None else pack_ints(schema.lengths)]
            for name, schema in publication.fields.items()
        },
        "tags": publication.tags,
    }


def publication_from_plain(plain: Mapping[str, Any]) -> Publication:
    """The publication that a unit sent; `WireError` when it is not one."""
    try:
        return Publication(
            batch_id=str(plain["batch_id"]),
            unit=str(plain["unit"]),
            block=int(plain["block"]),
            partition=str(plain["partition"]),
            keys=tuple(map(str, plain["keys"])),
            fields={str(name): _schema_from_plain(schema) for name, schema in plain["fields"].items()},
            tags=None if plain["tags"] is None else tuple(None if t is None else dict(t) for t in plain["tags"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"this is no publication of a block: {type(error).__name__}: {error}") from None


def _schema_from_plain(plain: Sequence[Any]) -> FieldSchema:
    dtype, shape, lengths = plain
    if lengths is None:
        return _dense_schema(dtype, tuple(shape))
    return FieldSchema(str(dtype), tuple(map(int, shape)), unpack_ints(lengths))


@lru_cache(maxsize=4_096)
def _dense_schema(dtype: Any, shape: tuple[Any, ...]) -> FieldSchema:
    """Schemas without lengths are shared, so that whoever has seen one knows it by its identity."""
    return FieldSchema(str(dtype), tuple(map(int, shape)))


def located_to_plain(located: Located) -> dict[str, Any]:
    return {
        "verdicts": list(located.verdicts),
        "causes": dict(located.causes),
        "fields": list(located.fields),
        "reads": [[r.unit, r.block, list(r.fields), pack_ints(r.positions), pack_ints(r.rows)] for r in located.reads],
    }


def located_from_plain(plain: Mapping[str, Any]) -> Located:
    reads: Sequence[Any] = plain["reads"]
    return Located(
        verdicts=tuple(plain["verdicts"]),
        causes=dict(plain["causes"]),
        fields=tuple(plain["fields"]),
        reads=tuple(
            Read(unit, block, tuple(fields), unpack_ints(positions), unpack_ints(rows))
            for unit, block, fields, positions, rows in reads
        ),
    )
