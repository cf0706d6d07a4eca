"""The protocol without I/O: messages to frames and back, columns to plain headers and buffers and back.

Frames: a msgpack header ``[version, message, …]`` with a ``[id, op, body, sizes]`` for each message, followed by their
raw buffers in order. What one side has to tell the other at one moment goes as one header, since a ZeroMQ message costs
more than what most requests ask for. Three rules:

1. Nothing received is trusted: the header is plain msgpack, dtypes come from a fixed table, and every size is checked
   against the buffers that arrived before anything is built from it. Whatever is wrong is a `WireError`.
2. A message that is wrong fails for itself; those beside it are read.
3. Nothing is copied: encoding hands out views of the caller's arrays, decoding makes arrays over the frames.

Cost: one msgpack call per message to encode and one per header to decode, a few objects per column, nothing per row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import msgpack
import numpy as np
from numpy.typing import NDArray

from policies.columns import JAGGED, Column
from policies.dtypes import storage_dtype
from policies.errors import RegraftError, WireError, error_from_plain, error_to_plain

PROTOCOL_VERSION = 2
MOST_MESSAGES = (1 << 16) - 2
"""Messages in one header."""

MAX_HEADER_BYTES = 256 << 20
MAX_DIMENSIONS = 16
ANSWER = "answer"
ERROR = "error"

_VERSION = msgpack.packb(PROTOCOL_VERSION)

Buffer = Any
"""Anything with the buffer protocol: bytes, memoryview, a contiguous numpy array."""


class Message(NamedTuple):
    """``id`` is chosen by the asker and echoed by the answer. ``op`` names the operation, or is `ANSWER` / `ERROR`."""

    id: int
    op: str
    body: Mapping[str, Any] = {}
    buffers: Sequence[Buffer] = ()


class Packed(NamedTuple):
    """A message that is ready to travel, also beside others (`encode_messages`)."""

    header: bytes
    buffers: Sequence[Buffer]


def pack_message(message: Message) -> Packed:
    """`WireError` when msgpack cannot hold what the message says."""
    number, op, body, buffers = message
    try:
        return Packed(msgpack.packb((number, op, body, [memoryview(buffer).nbytes for buffer in buffers])), buffers)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"{op!r} holds a value that no message can carry: {error}") from None


def encode_messages(messages: Sequence[Packed]) -> list[Buffer]:
    """The frames of 1 to `MOST_MESSAGES` messages: one header, then their buffers as they are."""
    header = b"".join([_array_header(1 + len(messages)), _VERSION, *[packed.header for packed in messages]])
    return [header, *[buffer for packed in messages for buffer in packed.buffers]]


def decode_messages(frames: Sequence[memoryview]) -> list[Message | WireError]:
    """The messages in frames; what could not be read is a `WireError` in its place, with whose ``id`` it was in its
    details, so that a server can answer it. Raises `WireError` when not even that is known."""
    if not frames:
        raise WireError("a message without frames")
    if frames[0].nbytes > MAX_HEADER_BYTES:
        raise WireError(f"a header of {frames[0].nbytes} bytes; the limit is {MAX_HEADER_BYTES}")
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a header that is not msgpack: {type(error).__name__}: {error}") from None
    if not isinstance(header, list) or len(header) < 2:
        raise WireError("a header without messages")
    messages: list[Message | WireError] = []
    announced: list[Any] = []
    for entry in header[1:]:
        if type(entry) is not list or not entry or not _is_count(entry[0]):
            raise WireError("a header without request ids")
        if len(entry) == 4 and type(entry[1]) is str and type(entry[2]) is dict and type(entry[3]) is list:
            first = 1 + len(announced)
            announced += entry[3]
            messages.append(Message(entry[0], entry[1], entry[2], frames[first : 1 + len(announced)]))
        else:
            messages.append(WireError("a message without op, body and sizes", id=entry[0]))
    if header[0] != PROTOCOL_VERSION:
        return _all_wrong(messages, f"protocol version {header[0]!r}; this side speaks {PROTOCOL_VERSION}")
    if announced != [frame.nbytes for frame in frames[1:]]:
        came = f"the header announces {len(announced)} buffers, {len(frames) - 1} came or their sizes differ"
        return _all_wrong(messages, came)
    return messages


def _all_wrong(messages: Sequence[Message | WireError], what: str) -> list[Message | WireError]:
    ids = [message.id if isinstance(message, Message) else message.details["id"] for message in messages]
    return [WireError(what, id=number) for number in ids]


def _array_header(length: int) -> bytes:
    """How msgpack begins an array of up to 65,535 entries."""
    return bytes([0x90 | length]) if length < 16 else b"\xdc" + length.to_bytes(2, "big")


def answer_to(message_id: int, body: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> Message:
    return Message(message_id, ANSWER, body, buffers)


def error_to(message_id: int, error: RegraftError) -> Message:
    return Message(message_id, ERROR, error_to_plain(error))


def error_of(message: Message) -> RegraftError | None:
    """The error that an `ERROR` message carries; None for an answer."""
    return error_from_plain(message.body) if message.op == ERROR else None


def encode_columns(columns: Mapping[str, Column], buffers: list[Buffer]) -> list[dict[str, Any]]:
    """The plain description of columns; their buffers are appended to ``buffers``."""
    plain = []
    for name, column in columns.items():
        entry: dict[str, Any] = {
            "name": name,
            "dtype": column.dtype,
            "shape": list(column.shape),
            "rows": column.rows,
            "values": len(buffers),
        }
        buffers.append(np.ascontiguousarray(column.values))
        if column.offsets is not None:
            entry["offsets"] = len(buffers)
            buffers.append(np.ascontiguousarray(column.offsets))
        plain.append(entry)
    return plain


def decode_columns(plain: Any, buffers: Sequence[Buffer]) -> dict[str, Column]:
    """Columns over the received buffers. Raises `WireError` naming the field for whatever does not add up."""
    if not isinstance(plain, list):
        raise WireError("columns must be a list")
    columns: dict[str, Column] = {}
    for entry in plain:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or name in columns:
            raise WireError(f"a column without a name of its own: {name!r}")
        try:
            columns[name] = _decode_column(entry, buffers)
        except WireError as error:
            raise WireError(f"field {name!r}: {error.message}") from None
    return columns


def _decode_column(entry: Mapping[str, Any], buffers: Sequence[Buffer]) -> Column:
    dtype, shape, rows = entry.get("dtype"), entry.get("shape"), entry.get("rows")
    storage = storage_dtype(dtype if isinstance(dtype, str) else repr(dtype))
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or shape.count(JAGGED) > 1:
        raise WireError(f"row shape {shape!r}; at most {MAX_DIMENSIONS} sizes of which one may be {JAGGED}")
    if not all(_is_count(n) or (n == JAGGED and type(n) is int) for n in shape) or not _is_count(rows):
        raise WireError(f"row shape {shape!r} and {rows!r} rows are not counts")
    values = _array(entry.get("values"), buffers, storage)
    if JAGGED not in shape:
        expected, offsets = math.prod(shape) * rows, None
    else:
        offsets = _array(entry.get("offsets"), buffers, np.dtype("<i8"))
        if len(offsets) != rows + 1 or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise WireError(f"the offsets of {rows} rows must be {rows + 1} ascending numbers from 0")
        expected = int(offsets[-1]) * math.prod(n for n in shape if n != JAGGED)
    if len(values) != expected:
        raise WireError(f"{rows} rows of shape {shape} need {expected} values of {dtype}, {len(values)} came")
    return Column(str(dtype), tuple(shape), rows, values, offsets)


def _array(index: Any, buffers: Sequence[Buffer], dtype: np.dtype[Any]) -> NDArray[Any]:
    if not _is_count(index) or index >= len(buffers):
        raise WireError(f"buffer {index!r} of {len(buffers)}")
    size = memoryview(buffers[index]).nbytes
    if size % dtype.itemsize:
        raise WireError(f"a buffer of {size} bytes does not hold whole values of {dtype.itemsize} bytes")
    return np.frombuffer(buffers[index], dtype)


def pack_ints(array: NDArray[np.int64]) -> bytes:
    """An int64 array as little-endian bytes, for message bodies."""
    return np.ascontiguousarray(array, "<i8").tobytes()


def unpack_ints(packed: Any) -> NDArray[np.int64]:
    """The inverse of `pack_ints`; `WireError` for anything else."""
    if not isinstance(packed, bytes) or len(packed) % 8:
        raise WireError("a list of numbers must be bytes of whole int64 values")
    return np.frombuffer(packed, "<i8")


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 1 << 63
