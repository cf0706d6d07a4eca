"""The plain forms of what units, controller and clients tell each other."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from policies.codec import pack_ints
from policies.errors import WireError
from policies.locations import (
    FieldSchema,
    Located,
    Publication,
    Read,
    block_schema,
    located_from_plain,
    located_to_plain,
    publication_from_plain,
    publication_to_plain,
    unpack_schema,
)


def packed(*fields: Any) -> bytes:
    return msgpack.packb(fields)


PLAIN: dict[str, Any] = {
    "batch_id": "b1", "unit": "u0", "block": 7, "partition": "train", "keys": ["g0", "g1"],
    "schema": packed(["ids", "int64", [-1]], ["lp", "float32", [-1, 2]], ["score", "float32", []]),
    "lengths": [pack_ints(np.array([3, 4])), 7],
    "tags": [{"version": 3}, None],
}  # fmt: skip


def test_a_located_answer_survives_the_wire() -> None:
    read = Read("u0", 7, ("ids", "lp"), [4, 0], [1, 2])
    located = Located(("missing", "ok", "ok"), {"nosuch": "no such key"}, ("ids", "lp"), (read,))
    back = located_from_plain(msgpack.unpackb(msgpack.packb(located_to_plain(located))))
    assert (back.verdicts, back.causes, back.fields) == (located.verdicts, located.causes, located.fields)
    (got,) = back.reads
    assert (got.unit, got.block, got.fields) == ("u0", 7, ("ids", "lp"))
    assert (got.positions, got.rows) == ([4, 0], [1, 2])


def test_a_publication_is_read_as_it_was_sent() -> None:
    got = publication_from_plain(msgpack.unpackb(msgpack.packb(PLAIN)))
    assert (got.batch_id, got.unit, got.block, got.partition, got.keys) == ("b1", "u0", 7, "train", ("g0", "g1"))
    assert got.schema.fields == (("ids", "int64", (-1,)), ("lp", "float32", (-1, 2)), ("score", "float32", ()))
    ids, lp = got.lengths
    assert isinstance(ids, np.ndarray) and (ids.tolist(), lp) == ([3, 4], 7)
    assert got.tags == ({"version": 3}, None)
    assert msgpack.packb(publication_to_plain(got)) == msgpack.packb(PLAIN)


@pytest.mark.parametrize(
    "change", [{"keys": 3}, {"schema": [1]}, {"schema": packed(["ids", "int64"])}, {"schema": b"\xc1"}, {"block": "x"},
               {"schema": packed(["ids", "int64", [-1]], ["ids", "int64", []])}, {"schema": packed([[], "int64", 3])},
               {"tags": [4]}, {"lengths": [b"123"]}, {"lengths": [None]}]
)  # fmt: skip
def test_a_publication_that_is_none_is_a_wire_error(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        publication_from_plain({**PLAIN, **change})


@pytest.mark.parametrize("lengths", [[], [3], [3, 3], [3, 4], [0, 0]])
def test_lengths_are_one_number_exactly_when_all_rows_have_it(lengths: list[int]) -> None:
    fields = {"ids": FieldSchema("int64", (-1,), np.array(lengths, np.int64)), "score": FieldSchema("float32", ())}
    (got,) = Publication.of("b", "u0", 1, "train", tuple(map(str, lengths)), fields).lengths
    if len(set(lengths)) == 1:
        assert got == lengths[0] and isinstance(got, int)
    else:
        assert isinstance(got, np.ndarray) and got.tolist() == lengths


def test_schemas_are_interned_whichever_way_they_came() -> None:
    made = block_schema((("ids", "int64", (-1,)), ("score", "float32", ())))
    assert made is unpack_schema(made.packed)
    assert made is not block_schema((("score", "float32", ()), ("ids", "int64", (-1,))))
    assert made.jagged == 1
