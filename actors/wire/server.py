"""The answering side: one ROUTER socket for all peers of an actor.

Guarantees: a peer without the plane's secret reaches no handler. Every request that can be read gets exactly one
answer, also when its handler raises; one that cannot be read gets an error answer if it says who asked. An answer to a
peer that has left is dropped and counted, and nothing else is. A handler may answer later, from the loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

from actors.wire.loop import Loop
from actors.wire.secret import Doorkeeper
from policies.codec import Buffer, Message, answer_to, decode_message, encode_message, error_to
from policies.errors import RegraftError, RemoteError, WireError

logger = logging.getLogger(__name__)

_TURN = 256
"""Messages received per turn of the loop, so that timers and other sockets are never starved."""


class Request:
    """A request that waits for its answer."""

    __slots__ = ("_peer", "_server", "message")

    def __init__(self, server: Server, peer: bytes, message: Message) -> None:
        self._server, self._peer, self.message = server, peer, message

    @property
    def body(self) -> Mapping[str, Any]:
        return self.message.body

    def answer(self, body: Mapping[str, Any] | None = None, buffers: Sequence[Buffer] = ()) -> bool:
        """False when the asker has left: then nobody has the answer."""
        return self._server.send(self._peer, answer_to(self.message.id, body or {}, buffers))

    def fail(self, error: RegraftError) -> None:
        self._server.send(self._peer, error_to(self.message.id, error))


class Server:
    """``handlers`` maps an operation to what serves it. ``endpoint`` is where peers connect."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        secret: str,
        handlers: Mapping[str, Callable[[Request], None]],
        max_frame_bytes: int,
    ) -> None:
        self._handlers = handlers
        self._max_frame_bytes = max_frame_bytes
        self._doorkeeper = Doorkeeper(secret)
        self.answers_dropped = 0
        self._zap = loop.open(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        loop.read(self._zap, self._authenticate)
        self._router = loop.open(zmq.ROUTER)
        self._router.setsockopt(zmq.PLAIN_SERVER, 1)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._router.setsockopt(zmq.SNDHWM, 0)
        self._router.setsockopt(zmq.RCVHWM, 0)
        # A frame over the limit gets an error answer; one far over it is not even received, and its peer disconnected.
        self._router.setsockopt(zmq.MAXMSGSIZE, 4 * max_frame_bytes)
        port = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        loop.read(self._router, self._receive)

    @property
    def refused(self) -> int:
        """Connections turned away for a wrong or missing secret."""
        return self._doorkeeper.refused

    def send(self, peer: bytes, message: Message) -> bool:
        try:
            self._router.send_multipart([peer, *encode_message(message)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.answers_dropped += 1
            return False
        return True

    def _authenticate(self) -> None:
        self._zap.send_multipart(self._doorkeeper.answer(self._zap.recv_multipart()))

    def _receive(self) -> None:
        for _ in range(_TURN):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._dispatch(peer.bytes, [frame.buffer for frame in frames])

    def _dispatch(self, peer: bytes, frames: list[memoryview]) -> None:
        try:
            largest = max((frame.nbytes for frame in frames), default=0)
            message = decode_message(frames)
            if largest > self._max_frame_bytes:
                raise WireError(f"a frame of {largest} bytes; the limit is {self._max_frame_bytes}", id=message.id)
        except WireError as error:
            if "id" in error.details:
                self.send(peer, error_to(error.details["id"], error))
            else:
                logger.warning("dropped a message that cannot be read: %s", error.message)
            return
        request = Request(self, peer, message)
        handler = self._handlers.get(message.op)
        if handler is None:
            known = ", ".join(sorted(self._handlers))
            request.fail(WireError(f"unknown operation {message.op!r}; known here are {known}"))
            return
        try:
            handler(request)
        except RegraftError as error:
            request.fail(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            logger.warning("operation %s could not be served: %r", message.op, error)
            request.fail(WireError(f"operation {message.op!r} with a body that does not fit: {error!r}"))
        except Exception as error:
            logger.exception("operation %s failed", message.op)
            request.fail(RemoteError(f"operation {message.op!r} failed: {error!r}"))
