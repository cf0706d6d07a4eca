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
    decode_messages,
    encode_columns,
    encode_messages,
    error_of,
    error_to,
    pack_ints,
    pack_message,
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


def frames_of(*messages: Message) -> list[memoryview]:
    frames = encode_messages([pack_message(message) for message in messages])
    return [memoryview(bytes(memoryview(frame).cast("B"))) for frame in frames]


def decoded(frames: list[memoryview]) -> list[Message]:
    messages = [message for message in decode_messages(frames) if isinstance(message, Message)]
    assert len(messages) == len(decode_messages(frames))
    return messages


MESSAGES = st.builds(
    Message,
    st.integers(0, 2**63 - 1),
    st.text(),
    st.dictionaries(st.text(), PLAIN, max_size=4),
    st.lists(st.binary(max_size=9), max_size=3),
)


@given(st.lists(MESSAGES, min_size=1, max_size=20))
def test_messages_that_travel_together_come_out_as_they_went_in(sent: list[Message]) -> None:
    for before, after in zip(sent, decoded(frames_of(*sent)), strict=True):
        assert (after.id, after.op, after.body) == (before.id, before.op, before.body)
        assert [bytes(b) for b in after.buffers] == before.buffers


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
def test_arbitrary_frames_are_wire_errors_and_nothing_else(frames: list[bytes]) -> None:
    try:
        assert all(isinstance(each, WireError) for each in decode_messages([memoryview(f) for f in frames]))
    except WireError as error:
        assert "id" not in error.details


ENTRY = st.tuples(st.integers(-1, 9) | PLAIN, st.text(max_size=2) | PLAIN, st.just({}) | PLAIN, st.just([]) | PLAIN)


@given(
    st.just([2]) | st.lists(PLAIN, max_size=1), st.lists(ENTRY | PLAIN, max_size=3), st.lists(st.binary(), max_size=2)
)
def test_headers_with_wrong_parts_are_wire_errors_or_messages(version: Any, entries: Any, buffers: list[bytes]) -> None:
    frames = [memoryview(msgpack.packb([*version, *entries])), *(memoryview(b) for b in buffers)]
    try:
        messages = decode_messages(frames)
    except WireError:
        return
    spoken, *entries = [*version, *entries]
    assert len(messages) == len(entries)
    for entry, message in zip(entries, messages, strict=True):
        if isinstance(message, WireError):
            assert message.details["id"] == entry[0]
        else:
            assert spoken == 2 and (message.id, message.op, message.body) == entry[:3]
            assert [b.nbytes for b in message.buffers] == entry[3]


def test_a_message_that_is_wrong_leaves_the_ones_beside_it_alone() -> None:
    header = msgpack.packb([2, [1, "put", {}, [2]], [2, "put", "no body", []], [3, "get", {}, [1]]])
    first, wrong, last = decode_messages([memoryview(header), memoryview(b"ab"), memoryview(b"c")])
    assert isinstance(first, Message) and isinstance(last, Message) and isinstance(wrong, WireError)
    assert (first.id, bytes(first.buffers[0]), last.id, bytes(last.buffers[0])) == (1, b"ab", 3, b"c")
    assert wrong.details["id"] == 2


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


@pytest.mark.parametrize("header", [[2, [7, "put", {}, [3]]], [9, [7, "put", {}, [2]]], [2, [7]]])
def test_an_unreadable_message_says_who_asked_when_it_can(header: list[Any]) -> None:
    (error,) = decode_messages([memoryview(msgpack.packb(header)), memoryview(b"ab")])
    assert isinstance(error, WireError) and error.details["id"] == 7


@pytest.mark.parametrize("count", [1, 14, 15, 16, 255, 256, 65_534])
def test_any_number_of_messages_up_to_the_most_travels(count: int) -> None:
    assert [message.id for message in decoded(frames_of(*[Message(n, "x") for n in range(count)]))] == list(
        range(count)
    )


def test_offsets_that_run_backwards_are_refused_by_field() -> None:
    entry = {"name": "ids", "dtype": "int64", "shape": [-1], "rows": 2, "values": 0, "offsets": 1}
    with pytest.raises(WireError, match=r"'ids'.*ascending"):
        decode_columns([entry], [bytes(16), np.array([0, 3, 2], "<i8").tobytes()])


def test_errors_travel_by_name_and_only_by_names_of_the_table() -> None:
    sent = DtypeConflict("field 'ids' holds int64, float32 came", field="ids")
    back = error_of(*decoded(frames_of(error_to(3, sent))))
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
