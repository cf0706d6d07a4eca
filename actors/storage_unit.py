"""StorageUnit: the actor that holds the bytes.

A thin shell around `policies.storage.UnitState`: it receives, asks the state, sends. It is asked over ZeroMQ, and where
both sides share a node through Ray (`refer`), with the same handlers. Everything happens on one loop thread, but for
what takes long and needs no state: checkpoint files, and copies into the object store (`actors.lender`), have a thread
each, since the contents of a block never change.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from ray.util import get_node_ip_address

from actors.block_files import read_blocks, write_blocks
from actors.lender import Lender
from actors.references import Answer as Referred
from actors.references import ReferredRequest, this_node
from actors.wire.connection import Connection, Outcome
from actors.wire.loop import Loop
from actors.wire.secret import Secret
from actors.wire.server import Request, Server, serve
from policies.codec import Buffer, decode_columns, encode_columns, pack_ints, unpack_ints
from policies.config import PlaneConfig
from policies.errors import RegraftError, RemoteError, Unreachable, WireError, error_from_plain
from policies.locations import UnitLocation, publication_to_plain
from policies.operations import CONTROLLER, Ask
from policies.storage import Answer, UnitState

logger = logging.getLogger(__name__)

PUBLISH_TIMEOUT_S = 10.0
PUBLISH_RETRY_S = 0.5
HOLD_S = 60.0
"""A saver that has not captured its blocks after this long is taken for dead, so that frees never wait for ever."""


class StorageUnit:
    """``name`` is the unit's name in the plane; ``incarnation`` a number that no other unit of the plane's life has.
    ``host`` None binds to this node's own address. ``actor``: its name in Ray when it shares the node's object store.
    Puts are taken in at once and acknowledged after `connect`.
    """

    def __init__(
        self,
        name: str,
        incarnation: int,
        host: str | None,
        secret: Secret,
        config: PlaneConfig,
        actor: str | None = None,
    ) -> None:
        self._name, self._secret = name, secret
        self._state = UnitState(name, incarnation, config.unit_capacity_bytes, config.unit_capacity_rows)
        self._loop = Loop(f"unit-{name}")
        self._files = ThreadPoolExecutor(1, thread_name_prefix=f"unit-{name}-files")
        shares = actor is not None and config.transport.by_reference
        self._actor, self._node = (actor, this_node()) if shares else (None, None)
        self._lender = Lender(self._loop, name, self._state, config.transport, shares)
        self._controller: Connection | None = None
        handlers: dict[str, Callable[[Request], None]] = {
            "put": self._put,
            "get": self._get,
            "free": self._free,
            "hold": self._hold,
            "release": self._release,
            "save": self._save,
            "load": self._load,
            "unload": self._unload,
            "statistics": self._statistics,
        }
        self._by_reference: Counter[str] = Counter()
        self._referred: dict[str, Callable[[ReferredRequest], None]] = {"put": self._put, "lend": self._lender.lend}
        self._server = Server(self._loop, host or get_node_ip_address(), secret, handlers, config)
        self._loop.start()

    def location(self) -> UnitLocation:
        """Where it is reached."""
        return UnitLocation(self._server.endpoint, self._node, self._actor)

    def refer(self, op: str, body: dict[str, Any], timeout: float, backing: list[Any], *payload: Any) -> Referred:
        """An operation whose buffers come in the object ``payload``, which ``backing`` refers to, or whose answer's
        buffers leave by reference. Called through Ray; waits up to ``timeout`` seconds."""
        buffers = payload[0] if payload else ()
        request = ReferredRequest(op, body, buffers, backing[0] if backing else None)
        self._loop.call_soon(lambda: self._serve_referred(request))
        return request.wait(timeout)

    def _serve_referred(self, request: ReferredRequest) -> None:
        self._by_reference[request.message.op] += 1
        serve(request, self._referred)

    def connect(self, controller_endpoint: str) -> None:
        """Publish to this controller from now on."""
        self._loop.call_soon(lambda: self._open(controller_endpoint))

    def close(self) -> None:
        self._loop.stop()
        self._files.shutdown()
        self._lender.close()

    def _open(self, endpoint: str) -> None:
        self._controller = Connection(self._loop, endpoint, self._secret, CONTROLLER)
        self._publish()

    def _put(self, request: Request | ReferredRequest) -> None:
        body = request.body
        columns = decode_columns(body["columns"], request.message.buffers)
        keys = [str(key) for key in body["keys"]]
        for field, column in columns.items():
            if column.rows != len(keys):
                raise WireError(f"field {field!r} has {column.rows} rows for {len(keys)} keys")
        batch_id, partition = str(body["batch_id"]), str(body["partition"])
        checksum = int(body["checksum"])
        self._carry_out(
            self._state.put(request, batch_id, partition, keys, columns, body["tags"], checksum, request.backing)
        )
        self._publish()

    def _publish(self) -> None:
        publications = self._state.next_publish() if self._controller is not None else []
        if not publications or self._controller is None:
            return
        plain = [publication_to_plain(publication) for publication in publications]
        self._controller.request(
            Ask(CONTROLLER, "publish", {"publications": plain}), PUBLISH_TIMEOUT_S, self._published
        )

    def _published(self, outcome: Outcome) -> None:
        if isinstance(outcome, RegraftError) and not isinstance(outcome, Unreachable):
            self._carry_out(self._state.publish_failed(outcome))
            self._publish()
            return
        if isinstance(outcome, RegraftError):
            logger.warning("unit %s could not publish, trying again: %s", self._name, outcome.message)
            self._carry_out(self._state.publish_unknown(outcome))
            self._loop.call_later(PUBLISH_RETRY_S, self._publish)
            return
        outcomes = [None if plain is None else error_from_plain(plain) for plain in outcome.body["outcomes"]]
        self._carry_out(self._state.published(outcomes))
        self._publish()

    def _carry_out(self, answers: list[Answer]) -> None:
        for answer in answers:
            request: Request | ReferredRequest = answer.token
            if isinstance(answer.result, RegraftError):
                answer.result.details.setdefault("unit", self._name)
                request.fail(answer.result)
            else:
                stored = answer.result
                request.answer(
                    {
                        "block": stored.block,
                        "keys": list(stored.keys),
                        "row_bytes": pack_ints(stored.row_bytes),
                        "checksum": stored.checksum,
                        "room": self._lender.room,
                    }
                )

    def _get(self, request: Request) -> None:
        """``borrows``: the reader shares this node, and can be told to borrow a block (`actors.lender`) instead.
        ``unlent``: blocks that it could not borrow, since their owner has died or the store is full."""
        for block_id in request.body.get("unlent", ()):
            self._state.disown(int(block_id))
        buffers: list[Buffer] = []
        parts: list[dict[str, Any]] = []
        borrows = bool(request.body.get("borrows"))
        for read in request.body["reads"]:
            block, fields, positions = read["block"], read["fields"], unpack_ints(read["positions"])
            if borrows and self._lender.lends(block, fields, len(positions)):
                parts.append({"borrow": True})
            else:
                part = self._state.read(block, fields, positions)
                parts.append({"bad": part.bad, "columns": encode_columns(part.columns, buffers)})
        request.answer({"parts": parts}, buffers)

    def _free(self, request: Request) -> None:
        self._state.free([(block, np.array(positions, np.int64)) for block, positions in request.body["frees"]])
        request.answer()

    def _hold(self, request: Request) -> None:
        holder = str(request.body["holder"])
        self._state.hold(holder)
        self._loop.call_later(HOLD_S, lambda: self._state.release(holder))
        request.answer()

    def _release(self, request: Request) -> None:
        self._state.release(str(request.body["holder"]))
        request.answer()

    def _save(self, request: Request) -> None:
        """Write the asked blocks to a file; the answer holds its size and checksum."""
        blocks = self._state.capture(str(request.body["holder"]), request.body["blocks"])
        path = str(request.body["path"])
        self._in_files_thread(request, lambda: write_blocks(path, blocks), lambda written: written.to_plain())

    def _load(self, request: Request) -> None:
        """Read blocks from a file; the answer lists their ids."""
        path, name, restore = str(request.body["path"]), self._name, str(request.body["restore"])

        def taken_in(blocks: Any) -> Mapping[str, Any]:
            self._state.load(restore, blocks)
            logger.info("unit %s loaded %d blocks", name, len(blocks))
            return {"blocks": [block.id for block in blocks]}

        self._in_files_thread(request, lambda: read_blocks(path), taken_in)

    def _unload(self, request: Request) -> None:
        self._state.unload(str(request.body["restore"]))
        request.answer()

    def _in_files_thread(
        self, request: Request, work: Callable[[], Any], answer: Callable[[Any], Mapping[str, Any]]
    ) -> None:
        """Do ``work`` off the loop, then answer on it with ``answer(result)``."""

        def run() -> None:
            try:
                result = work()
            except RegraftError as error:
                self._loop.call_soon(lambda failed=error: request.fail(failed))  # type: ignore[misc]
            except OSError as error:
                told = RemoteError(f"unit {self._name}: {error}")
                self._loop.call_soon(lambda: request.fail(told))
            else:
                self._loop.call_soon(finished(result))

        def finished(result: Any) -> Callable[[], None]:
            def tell() -> None:
                try:
                    request.answer(answer(result))
                except RegraftError as error:
                    request.fail(error)

            return tell

        self._files.submit(run)

    def _statistics(self, request: Request) -> None:
        request.answer(
            {
                "unit": self._name,
                "blocks": len(self._state.blocks),
                "rows": self._state.rows,
                "bytes": self._state.nbytes,
                "by_reference": dict(self._by_reference),
                "store_room": self._lender.room,
                "peers_refused": self._server.refused,
                "answers_dropped": self._server.answers_dropped,
                "traffic": self._server.traffic.to_plain(time.perf_counter()),
            }
        )
