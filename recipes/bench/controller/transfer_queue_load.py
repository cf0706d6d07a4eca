"""TransferQueue under load: its own controller in a process of its own, and clients that send what its clients send.

A cycle is four requests: KV_RETRIEVE_META (creating the key), NOTIFY_DATA_UPDATE, KV_RETRIEVE_META, SET_CUSTOM_META;
rows are cleared with CLEAR_META. Importing this needs the extra.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import zmq
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, create_zmq_socket

from recipes.bench.child import Child
from recipes.bench.controller.load import COLUMNS, FILLER, KEPT, NAMES, Side, Steps, converse
from recipes.bench.controller.rows import BLOCK_ROWS, PARTITION, RowMaker
from recipes.bench.controller.transfer_queue import StockController, as_in_its_actor, schema
from recipes.bench.scenario import CheckFailed

_NAMES: Final = sorted(NAMES)
_CREATE: Final = (ZMQRequestType.KV_RETRIEVE_META, ZMQRequestType.KV_RETRIEVE_META_RESPONSE)
_NOTIFY: Final = (ZMQRequestType.NOTIFY_DATA_UPDATE, ZMQRequestType.NOTIFY_DATA_UPDATE_ACK)
_TAG: Final = (ZMQRequestType.SET_CUSTOM_META, ZMQRequestType.SET_CUSTOM_META_RESPONSE)
_CLEAR: Final = (ZMQRequestType.CLEAR_META, ZMQRequestType.CLEAR_META_RESPONSE)


class ControllerAddress(NamedTuple):
    endpoint: str
    ip: str
    controller: str


def start(live: int, running: ExitStack) -> ControllerAddress:
    controller = Child("transferqueue controller", serve_controller, live)
    running.callback(controller.close)
    return ControllerAddress(*controller.first)


def serve_controller(live: int) -> Generator[tuple[str, str, str], Any, None]:
    """Its threads are daemons that end with the process."""
    as_in_its_actor()
    controller = StockController()
    info = controller.get_zmq_server_info()
    address = ControllerAddress(info.to_addr("request_handle_socket"), info.ip, info.id)
    filler = StockClient(address, FILLER)
    converse(filler, filler.fill(live))
    yield tuple(address)


class StockClient:
    def __init__(self, address: ControllerAddress, number: int) -> None:
        self._address, self._name = address, f"client{number}"
        self._made = 0
        self._kept: list[int] = []
        self._schema = schema(RowMaker(COLUMNS).batch(1))

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
        socket = create_zmq_socket(context, zmq.DEALER, self._address.ip, self._name.encode())
        socket.connect(self._address.endpoint)
        return socket

    def cycle(self) -> Steps:
        key, score = self._key(), float(self._made)
        (index,) = yield from self._published([key])
        found = yield from self._ask(_CREATE, {"keys": [key], "partition_id": PARTITION, "create": False})
        meta = found["metadata"]
        if meta.global_indexes != [index] or meta.field_names != _NAMES or not meta.is_ready:
            raise CheckFailed(f"the lookup of {key!r} found {meta.global_indexes} with fields {meta.field_names}")
        yield from self._ask(_TAG, {"partition_custom_meta": {PARTITION: {index: {"score": score}}}})
        self._kept.append(index)
        if len(self._kept) == KEPT:
            gone, self._kept = self._kept, []
            yield from self._ask(_CLEAR, {"global_indexes": gone, "partition_ids": [PARTITION] * KEPT})

    def fill(self, rows: int) -> Steps:
        for first in range(0, rows, BLOCK_ROWS):
            yield from self._published([self._key() for _ in range(first, min(rows, first + BLOCK_ROWS))])

    def _key(self) -> str:
        self._made += 1
        return f"{self._name}-{self._made}"

    def _published(self, keys: Sequence[str]) -> Generator[Any, Any, list[int]]:
        """Create the keys and say that their rows are there: the rows' numbers."""
        created = yield from self._ask(_CREATE, {"keys": keys, "partition_id": PARTITION, "create": True})
        indexes = created["metadata"].global_indexes
        update = {
            "partition_id": PARTITION,
            "global_indexes": indexes,
            "field_schema": self._schema,
            "custom_backend_meta": None,
        }
        accepted = yield from self._ask(_NOTIFY, update)
        if not accepted["success"]:
            raise CheckFailed(f"the publication of {len(keys)} rows was not accepted")
        return indexes

    def _ask(
        self, kind: tuple[ZMQRequestType, ZMQRequestType], body: Mapping[str, Any]
    ) -> Generator[Any, Any, Mapping[str, Any]]:
        asked, expected = kind
        request = ZMQMessage.create(asked, self._name, body, self._address.controller)
        answer = ZMQMessage.deserialize((yield request.serialize()))
        if answer.request_type != expected:
            raise CheckFailed(f"{asked} was answered with {answer.request_type}: {answer.body}")
        return answer.body


STOCK: Final = Side(start, StockClient)
