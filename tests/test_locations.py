"""The plain forms of what units, controller and clients tell each other."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from policies.codec import pack_ints
from policies.errors import WireError
from policies.locations import (
    Located,
    Read,
    located_from_plain,
    located_to_plain,
    publication_from_plain,
    publication_to_plain,
)

PLAIN: dict[str, Any] = {
    "batch_id": "b1", "unit": "u0", "block": 7, "partition": "train", "keys": ["g0", "g1"],
    "fields": {
        "ids": ["int64", [-1], pack_ints(np.array([3, 4]))],
        "score": ["float32", [], None],
    },
    "tags": [{"version": 3}, None],
}  # fmt: skip


def test_a_located_answer_survives_the_wire() -> None:
    read = Read("u0", 7, ("ids", "lp"), np.array([4, 0]), np.array([1, 2]))
    located = Located(("missing", "ok", "ok"), {"nosuch": "no such key"}, ("ids", "lp"), (read,))
    back = located_from_plain(msgpack.unpackb(msgpack.packb(located_to_plain(located))))
    assert (back.verdicts, back.causes, back.fields) == (located.verdicts, located.causes, located.fields)
    (got,) = back.reads
    assert (got.unit, got.block, got.fields) == ("u0", 7, ("ids", "lp"))
    assert (got.positions.tolist(), got.rows.tolist()) == ([4, 0], [1, 2])


def test_a_publication_is_read_as_it_was_sent() -> None:
    got = publication_from_plain(msgpack.unpackb(msgpack.packb(PLAIN)))
    assert (got.batch_id, got.unit, got.block, got.partition, got.keys) == ("b1", "u0", 7, "train", ("g0", "g1"))
    assert (got.fields["score"].dtype, got.fields["score"].shape, got.fields["score"].lengths) == ("float32", (), None)
    assert got.fields["ids"].shape == (-1,) and got.fields["ids"].lengths is not None
    assert got.fields["ids"].lengths.tolist() == [3, 4]
    assert got.tags == ({"version": 3}, None)
    assert msgpack.packb(publication_to_plain(got)) == msgpack.packb(PLAIN)


@pytest.mark.parametrize(
    "change", [{"keys": 3}, {"fields": [1]}, {"fields": {"ids": ["int64", [-1]]}}, {"block": "x"}, {"tags": [4]},
               {"fields": {"ids": ["int64", [-1], b"123"]}}]
)  # fmt: skip
def test_a_publication_that_is_none_is_a_wire_error(change: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        publication_from_plain({**PLAIN, **change})
