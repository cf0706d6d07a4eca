"""The protocol: every message survives its frames, and no frames survive that are not a message."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.codec import (
    Message,
    answer_to,
    decode_columns,
    decode_message,
    encode_columns,
    encode_message,
    error_of,
    error_to,
    pack_ints,
    unpack_ints,
)
from policies.columns import Column
from policies.errors import DtypeConflict, RemoteError, WireError
from tests.test_columns import row_lists, rows_of, same

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def frames_of(message: Message) -> list[memoryview]:
    return [memoryview(bytes(memoryview(frame).cast("B"))) for frame in encode_message(message)]


@given(
    st.integers(0, 2**63 - 1), st.text(), st.dictionaries(st.text(), PLAIN, max_size=4), st.lists(st.binary(max_size=9))
)
def test_messages_round_trip(number: int, op: str, body: dict[str, Any], buffers: list[bytes]) -> None:
    decoded = decode_message(frames_of(Message(number, op, body, buffers)))
    assert (decoded.id, decoded.op, decoded.body) == (number, op, body)
    assert [bytes(b) for b in decoded.buffers] == buffers


@given(st.lists(st.tuples(st.text(min_size=1), row_lists()), max_size=4, unique_by=lambda pair: pair[0]))
def test_columns_round_trip(fields: list[tuple[str, list[Any]]]) -> None:
    columns = {name: rows_of(rows) for name, rows in fields}
    buffers: list[Any] = []
    plain = msgpack.unpackb(msgpack.packb(encode_columns(columns, buffers)))
    back = decode_columns(plain, [memoryview(b).cast("B") if memoryview(b).nbytes else b"" for b in buffers])
    assert list(back) == list(columns)
    for name, rows in fields:
        assert all(same(got, row) for got, row in zip(back[name], rows, strict=True))


@given(st.lists(st.binary(max_size=60), max_size=4))
def test_arbitrary_frames_are_a_wire_error_and_nothing_else(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode_message([memoryview(f) for f in frames])


@given(st.dictionaries(st.sampled_from(["v", "id", "op", "body", "sizes", "x"]), PLAIN), st.lists(st.binary()))
def test_headers_with_wrong_parts_are_a_wire_error_or_a_message(header: dict[str, Any], buffers: list[bytes]) -> None:
    frames = [memoryview(msgpack.packb(header)), *(memoryview(b) for b in buffers)]
    try:
        decoded = decode_message(frames)
    except WireError:
        return
    assert header["v"] == 1 and decoded.id == header["id"] and header["sizes"] == [len(b) for b in buffers]


COLUMN_ENTRY = st.fixed_dictionaries(
    {
        "name": st.text(max_size=2) | PLAIN,
        "dtype": st.sampled_from(["int64", "bytes", "float32", "object", "O", ""]) | PLAIN,
        "shape": st.lists(st.integers(-2, 3) | st.just(2**62), max_size=3) | PLAIN,
        "rows": st.integers(-1, 4) | PLAIN,
        "values": st.integers(-1, 3) | PLAIN,
    },
    optional={"offsets": st.integers(-1, 3) | PLAIN},
)


@given(st.lists(COLUMN_ENTRY | PLAIN, max_size=3) | PLAIN, st.lists(st.binary(max_size=40), max_size=3))
def test_arbitrary_column_descriptions_never_claim_more_than_came(plain: Any, buffers: list[bytes]) -> None:
    """Either a `WireError`, or columns whose rows all lie inside the buffers."""
    try:
        columns = decode_columns(plain, buffers)
    except WireError:
        return
    for column in columns.values():
        assert column.values.nbytes <= max(len(b) for b in buffers)
        assert int(column.element_offsets()[-1]) == len(column.values)


def test_an_unreadable_message_says_who_asked_when_it_can() -> None:
    frames = [memoryview(msgpack.packb({"v": 1, "id": 7, "op": "put", "body": {}, "sizes": [3]})), memoryview(b"ab")]
    with pytest.raises(WireError) as raised:
        decode_message(frames)
    assert raised.value.details["id"] == 7


def test_offsets_that_run_backwards_are_refused_by_field() -> None:
    entry = {"name": "ids", "dtype": "int64", "shape": [-1], "rows": 2, "values": 0, "offsets": 1}
    with pytest.raises(WireError, match=r"'ids'.*ascending"):
        decode_columns([entry], [bytes(16), np.array([0, 3, 2], "<i8").tobytes()])


def test_errors_travel_by_name_and_only_by_names_of_the_table() -> None:
    sent = DtypeConflict("field 'ids' holds int64, float32 came", field="ids")
    back = error_of(decode_message(frames_of(error_to(3, sent))))
    assert type(back) is DtypeConflict and back.message == sent.message and back.details == {"field": "ids"}
    forged = Message(3, "error", {"error": "SystemExit", "message": "bye"})
    assert type(error_of(forged)) is RemoteError
    assert error_of(answer_to(3, {})) is None


def test_packed_numbers() -> None:
    assert unpack_ints(pack_ints(np.array([1, -2]))).tolist() == [1, -2]
    for wrong in (b"123", "12345678", None):
        with pytest.raises(WireError):
            unpack_ints(wrong)


def test_encoding_copies_no_values() -> None:
    column, buffers = Column.dense(np.zeros((4, 4))), []  # type: ignore[var-annotated]
    encode_columns({"x": column}, buffers)
    assert np.shares_memory(buffers[0], column.values)
