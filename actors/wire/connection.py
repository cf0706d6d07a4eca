"""The asking side: one DEALER socket to one peer, many requests at once.

Guarantees: every request ends exactly once, with the peer's answer, the peer's error, or an error of this side
(`RequestTimeout`, `Unreachable` when the connection breaks, `Unauthorized`, `ClosedError`). Requests leave in their
order, none after its deadline. A request belongs to the connection it left on: when that breaks, what libzmq still
holds of it is gone, so a peer that comes back never gets what was meant for the one before it. What has not left yet
waits for the next connection. A late answer to a request that has ended is dropped and counted. All methods are for
the loop's thread.

Cost: what was asked and not answered is bounded (`policies.in_flight`); the rest waits here.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from actors.wire.loop import Loop, Timer
from actors.wire.options import watch_for_lost_hosts
from actors.wire.secret import Secret, present
from policies.codec import Message, Packed, decode_messages, encode_messages, error_of, pack_message
from policies.errors import ClosedError, RegraftError, RequestTimeout, Unauthorized, Unreachable, WireError
from policies.in_flight import InFlight
from policies.operations import Ask

logger = logging.getLogger(__name__)

Outcome = Message | RegraftError

_TURN = 256

_LARGE_HEADER_BYTES = 1 << 16
"""A header of this size costs more than the message that carries it, and would only hold up others."""

_ATTACH_RETRY_S = 0.002
"""libzmq tells of a connection a moment before it takes messages for it."""

_MOST_CUT_HANDSHAKES = 3
"""With encryption, a peer that has another secret hangs up without a word; a peer that dies does so too, but not over
and over."""


@dataclass(slots=True, eq=False)
class _Pending:
    """``packed`` until it has left. ``alone``: it is large or carries buffers, so it travels by itself; small requests
    of one turn of the loop travel together. ``counted`` as in flight, ``out`` while it is so."""

    op: str
    finish: Callable[[Outcome], None]
    timer: Timer
    packed: Packed | None
    nbytes: int
    alone: bool
    counted: bool
    out: bool = False
    ended: bool = False


class Connection:
    """``peer`` is how errors call the other side (for example ``"unit u0"``). ``lost`` is called whenever the
    connection breaks or an attempt to make one fails."""

    def __init__(
        self, loop: Loop, endpoint: str, secret: Secret, peer: str, lost: Callable[[], None] = lambda: None
    ) -> None:
        self._loop, self._endpoint, self._peer, self._lost = loop, endpoint, peer, lost
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._waiting: deque[_Pending] = deque()
        self._in_flight = InFlight()
        self._refusal: RegraftError | None = None
        self._connected = self._ready = self._planned = False
        self._cut_handshakes = 0
        self.late_answers = 0
        self._dealer = loop.open(zmq.DEALER)
        self._dealer.setsockopt(zmq.IMMEDIATE, 1)  # nothing is queued for a peer that is not there
        self._dealer.setsockopt(zmq.SNDHWM, 0)  # bounded by `InFlight`, in bytes
        self._dealer.setsockopt(zmq.RCVHWM, 0)  # bounded by what was asked
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        watch_for_lost_hosts(self._dealer)
        present(self._dealer, secret)
        self._monitor = loop.monitor(
            self._dealer,
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_CLOSED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
        )
        loop.read(self._dealer, self._receive)
        loop.read(self._monitor, self._watch)
        self._dealer.connect(endpoint)

    def request(self, ask: Ask, timeout: float, finish: Callable[[Outcome], None]) -> None:
        """Send ``ask`` and call ``finish`` once, within ``timeout`` seconds; `WireError` when it cannot be sent."""
        if self._refusal is not None or self._dealer.closed:
            finish(self._refusal or ClosedError(f"the connection to {self._peer} is closed"))
            return
        request_id = next(self._ids)
        try:
            packed = pack_message(Message(request_id, ask.op, ask.body, ask.buffers))
        except WireError as error:
            finish(error)
            return
        timer = self._loop.call_later(timeout, lambda: self._expire(request_id, timeout))
        header, buffers = packed
        nbytes = len(header) + sum([memoryview(buffer).nbytes for buffer in buffers])
        alone = bool(buffers) or len(header) > _LARGE_HEADER_BYTES
        pending = _Pending(ask.op, finish, timer, packed, nbytes, alone, counted=ask.patience_s == 0)
        self._pending[request_id] = pending
        self._waiting.append(pending)
        if pending.alone:
            self._flush()
        elif not self._planned:
            self._planned = True
            self._loop.call_last(self._flush_planned)

    def close(self) -> None:
        """End every open request with `ClosedError` and the connection with them."""
        if self._dealer.closed:
            return
        self._dealer.disable_monitor()
        self._loop.close(self._monitor)
        self._loop.close(self._dealer)
        self._fail_all(lambda op: ClosedError(f"the connection to {self._peer} was closed during {op!r}"))

    def abandon(self, why: str) -> None:
        """`close`, but its requests end as those of a connection that broke: they may be asked again elsewhere."""
        ended, self._pending = self._pending, {}
        self.close()
        self._fail(ended, lambda op: Unreachable(f"{self._peer} at {self._endpoint} {why} during {op!r}"))

    def _flush_planned(self) -> None:
        self._planned = False
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is a connection and room in flight."""
        leaving: list[_Pending] = []
        while self._waiting and self._ready:
            pending = self._waiting[0]
            if pending.ended:
                self._waiting.popleft()
                continue
            if leaving and (pending.alone or len(leaving) == _TURN):
                self._send(leaving)
                leaving = []
                continue
            if pending.counted and not self._in_flight.take(pending.nbytes):
                break
            pending.out = pending.counted
            leaving.append(self._waiting.popleft())
            if pending.alone:
                self._send(leaving)
                leaving = []
        self._send(leaving)

    def _send(self, leaving: list[_Pending]) -> None:
        packed = [pending.packed for pending in leaving if pending.packed is not None]
        if not packed:
            return
        try:
            self._dealer.send_multipart(encode_messages(packed), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._ready = False
            self._waiting.extendleft(reversed(leaving))
            for pending in leaving:
                self._release(pending)
            self._loop.call_later(_ATTACH_RETRY_S, self._attach)
            return
        for pending in leaving:
            pending.packed = None

    def _attach(self) -> None:
        """Go on as soon as a connection that was announced takes messages."""
        if self._dealer.closed or not self._connected:
            return
        if self._dealer.poll(0, zmq.POLLOUT):
            self._ready = True
            self._flush()
        else:
            self._loop.call_later(_ATTACH_RETRY_S, self._attach)

    def _release(self, pending: _Pending) -> None:
        if pending.out:
            self._in_flight.release(pending.nbytes)
            pending.out = False

    def _settle(self, pending: _Pending) -> None:
        """It has ended, wherever it was."""
        pending.ended = True
        pending.timer.cancel()
        self._release(pending)

    def _receive(self) -> None:
        for _ in range(_TURN):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            self._answered([frame.buffer for frame in frames])
            if self._dealer.closed:
                return
        self._flush()

    def _answered(self, frames: list[memoryview]) -> None:
        try:
            messages = decode_messages(frames)
        except WireError as error:
            logger.warning("%s sent an answer that cannot be read: %s", self._peer, error.message)
            self.late_answers += 1
            return
        for message in messages:
            if isinstance(message, WireError):
                logger.warning("%s sent an answer that cannot be read: %s", self._peer, message.message)
                self._end(message.details["id"], message)
            else:
                self._end(message.id, error_of(message) or message)

    def _end(self, request_id: int, outcome: Outcome) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            self.late_answers += 1
            return
        self._settle(pending)
        pending.finish(outcome)

    def _watch(self) -> None:
        while not self._monitor.closed and self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            kind, value = int(event["event"]), int(event["value"])
            if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected, self._ready, self._cut_handshakes = True, True, 0
                self._flush()
            elif kind in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                self._refuse()
            elif kind == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                self._handshake_cut(timed_out=value == errno.EAGAIN)
            else:
                self._broken()

    def _broken(self) -> None:
        self._connected = self._ready = False
        left = {number: pending for number, pending in self._pending.items() if pending.packed is None}
        for number in left:
            del self._pending[number]
        self._fail(
            left, lambda op: Unreachable(f"the connection to {self._peer} at {self._endpoint} broke during {op!r}")
        )
        self._lost()

    def _handshake_cut(self, timed_out: bool) -> None:
        self._cut_handshakes += not timed_out
        if self._cut_handshakes == _MOST_CUT_HANDSHAKES:
            self._refuse()

    def _refuse(self) -> None:
        """No use in asking again: the peer knows another secret."""
        refusal = Unauthorized(
            f"{self._peer} at {self._endpoint} refused the secret, or is something else than a plane; use the address "
            "of the plane that runs now"
        )
        self._refusal = refusal
        self._dealer.disconnect(self._endpoint)
        self._fail_all(lambda _: refusal)

    def _expire(self, request_id: int, timeout: float) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is None:
            return
        self._settle(pending)
        pending.finish(RequestTimeout(self._why_silent(pending, timeout)))
        self._flush()

    def _why_silent(self, pending: _Pending, timeout: float) -> str:
        where = f"{self._peer} at {self._endpoint}"
        if pending.packed is None:
            return f"{where} did not answer {pending.op!r} within {timeout:g} s"
        if self._ready:
            return (
                f"{where} has not answered the {self._in_flight.requests} requests before {pending.op!r}, which waited "
                f"{timeout:g} s for its turn; ask for less at once, or give it more time"
            )
        return (
            f"{where} could not be connected to within {timeout:g} s, so {pending.op!r} was not asked; check that the "
            "plane still runs (it ends with the process that launched it) and that this node reaches that address "
            "(127.0.0.1 is reached from the plane's own node only)"
        )

    def _fail_all(self, error: Callable[[str], RegraftError]) -> None:
        ended, self._pending = self._pending, {}
        self._fail(ended, error)

    def _fail(self, ended: dict[int, _Pending], error: Callable[[str], RegraftError]) -> None:
        for pending in ended.values():
            self._settle(pending)
            pending.finish(error(pending.op))
