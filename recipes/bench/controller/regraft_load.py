"""regraft under load: its real controller and a real unit, each in a process of its own, and clients of its wire."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import zmq

from actors.controller import PatchedController
from actors.storage_unit import StorageUnit
from actors.wire.secret import Secret, new_secret, present
from policies.answers import OK
from policies.codec import Message, decode_messages, encode_messages, error_of, pack_message
from policies.config import PlaneConfig
from policies.errors import WireError
from policies.locations import Publication, UnitLocation, located_from_plain, publication_to_plain
from recipes.bench.child import Child
from recipes.bench.controller.catalog import UNIT, publication
from recipes.bench.controller.load import COLUMNS, FILLER, KEPT, NAMES, Side, Steps, converse
from recipes.bench.controller.rows import BLOCK_ROWS, PARTITION, RowMaker
from recipes.bench.scenario import CheckFailed

_HOST: Final = "127.0.0.1"
_FRAME_LIMIT: Final = 1 << 30
_BLOCKS_PER_CLIENT: Final = 1 << 32

Asked = tuple[str, Mapping[str, Any]]
"""An operation and its body."""

LOCATED: Final = 1
"""Which of a cycle's answers is that of the lookup."""


class ControllerAddress(NamedTuple):
    endpoint: str
    secret: Secret


def start(live: int, running: ExitStack) -> ControllerAddress:
    """The plane's servers with ``live`` rows. The unit holds no rows: it hears of those that are cleared."""
    secret = new_secret()
    unit = Child("regraft unit", serve_unit, secret)
    running.callback(unit.close)
    controller = Child("regraft controller", serve_controller, secret, unit.first, live)
    running.callback(controller.close)
    return ControllerAddress(*controller.first)


def serve_unit(secret: Secret) -> Generator[str, Any, None]:
    unit = StorageUnit(UNIT, 0, _HOST, secret, PlaneConfig())
    try:
        yield unit.location().endpoint
    finally:
        unit.close()


def serve_controller(secret: Secret, unit_endpoint: str, live: int) -> Generator[tuple[str, str], Any, None]:
    controller = PatchedController(_HOST, secret, PlaneConfig(max_frame_bytes=_FRAME_LIMIT))
    try:
        controller.register_units({UNIT: UnitLocation(unit_endpoint)})
        address = ControllerAddress(controller.address().endpoint, secret)
        filler = FusedClient(address, FILLER)
        converse(filler, filler.fill(live))
        yield tuple(address)
    finally:
        controller.close()


class FusedClient:
    """What belongs to a cycle is asked for in one message, and tags come with the publication, as in a put."""

    def __init__(self, address: ControllerAddress, number: int) -> None:
        self._address, self._number = address, number
        self._ids, self._made = itertools.count(1), 0
        self._template = publication(RowMaker(COLUMNS).batch(1), 0)

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = context.socket(zmq.DEALER)
        present(socket, self._address.secret)
        socket.connect(self._address.endpoint)
        return socket

    def cycle(self) -> Steps:
        key = self._key(self._made)
        asks = self._cycle(key, {"score": float(self._made)})
        self._made += 1
        if self._made % KEPT == 0:
            keys = [self._key(number) for number in range(self._made - KEPT, self._made)]
            asks.append(("clear", {"partition": PARTITION, "keys": keys}))
        answers = yield from self._ask(asks)
        _require_published(answers[0])
        located = located_from_plain(answers[LOCATED])
        if set(located.verdicts) != {OK} or located.fields != NAMES:
            raise CheckFailed(f"the lookup of {key!r} found {located.verdicts} with fields {located.fields}")
        if self._made % KEPT == 0 and answers[-1]["removed"] != KEPT:
            raise CheckFailed(f"a clear of {KEPT} rows removed {answers[-1]['removed']}")

    def _cycle(self, key: str, tags: Mapping[str, Any]) -> list[Asked]:
        return [
            ("publish", {"publications": [self._publication((key,), (tags,))]}),
            ("locate", {"partition": PARTITION, "keys": [key], "fields": None}),
        ]

    def fill(self, rows: int) -> Steps:
        for first in range(0, rows, BLOCK_ROWS):
            keys = tuple(self._key(number) for number in range(first, min(rows, first + BLOCK_ROWS)))
            self._made += 1
            answers = yield from self._ask([("publish", {"publications": [self._publication(keys)]})])
            _require_published(answers[0])

    def _ask(self, asks: Sequence[Asked]) -> Generator[Any, Any, list[Mapping[str, Any]]]:
        messages = [Message(next(self._ids), op, body) for op, body in asks]
        frames = yield encode_messages([pack_message(message) for message in messages])
        return _answers(messages, frames)

    def _key(self, number: int) -> str:
        return f"client{self._number}-{number}"

    def _publication(self, keys: tuple[str, ...], tags: tuple[Mapping[str, Any], ...] | None = None) -> dict[str, Any]:
        block = (self._number - FILLER) * _BLOCKS_PER_CLIENT + self._made
        template = self._template
        return publication_to_plain(
            Publication(f"batch-{block}", UNIT, block, PARTITION, keys, template.schema, template.lengths, tags)
        )


class UnfusedClient(FusedClient):
    """Each part of a cycle is a message of its own, asked for when the one before it has been answered."""

    def _cycle(self, key: str, tags: Mapping[str, Any]) -> list[Asked]:
        return [
            ("publish", {"publications": [self._publication((key,))]}),
            ("locate", {"partition": PARTITION, "keys": [key], "fields": None}),
            ("tag", {"partition": PARTITION, "keys": [key], "tags": [dict(tags)]}),
        ]

    def _ask(self, asks: Sequence[Asked]) -> Generator[Any, Any, list[Mapping[str, Any]]]:
        answers = []
        for ask in asks:
            answers += yield from super()._ask([ask])
        return answers


def _answers(messages: Sequence[Message], frames: Sequence[zmq.Frame]) -> list[Mapping[str, Any]]:
    answers = decode_messages([frame.buffer for frame in frames])
    if [a.id if isinstance(a, Message) else None for a in answers] != [message.id for message in messages]:
        raise CheckFailed(f"{len(messages)} messages went out together and {answers} came back")
    bodies = []
    for answer in answers:
        error = answer if isinstance(answer, WireError) else error_of(answer)
        if error is not None:
            raise CheckFailed(f"the controller answered {type(error).__name__}: {error.message}")
        bodies.append(answer.body)
    return bodies


def _require_published(answer: Mapping[str, Any]) -> None:
    if answer["outcomes"] != [None]:
        raise CheckFailed(f"a publication was refused: {answer['outcomes']}")


FUSED: Final = Side(start, FusedClient)
UNFUSED: Final = Side(start, UnfusedClient)
