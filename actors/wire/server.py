"""The answering side: one ROUTER socket for all peers of an actor.

Guarantees: a peer without the plane's secret reaches no handler, and holds a connection for `HANDSHAKE_MS` at most.
Every request that can be read gets exactly one answer, also when its handler raises; one that cannot be read gets an
error answer if it says who asked. Requests that came together are served in their order, and what is answered at once
is answered together. An answer to a peer that has left is dropped and counted. A handler may answer later, from the
loop's thread.

Memory: a peer that asks and does not take its answers has its further requests wait once `Backlogs` calls it full; of
those that wait, what exceeds the same limit is refused with `CapacityExceeded` and counted; a peer that does not even
take refusals has them dropped and counted. So one peer costs three times the limit and one answer, whatever it does,
and the others are served. What peers send is read from the network `READ_AHEAD` messages ahead of the handlers.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import zmq
from zmq.utils.monitor import parse_monitor_message

from actors.wire.loop import Loop
from actors.wire.options import watch_for_lost_hosts
from actors.wire.secret import Doorkeeper, Secret, require
from actors.wire.traffic import Traffic
from policies.backlog import MARK_BYTES, Backlogs
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
from policies.config import PlaneConfig
from policies.errors import CapacityExceeded, RegraftError, RemoteError, WireError

logger = logging.getLogger(__name__)

_TURN = 256
"""Messages received per turn of the loop, so that timers and other sockets are never starved."""

HANDSHAKE_MS = 5_000
"""Longer than a handler keeps the thread that judges newcomers; short, as a stranger costs a descriptor meanwhile."""

READ_AHEAD = 256
"""Messages of one peer that are read before a handler is there for them; then TCP holds that peer up."""

NEWCOMERS = 1_024
"""Connections that may wait to be accepted: a job's clients all start at one moment."""

_DEFERRED_RETRY_S = 0.002


class Request:
    """A request that waits for its answer. ``backing``: what its buffers belong to and can be lent as; they came over a
    socket, so they are just memory."""

    backing = None

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


class _Arrived(NamedTuple):
    message: Message | WireError
    too_large: bool
    nbytes: int


class _Deferred:
    """What has come from a peer that has too much on the way to it."""

    __slots__ = ("arrived", "nbytes")

    def __init__(self) -> None:
        self.arrived: deque[_Arrived] = deque()
        self.nbytes = 0


class Server:
    """``handlers`` maps an operation to what serves it. ``endpoint`` is where peers connect.

    ``answers_dropped``: answers to peers that had left or took none. ``requests_refused``: requests of peers that did
    not take the answers to those before.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        secret: Secret,
        handlers: Mapping[str, Callable[[Request], None]],
        config: PlaneConfig,
    ) -> None:
        self._loop = loop
        self._handlers = {"ping": lambda request: request.answer(), **handlers}
        self._max_frame_bytes, self._max_undelivered_bytes = config.max_frame_bytes, config.max_undelivered_bytes
        self._doorkeeper = Doorkeeper(secret)
        self._accepted = self._admitted = 0
        self.answers_dropped = self.requests_refused = 0
        self._turned = time.perf_counter()
        self.traffic = Traffic(self._handlers, self._turned)
        self._gathering: bytes | None = None
        self._gathered: list[_Answer] = []
        self._gathered_bytes = 0
        self._backlogs = Backlogs(self._max_undelivered_bytes)
        self._deferred: dict[bytes, _Deferred] = {}
        self._zap = loop.open(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        loop.read(self._zap, self._authenticate)
        self._router = self._open_router(secret)
        self._monitor = loop.monitor(self._router, zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        port = self._router.bind_to_random_port(f"tcp://{host}")
        self.endpoint = f"tcp://{host}:{port}"
        loop.read(self._monitor, self._count_newcomers)
        loop.read(self._router, self._receive)

    def _open_router(self, secret: Secret) -> zmq.Socket[bytes]:
        router = self._loop.open(zmq.ROUTER)
        require(router, secret)
        watch_for_lost_hosts(router)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.SNDHWM, 0),  # bounded by `Backlogs`, in bytes; libzmq would drop by the number of messages
            (zmq.RCVHWM, READ_AHEAD),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.BACKLOG, NEWCOMERS),
            # A frame over the limit gets an error answer; one far over it is not received, and its peer disconnected.
            (zmq.MAXMSGSIZE, 4 * self._max_frame_bytes),
        ):
            router.setsockopt(option, value)
        return router

    @property
    def refused(self) -> int:
        """Connections that were made and have not proved to have the secret: those turned away, those that hung up,
        and those that still have a moment to do it."""
        self._count_newcomers()
        return self._accepted - self._admitted

    def _count_newcomers(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted += 1
            else:
                self._admitted += 1

    def send(self, peer: bytes, message: Message, undelivered: Callable[[], None] | None = None) -> None:
        """Send now, or together with the other answers to what came together (see `_dispatch`)."""
        answer = _Answer(pack_message(message), undelivered)
        if peer == self._gathering and not answer.packed.buffers:
            self._gathered.append(answer)
            self._gathered_bytes += len(answer.packed.header)
            if self._gathered_bytes > MARK_BYTES:
                self._deliver_gathered(peer)
        else:
            self._deliver(peer, [answer])

    def _deliver(self, peer: bytes, answers: Sequence[_Answer]) -> None:
        frames = encode_messages([answer.packed for answer in answers])
        nbytes = len(frames[0]) + sum([memoryview(frame).nbytes for frame in frames[1:]])
        if self._backlogs.on_the_way(peer) > 2 * self._max_undelivered_bytes:
            self._drop(answers)
            return
        taken: Callable[[], bool] | None = None
        if self._backlogs.mark_next(peer, nbytes):
            # libzmq tells of a buffer when it holds it no more, but not of those it copies, nor of several at once.
            last = max(i for i, frame in enumerate(frames) if memoryview(frame).nbytes)
            frames[last] = marked = zmq.Frame(frames[last], track=True, copy=False, copy_threshold=0)
            tracker = marked.tracker
            del marked  # it would hold the buffer too

            def taken() -> bool:
                return bool(tracker.done)

        try:
            self._router.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._drop(answers)
        else:
            self._backlogs.sent(peer, nbytes, taken)

    def _drop(self, answers: Sequence[_Answer]) -> None:
        self.answers_dropped += len(answers)
        for answer in answers:
            if answer.undelivered is not None:
                answer.undelivered()

    def _authenticate(self) -> None:
        """All that stand at the door, so that a crowd of strangers costs those behind it one turn and not one each."""
        for _ in range(_TURN):
            try:
                question = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._zap.send_multipart(self._doorkeeper.answer(question))

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
        header_bytes = frames[0].nbytes
        too_large = header_bytes > self._max_frame_bytes
        if len(messages) > 1:
            self._gathering = peer
        try:
            for message in messages:
                if peer in self._deferred or self._backlogs.full(peer):
                    self._defer(peer, _Arrived(message, too_large, header_bytes // len(messages) + _bytes_of(message)))
                else:
                    self._serve(peer, message, too_large)
        finally:
            self._gathering = None
            self._deliver_gathered(peer)

    def _deliver_gathered(self, peer: bytes) -> None:
        answers, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if answers:
            self._deliver(peer, answers)

    def _defer(self, peer: bytes, arrived: _Arrived) -> None:
        if not self._deferred:
            self._loop.call_later(_DEFERRED_RETRY_S, self._serve_deferred)
        deferred = self._deferred.setdefault(peer, _Deferred())
        if deferred.nbytes + arrived.nbytes <= self._max_undelivered_bytes:
            deferred.arrived.append(arrived)
            deferred.nbytes += arrived.nbytes
            return
        self.requests_refused += 1
        refusal = CapacityExceeded(
            f"{self._backlogs.on_the_way(peer)} bytes of answers are on their way to this peer and {deferred.nbytes} "
            f"bytes of its requests wait for them; the limit is {self._max_undelivered_bytes} of each, so take answers "
            "before asking for more"
        )
        message = arrived.message
        self.send(peer, error_to(message.details["id"] if isinstance(message, WireError) else message.id, refusal))

    def _serve_deferred(self) -> None:
        try:
            for peer, deferred in list(self._deferred.items()):
                while deferred.arrived and not self._backlogs.full(peer):
                    arrived = deferred.arrived.popleft()
                    deferred.nbytes -= arrived.nbytes
                    self._serve(peer, arrived.message, arrived.too_large)
                if not deferred.arrived:
                    del self._deferred[peer]
        finally:
            if self._deferred:
                self._loop.call_later(_DEFERRED_RETRY_S, self._serve_deferred)

    def _serve(self, peer: bytes, message: Message | WireError, too_large: bool) -> None:
        if isinstance(message, WireError):
            self.send(peer, error_to(message.details["id"], message))
            return
        request = Request(self, peer, message)
        if too_large or (message.buffers and max(map(len, message.buffers)) > self._max_frame_bytes):
            request.fail(WireError(f"a frame of more than {self._max_frame_bytes} bytes, which is the limit"))
            return
        began = time.perf_counter()
        served = serve(request, self._handlers)
        if message.op in self._handlers:
            self.traffic.operations[message.op].add(began - self._turned, time.perf_counter() - began, not served)


def _bytes_of(message: Message | WireError) -> int:
    return 0 if isinstance(message, WireError) else sum(len(buffer) for buffer in message.buffers)


class Answerable(Protocol):
    """What a handler is given, whichever way it came."""

    @property
    def message(self) -> Message: ...

    def fail(self, error: RegraftError) -> None: ...


R = TypeVar("R", bound=Answerable)


def serve(request: R, handlers: Mapping[str, Callable[[R], None]]) -> bool:
    """Let the operation's handler have the request; what it raises is the answer. Whether it raised nothing."""
    op = request.message.op
    try:
        handler = handlers.get(op)
        if handler is None:
            raise WireError(f"unknown operation {op!r}; known here are {', '.join(sorted(handlers))}")
        handler(request)
        return True
    except RegraftError as error:
        request.fail(error)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        logger.warning("operation %s could not be served: %r", op, error)
        request.fail(WireError(f"operation {op!r} with a body that does not fit: {error!r}"))
    except Exception as error:
        logger.exception("operation %s failed", op)
        request.fail(RemoteError(f"operation {op!r} failed: {error!r}"))
    return False
