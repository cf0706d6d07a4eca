"""The asking side: one DEALER socket to one peer, many requests at once.

Guarantees: every request ends exactly once, with the peer's answer, the peer's error, or an error of this side
(`RequestTimeout`, `Unreachable` when the connection breaks, `Unauthorized`, `ClosedError`). A late answer to a request
that has ended is dropped and counted. Requests leave in their order. All methods are for the loop's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from actors.wire.loop import Loop, Timer
from actors.wire.secret import present
from policies.codec import Message, Packed, decode_messages, encode_messages, error_of, pack_message
from policies.errors import ClosedError, RegraftError, RequestTimeout, Unauthorized, Unreachable, WireError
from policies.operations import Ask

logger = logging.getLogger(__name__)

Outcome = Message | RegraftError

_TURN = 256

_LARGE_HEADER_BYTES = 1 << 16
"""A header of this size costs more than the message that carries it, and would only hold up others."""


@dataclass(slots=True)
class _Pending:
    op: str
    finish: Callable[[Outcome], None]
    timer: Timer


class Connection:
    """``peer`` is how errors call the other side (for example ``"unit u0"``)."""

    def __init__(self, loop: Loop, endpoint: str, secret: str, peer: str) -> None:
        self._loop, self._endpoint, self._peer = loop, endpoint, peer
        self._ids = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._leaving: list[Packed] = []
        self._refusal: RegraftError | None = None
        self.late_answers = 0
        self._dealer = loop.open(zmq.DEALER)
        self._dealer.setsockopt(zmq.SNDHWM, 0)
        self._dealer.setsockopt(zmq.RCVHWM, 0)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        self._dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        present(self._dealer, secret)
        events = f"inproc://events-{id(self)}"
        self._dealer.monitor(events, zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        self._monitor = loop.open(zmq.PAIR)
        self._monitor.connect(events)
        loop.read(self._dealer, self._receive)
        loop.read(self._monitor, self._watch)
        self._dealer.connect(endpoint)

    def request(self, ask: Ask, timeout: float, finish: Callable[[Outcome], None]) -> None:
        """Send ``ask`` and call ``finish`` once, within ``timeout`` seconds; `WireError` when it cannot be sent."""
        if self._refusal is not None:
            finish(self._refusal)
            return
        request_id = next(self._ids)
        try:
            packed = pack_message(Message(request_id, ask.op, ask.body, ask.buffers))
        except WireError as error:
            finish(error)
            return
        timer = self._loop.call_later(timeout, lambda: self._expire(request_id, timeout))
        self._pending[request_id] = _Pending(ask.op, finish, timer)
        self._gather(packed)

    def _gather(self, packed: Packed) -> None:
        """Requests of one turn of the loop leave together; one that carries buffers, or is large, alone."""
        alone = bool(packed.buffers) or len(packed.header) > _LARGE_HEADER_BYTES
        if alone or len(self._leaving) == _TURN:
            self._flush()
        if not self._leaving:
            self._loop.call_last(self._flush)
        self._leaving.append(packed)
        if alone:
            self._flush()

    def _flush(self) -> None:
        leaving, self._leaving = self._leaving, []
        if leaving and not self._dealer.closed:
            self._dealer.send_multipart(encode_messages(leaving), zmq.NOBLOCK, copy=False)

    def close(self) -> None:
        """End every open request with `ClosedError` and the connection with them."""
        self._fail_all(lambda op: ClosedError(f"the connection to {self._peer} was closed during {op!r}"))
        self._dealer.disable_monitor()
        self._loop.close(self._monitor)
        self._loop.close(self._dealer)

    def _receive(self) -> None:
        for _ in range(_TURN):
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._answered([frame.buffer for frame in frames])

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
        pending.timer.cancel()
        pending.finish(outcome)

    def _watch(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())
            if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refuse()
            elif event["event"] == zmq.EVENT_DISCONNECTED:
                self._fail_all(
                    lambda op: Unreachable(f"the connection to {self._peer} at {self._endpoint} broke during {op!r}")
                )

    def _refuse(self) -> None:
        refusal = Unauthorized(
            f"{self._peer} at {self._endpoint} refused the secret; use the address of the plane that runs now"
        )
        self._refusal = refusal
        self._fail_all(lambda _: refusal)

    def _expire(self, request_id: int, timeout: float) -> None:
        pending = self._pending.pop(request_id, None)
        if pending is not None:
            pending.finish(
                RequestTimeout(f"{self._peer} at {self._endpoint} did not answer {pending.op!r} within {timeout:g} s")
            )

    def _fail_all(self, error: Callable[[str], RegraftError]) -> None:
        ended, self._pending = self._pending, {}
        for pending in ended.values():
            pending.timer.cancel()
            pending.finish(error(pending.op))
