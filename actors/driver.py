"""The driver of a client: it carries out operations of `policies.operations` on a loop thread of its own.

Guarantees: every operation ends with its result, a named error, or `RequestTimeout`. A repeatable request that had no
answer is asked again once. A unit that fails is asked for at the controller, so that one which came back at another
address is found there, and gets no new rows until it answers again. `close` ends every open operation, also when
several threads close at once, a signal handler does, or a callback on the loop's own thread.
"""

from __future__ import annotations

import os
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from actors.address import PlaneAddress
from actors.references import ReferenceConnection, this_node
from actors.wire.connection import Connection
from actors.wire.loop import Loop
from policies import operations
from policies.errors import ClosedError, ForkedProcessError, RequestTimeout, Unreachable, WireError
from policies.operations import CONTROLLER, Ask, Operation, Outcome, Routes
from policies.placement import RoundRobin
from policies.transport import Transport

T = TypeVar("T")

REFERRED_AT_ONCE = 4
"""Payloads of one client that are copied into the object store, or awaited by reference, at one time."""

PROBE_S = 1.0
"""How often a unit that failed is looked for, and how long an answer to that may take."""


class Driver:
    """``owner`` is the client: when it is dropped without `close`, or still open when the interpreter ends, no thread
    is left behind."""

    def __init__(self, address: PlaneAddress, owner: object) -> None:
        self.address = address
        self.routes = Routes(RoundRobin(random.randrange(1 << 16)), Transport(address.transport, this_node()))
        self._pid = os.getpid()
        self._loop = Loop("regraft-client")
        self._connections: dict[str, tuple[str, Connection]] = {}
        self._references: dict[str, ReferenceConnection] = {}
        self._pool = ThreadPoolExecutor(REFERRED_AT_ONCE, thread_name_prefix="regraft-references")
        self._running: set[_Run] = set()
        self._after_learning: list[Callable[[], None]] = []
        self._closed = False
        self._closing = threading.RLock()  # a signal handler may close while this very thread submits
        self._loop.start()
        weakref.finalize(owner, self._loop.end)

    def submit(self, operation: Operation[T], timeout: float | None) -> Future[T]:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this client belongs to process {self._pid}; make a new one from the plane's address in process "
                f"{os.getpid()}, or start workers with the 'spawn' method"
            )
        seconds = self.address.request_timeout_s if timeout is None else timeout
        operations.require_timeout(seconds)
        run = _Run(self, operation, seconds)
        with self._closing:
            if self._closed or self._loop.ending:
                raise ClosedError("the client is closed")
            self._loop.call_soon(lambda: self._begin(run))
        return run.future

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.call_soon(self._end)
        self._loop.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def abandon(self, future: Future[Any]) -> None:
        """The caller waits no longer: let the call take back what it can, and end it."""
        self._loop.call_soon(lambda: self._abandon(future))

    def send(self, ask: Ask, timeout: float, finish: Callable[[Outcome], None]) -> None:
        """On the loop's thread: one request to a peer, connecting when needed."""
        if ask.by_reference:
            self._reference(ask.peer).request(ask, timeout, finish)
        else:
            self._connection(ask.peer).request(ask, timeout, finish)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.call_later(seconds, callback)

    def doubt(self, unit: str) -> None:
        """A unit did not answer: place nothing there until it does."""
        if unit not in self.routes.down:
            self.routes.down.add(unit)
            self._look_for(unit)

    def learn(self, then: Callable[[], None]) -> None:
        """Ask the controller where the units are, and go on whether or not it answers."""
        self._after_learning.append(then)
        if len(self._after_learning) == 1:
            run = _Run(self, self.routes.learn(), PROBE_S)
            run.future.add_done_callback(lambda _: self._learned())
            self._begin(run)

    def _connection(self, peer: str) -> Connection:
        endpoint = self.address.endpoint if peer == CONTROLLER else self.routes.units[peer].endpoint
        known = self._connections.get(peer)
        if known is not None:
            if known[0] == endpoint:
                return known[1]
            known[1].abandon(f"has moved to {endpoint}")
        name = CONTROLLER if peer == CONTROLLER else f"unit {peer}"
        lost = (lambda: None) if peer == CONTROLLER else (lambda: self.doubt(peer))
        connection = Connection(self._loop, endpoint, self.address.secret, name, lost)
        self._connections[peer] = endpoint, connection
        return connection

    def _reference(self, unit: str) -> ReferenceConnection:
        actor = self.routes.units[unit].actor
        if actor is None:
            raise WireError(f"unit {unit} has no part in Ray, so nothing can be asked of it by reference")
        connection = self._references.get(actor)
        if connection is None:
            connection = self._references[actor] = ReferenceConnection(self._loop, self._pool, actor, f"unit {unit}")
        return connection

    def _learned(self) -> None:
        for unit in self.routes.units.keys() & self._connections.keys():
            self._connection(unit)
        waiting, self._after_learning = self._after_learning, []
        for then in waiting:
            then()

    def _look_for(self, unit: str) -> None:
        def ask() -> None:
            if unit in self.routes.units:
                self.send(Ask(unit, "ping"), PROBE_S, heard)

        def heard(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                self.later(PROBE_S, lambda: self._look_for(unit))
            else:
                self.routes.down.discard(unit)

        if not self._closed:
            self.learn(ask)

    def _begin(self, run: _Run) -> None:
        self._running.add(run)
        run.advance(None)

    def ended(self, run: _Run) -> None:
        self._running.discard(run)

    def _abandon(self, future: Future[Any]) -> None:
        for run in [run for run in self._running if run.future is future]:
            run.abandon()

    def _end(self) -> None:
        for _, connection in self._connections.values():
            connection.close()
        for run in list(self._running):
            run.fail(ClosedError("the client was closed during the call"))


class _Run:
    """One operation under way: its open asks, and what has come back. Whatever fails here fails the call.

    Nothing that a run holds leads back to it, so that what it read is freed with the last of its reader's references
    and not by the garbage collector at some later time.
    """

    RETRY_AFTER_S = 0.1

    def __init__(self, driver: Driver, operation: Operation[Any], timeout: float) -> None:
        self.future: Future[Any] = Future()
        self.future.set_running_or_notify_cancel()  # what has begun is carried to its end
        self._driver, self._operation, self._timeout = driver, operation, timeout
        self._deadline = time.monotonic() + timeout
        self._outcomes: list[Outcome | None] = []

    def advance(self, outcomes: list[Outcome] | None) -> None:
        try:
            asks = self._operation.send(outcomes)  # type: ignore[arg-type]
        except StopIteration as stop:
            self._driver.ended(self)
            self.future.set_result(stop.value)
            return
        except Exception as error:
            self.fail(error)
            return
        waiting: list[Outcome | None] = [None] * len(asks)
        self._outcomes = waiting
        for index, ask in enumerate(asks):
            self._send(waiting, index, ask, attempts=2 if ask.repeatable else 1)

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self._driver.ended(self)
            self.future.set_exception(error)

    def abandon(self) -> None:
        gone = Unreachable("the caller of this call left before it ended")
        self.advance([gone] * len(self._outcomes))

    def _send(self, outcomes: list[Outcome | None], index: int, ask: Ask, attempts: int) -> None:
        """Ask, at most ``attempts`` times; what is left of the call's time is shared between them."""

        def again() -> None:
            self._send(outcomes, index, ask, attempts - 1)

        def finish(outcome: Outcome) -> None:
            if not isinstance(outcome, Unreachable):
                self._arrived(outcomes, index, ask, outcome)
                return
            if ask.peer != CONTROLLER:
                self._driver.doubt(ask.peer)
            if attempts == 1:
                self._arrived(outcomes, index, ask, outcome)
            elif ask.peer == CONTROLLER:
                self._driver.later(self.RETRY_AFTER_S, again)
            else:
                self._driver.learn(lambda: self._driver.later(self.RETRY_AFTER_S, again))

        left = self._deadline - time.monotonic()
        if left + ask.patience_s <= 0:
            error = RequestTimeout(f"{self._timeout:g} s passed before {ask.op!r} could be asked of {ask.peer}")
            self._arrived(outcomes, index, ask, error)
            return
        try:
            self._driver.send(ask, max(left, 0.0) / attempts + ask.patience_s, finish)
        except Exception as error:
            self.fail(error)

    def _arrived(self, outcomes: list[Outcome | None], index: int, ask: Ask, outcome: Outcome) -> None:
        if outcomes is not self._outcomes or self.future.done():
            return
        if ask.heard is not None:
            try:
                ask.heard(outcome)
            except Exception as error:
                self.fail(error)
                return
        outcomes[index] = outcome
        done = [o for o in outcomes if o is not None]
        if len(done) == len(outcomes):
            self.advance(done)
