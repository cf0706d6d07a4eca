"""The answering side: one ROUTER socket for all peers of an actor.

Guarantees: a peer without the plane's secret reaches no handler. Every request that can be read gets exactly one
answer, also when its handler raises; one that cannot be read gets an error answer if it says who asked. Requests that
came together are served in their order, and what is answered at once is answered together. An answer to a peer that
has left is dropped and counted, and nothing else is. A handler may answer later, from the loop's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import zmq

from actors.wire.loop import Loop
from actors.wire.secret import Doorkeeper
from actors.wire.traffic import Traffic
from policies.codec import (
    Buffer,
    Message,
    Packed,
    answer_to,
    decode_messages,
    encode_messages,
    error_to,
    pack_message,
)
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

    def answer(
        self,
        body: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        undelivered: Callable[[], None] | None = None,
    ) -> None:
        """``undelivered`` is called when the asker has left: then nobody has the answer."""
        self._server.send(self._peer, answer_to(self.message.id, body or {}, buffers), undelivered)

    def fail(self, error: RegraftError) -> None:
        self._server.send(self._peer, error_to(self.message.id, error))


class _Answer(NamedTuple):
    packed: Packed
    undelivered: Callable[[], None] | None


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
        self._turned = time.perf_counter()
        self.traffic = Traffic(handlers, self._turned)
        self._gathering: bytes | None = None
        self._gathered: list[_Answer] = []
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

    def send(self, peer: bytes, message: Message, undelivered: Callable[[], None] | None = None) -> None:
        """Send now, or together with the other answers to what came together (see `_dispatch`)."""
        answer = _Answer(pack_message(message), undelivered)
        if peer == self._gathering and not answer.packed.buffers:
            self._gathered.append(answer)
        else:
            self._deliver(peer, [answer])

    def _deliver(self, peer: bytes, answers: Sequence[_Answer]) -> None:
        try:
            frames = encode_messages([answer.packed for answer in answers])
            self._router.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self.answers_dropped += len(answers)
            for answer in answers:
                if answer.undelivered is not None:
                    answer.undelivered()

    def _authenticate(self) -> None:
        self._zap.send_multipart(self._doorkeeper.answer(self._zap.recv_multipart()))

    def _receive(self) -> None:
        self._turned = time.perf_counter()
        for _ in range(_TURN):
            try:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._dispatch(peer.bytes, [frame.buffer for frame in frames])

    def _dispatch(self, peer: bytes, frames: list[memoryview]) -> None:
        try:
            messages = decode_messages(frames)
        except WireError as error:
            logger.warning("dropped a message that cannot be read: %s", error.message)
            return
        too_large = frames[0].nbytes > self._max_frame_bytes
        if len(messages) == 1:
            self._serve(peer, messages[0], too_large)
            return
        self._gathering = peer
        try:
            for message in messages:
                self._serve(peer, message, too_large)
        finally:
            self._gathering, answers = None, self._gathered
            self._gathered = []
            if answers:
                self._deliver(peer, answers)

    def _serve(self, peer: bytes, message: Message | WireError, too_large: bool) -> None:
        if isinstance(message, WireError):
            self.send(peer, error_to(message.details["id"], message))
            return
        request = Request(self, peer, message)
        handler, began, failed = self._handlers.get(message.op), time.perf_counter(), True
        try:
            if too_large or any(len(buffer) > self._max_frame_bytes for buffer in message.buffers):
                raise WireError(f"a frame of more than {self._max_frame_bytes} bytes, which is the limit")
            if handler is None:
                known = ", ".join(sorted(self._handlers))
                raise WireError(f"unknown operation {message.op!r}; known here are {known}")
            handler(request)
            failed = False
        except RegraftError as error:
            request.fail(error)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            logger.warning("operation %s could not be served: %r", message.op, error)
            request.fail(WireError(f"operation {message.op!r} with a body that does not fit: {error!r}"))
        except Exception as error:
            logger.exception("operation %s failed", message.op)
            request.fail(RemoteError(f"operation {message.op!r} failed: {error!r}"))
        if handler is not None:
            self.traffic.operations[message.op].add(began - self._turned, time.perf_counter() - began, failed)
