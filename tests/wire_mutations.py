"""Messages that nearly make sense: what a real client sends, recorded, and ways to spoil it.

A plane is driven through every operation while its servers record what they are sent, so the messages are always those
of the present code. They concern the partition `FUZZ` and the blocks of that plane only; what another plane holds
elsewhere is not theirs to change, however they are spoilt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import pytest

from actors.checkpointing import restore_plane, save_plane
from actors.wire.server import Server
from policies.operations import CONTROLLER, Ask
from tests.plane_in_process import in_process_plane

FUZZ = "fuzz"
Frames = list[bytes]


class Recorded(NamedTuple):
    """``to``: `CONTROLLER` or ``"unit"``. ``ops``: what the message asks for."""

    to: str
    ops: tuple[str, ...]
    frames: Frames


def record(directory: Path) -> tuple[list[Recorded], Mapping[str, set[str]]]:
    """Messages of every operation, and the operations that each kind of server knows."""
    recorded: list[Recorded] = []
    known: dict[str, set[str]] = {}
    dispatch = Server._dispatch

    def listen(server: Server, peer: bytes, frames: list[memoryview]) -> None:
        to = CONTROLLER if "locate" in server._handlers else "unit"
        known[to] = set(server._handlers)
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        recorded.append(Recorded(to, tuple(entry[1] for entry in header[1:]), [bytes(frame) for frame in frames]))
        dispatch(server, peer, frames)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "_dispatch", listen)
        _use_everything(directory)
    return recorded, known


def _use_everything(directory: Path) -> None:
    with in_process_plane(units=1) as plane:
        client = plane.client()
        client.create_partition(FUZZ)
        rows = {"ids": [np.arange(3), np.arange(2)], "score": np.ones(2, np.float32), "plain": [{"a": [1]}, None]}
        client.put(FUZZ, ["a", "b"], rows, tags=[{"n": 1}, None])
        client.put(FUZZ, ["c"], {"ids": [np.arange(4)]})
        client.get(FUZZ, ["b", "a", "nosuch"], partial=True)
        client.tag(FUZZ, ["a"], [{"n": 2}])
        client.list(FUZZ, {"n": 2})
        client.claim(FUZZ, "task", ["ids"], 1)
        client.consumed(FUZZ, "task")
        client.produced(FUZZ)
        client.reset_task(FUZZ, "task")
        client.wait(FUZZ, ["a"], ["ids"])
        client.ask([Ask(CONTROLLER, "give_back", {"request_id": "r", "partition": FUZZ, "task": "task"})])
        client.describe()
        client.ask([Ask("u0", "statistics"), Ask("u0", "ping"), Ask(CONTROLLER, "ping")])
        save_plane(client, directory, {}, {}, "c1")
        client.clear(FUZZ, ["b"])
        client.drop_partition(FUZZ)
    with in_process_plane(units=1) as plane:
        client = plane.client()
        restore_plane(client, directory, {})
        client.ask([Ask("u0", "unload", {"restore": "nosuch"})])


ODD_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 7, 1 << 31, (1 << 63) - 1, -(1 << 63), 1.5, float("nan"), float("inf"), "", "x" * 300, "\0",
    b"", b"\xff" * 9, [], [[]], {}, {"": 0}, [None] * 50, {"a": {"b": {"c": []}}},
)  # fmt: skip


def spoil(chance: random.Random, frames: Frames) -> Frames:
    """The frames with 1 to 3 things wrong; now and then none."""
    frames = list(frames)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        frames = chance.choice(_WAYS)(chance, frames)
    return frames


def _spoil_value(chance: random.Random, frames: Frames) -> Frames:
    """Another value somewhere in the header, which stays readable; only its version and ids are left alone."""
    try:
        header = msgpack.unpackb(frames[0], strict_map_key=False)
        entry = chance.choice(header[1:])
        entry[1:] = _replace(chance, entry[1:])
        return [msgpack.packb(header), *frames[1:]]
    except Exception:  # an earlier step has made it unreadable
        return frames


def _replace(chance: random.Random, value: Any) -> Any:
    if isinstance(value, list) and value and chance.random() < 0.85:
        index = chance.randrange(len(value))
        return [*value[:index], _replace(chance, value[index]), *value[index + 1 :]]
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: _replace(chance, value[key])}
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.3:
        return value + chance.choice((-1, 1))
    return chance.choice(ODD_VALUES)


def _spoil_bytes(chance: random.Random, frames: Frames) -> Frames:
    index = chance.randrange(len(frames)) if frames else None
    if index is None:
        return frames
    data = bytearray(frames[index])
    for _ in range(chance.randrange(1, 5)):
        where = chance.randrange(len(data) + 1)
        match chance.randrange(3):
            case 0 if where < len(data):
                data[where] ^= 1 << chance.randrange(8)
            case 1:
                data[where:where] = chance.randbytes(chance.randrange(1, 9))
            case _:
                del data[where : where + chance.randrange(1, 9)]
    return [*frames[:index], bytes(data), *frames[index + 1 :]]


def _spoil_frames(chance: random.Random, frames: Frames) -> Frames:
    frames = list(frames)
    where = chance.randrange(len(frames) + 1)
    match chance.randrange(3):
        case 0:
            frames.insert(where, chance.randbytes(chance.randrange(0, 64)))
        case 1:
            del frames[where : where + 1]
        case _:
            chance.shuffle(frames)
    return frames


_WAYS: tuple[Callable[[random.Random, Frames], Frames], ...] = (
    _spoil_value, _spoil_value, _spoil_value, _spoil_bytes, _spoil_frames,
)  # fmt: skip
