"""The client of a plane in two forms: `DataPlaneClient` blocks, `AsyncDataPlaneClient` awaits.

Both have the same methods for rows; making and dropping partitions and looking at the plane is left to the first.

Guarantees: many requests in flight over one socket per peer, from any number of threads or event loops; every call
ends with its result, a named error, or `RequestTimeout`; `close` is idempotent and ends every open call with
`ClosedError`. A client belongs to the process that made it: in a forked child every call raises `ForkedProcessError`.

Cost: one thread per client. A call costs one hop to that thread and one back, however many messages it needs.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.tensors import as_column
from actors.wire.connection import Connection
from actors.wire.loop import Loop
from policies import operations
from policies.answers import Batch, PutAck
from policies.codec import Message
from policies.errors import ClosedError, ForkedProcessError, RequestTimeout, Unreachable
from policies.operations import CONTROLLER, Ask, Operation, Outcome, Routes
from policies.placement import RoundRobin

T = TypeVar("T")
Tags = Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """What a process needs to reach a plane. Hand it on through Ray; whoever has it may read and write."""

    endpoint: str
    secret: str
    request_timeout_s: float = 30.0

    def __repr__(self) -> str:
        return f"PlaneAddress({self.endpoint!r}, secret=…)"


class _Core:
    """Drives operations on a loop thread of its own."""

    def __init__(self, address: PlaneAddress) -> None:
        self.address = address
        self.routes = Routes(RoundRobin(random.randrange(1 << 16)))
        self._pid = os.getpid()
        self._loop = Loop("regraft-client")
        self._connections: dict[str, Connection] = {}
        self._running: set[_Run] = set()
        self._closed = False
        self._closing = threading.Lock()
        self._loop.start()
        # A client that is dropped without `close`, or still open when the interpreter ends, leaves no thread behind.
        weakref.finalize(self, self._loop.end)

    def submit(self, operation: Operation[T], timeout: float | None) -> Future[T]:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this client belongs to process {self._pid}; make a new one from the plane's address in process "
                f"{os.getpid()}, or start workers with the 'spawn' method"
            )
        seconds = self.address.request_timeout_s if timeout is None else timeout
        operations.require_timeout(seconds)
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # what has begun is carried to its end; a caller may only stop waiting
        run = _Run(self, operation, seconds, future)
        with self._closing:
            if self._closed:
                raise ClosedError("the client is closed")
            self._loop.call_soon(lambda: self._begin(run))
        return future

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._loop.call_soon(self._end)
            self._loop.stop()

    def abandon(self, future: Future[Any]) -> None:
        """The caller waits no longer: let the call take back what it can, and end it."""
        self._loop.call_soon(lambda: self._abandon(future))

    def send(self, ask: Ask, timeout: float, finish: Callable[[Outcome], None]) -> None:
        """On the loop's thread: one request to a peer, connecting when needed."""
        endpoint = self.address.endpoint if ask.peer == CONTROLLER else self.routes.endpoints[ask.peer]
        connection = self._connections.get(endpoint)
        if connection is None:
            peer = CONTROLLER if ask.peer == CONTROLLER else f"unit {ask.peer}"
            connection = self._connections[endpoint] = Connection(self._loop, endpoint, self.address.secret, peer)
        connection.request(ask, timeout, finish)

    def later(self, seconds: float, callback: Callable[[], None]) -> None:
        self._loop.call_later(seconds, callback)

    def _begin(self, run: _Run) -> None:
        self._running.add(run)
        run.future.add_done_callback(lambda _: self._running.discard(run))
        run.advance(None)

    def _abandon(self, future: Future[Any]) -> None:
        for run in [run for run in self._running if run.future is future]:
            run.abandon()

    def _end(self) -> None:
        for connection in self._connections.values():
            connection.close()
        for run in list(self._running):
            run.fail(ClosedError("the client was closed during the call"))


class _Run:
    """One operation under way: its open asks, and what has come back. Whatever fails here fails the call."""

    RETRY_AFTER_S = 0.1

    def __init__(self, core: _Core, operation: Operation[Any], timeout: float, future: Future[Any]) -> None:
        self.future = future
        self._core, self._operation, self._timeout = core, operation, timeout
        self._deadline = time.monotonic() + timeout
        self._outcomes: list[Outcome | None] = []

    def advance(self, outcomes: list[Outcome] | None) -> None:
        try:
            asks = self._operation.send(outcomes)  # type: ignore[arg-type]
        except StopIteration as stop:
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
            self.future.set_exception(error)

    def abandon(self) -> None:
        gone = Unreachable("the caller of this call left before it ended")
        self.advance([gone] * len(self._outcomes))

    def _send(self, outcomes: list[Outcome | None], index: int, ask: Ask, attempts: int) -> None:
        """Ask, at most ``attempts`` times; what is left of the call's time is shared between them."""

        def finish(outcome: Outcome) -> None:
            if isinstance(outcome, Unreachable) and attempts > 1:
                self._core.later(self.RETRY_AFTER_S, lambda: self._send(outcomes, index, ask, attempts - 1))
            else:
                self._arrived(outcomes, index, outcome)

        left = self._deadline - time.monotonic()
        if left + ask.patience_s <= 0:
            error = RequestTimeout(f"{self._timeout:g} s passed before {ask.op!r} could be asked of {ask.peer}")
            self._arrived(outcomes, index, error)
            return
        try:
            self._core.send(ask, max(left, 0.0) / attempts + ask.patience_s, finish)
        except Exception as error:
            self.fail(error)

    def _arrived(self, outcomes: list[Outcome | None], index: int, outcome: Outcome) -> None:
        if outcomes is not self._outcomes:
            return
        outcomes[index] = outcome
        done = [o for o in outcomes if o is not None]
        if len(done) == len(outcomes) and not self.future.done():
            self.advance(done)


def _columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_column(name, value) for name, value in fields.items()}


class AsyncDataPlaneClient:
    """The awaiting form; see `DataPlaneClient` for what each method does."""

    def __init__(self, address: PlaneAddress) -> None:
        self._core = _Core(address)

    async def _run(self, operation: Operation[T], timeout: float | None) -> T:
        future = self._core.submit(operation, timeout)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._core.abandon(future)
            raise

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> PutAck:
        operation = operations.put(self._core.routes, partition, keys, _columns(fields), tags, uuid.uuid4().hex)
        return await self._run(operation, timeout)

    async def get(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        partial: bool = False,
    ) -> Batch:
        batch = await self._run(operations.get(self._core.routes, partition, keys, fields), timeout)
        return batch if partial else batch.whole()

    async def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int:
        return await self._run(operations.clear(partition, keys), timeout)

    async def list(
        self, partition: str, where: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        return await self._run(operations.list_keys(partition, where), timeout)

    async def tag(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, timeout: float | None = None
    ) -> None:
        await self._run(operations.tag(partition, keys, tags), timeout)

    async def claim(
        self, partition: str, task: str, fields: Sequence[str], count: int, *, timeout: float = 30.0
    ) -> Sequence[str]:
        operation = operations.claim(partition, task, fields, count, timeout, uuid.uuid4().hex)
        return await self._run(operation, None)

    async def wait(self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout: float = 30.0) -> None:
        await self._run(operations.wait(partition, keys, fields, timeout, uuid.uuid4().hex), None)

    async def close(self) -> None:
        await asyncio.to_thread(self._core.close)


class DataPlaneClient:
    """A blocking client, usable from any thread of the process that made it."""

    def __init__(self, address: PlaneAddress) -> None:
        self._core = _Core(address)

    def __enter__(self) -> DataPlaneClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, operation: Operation[T], timeout: float | None = None) -> T:
        """Drive an operation of `policies.operations` to its result."""
        future = self._core.submit(operation, timeout)
        try:
            return future.result()
        except BaseException:  # the call's own error, or an interruption of the caller
            if not future.done():
                self._core.abandon(future)
            raise

    def ask(self, asks: Sequence[Ask], timeout: float | None = None) -> list[Message]:
        """Requests to controller and units, all at once; the first error is raised. Save and restore are made of
        these."""
        return self.run(operations.ask_all(self._core.routes, asks), timeout)

    def units(self) -> Sequence[str]:
        """Names of the plane's storage units, sorted."""
        self.run(self._core.routes.learn())
        return sorted(self._core.routes.endpoints)

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> PutAck:
        """Store rows as one block; when this returns, every reader sees all of them.

        ``fields`` maps a field to one row per key: an array or tensor ``(len(keys), …)``, a nested tensor, or a list
        of arrays, tensors, byte strings or plain values. ``tags`` are small plain values per row. A put of other
        fields adds to existing rows; of the same field, replaces it.

        Raises `Refused` (its subclasses say why; nothing changed), `CapacityExceeded`, or `Unreachable` when the
        outcome is unknown; the same call made again is applied afresh, so give replaceable keys.
        """
        columns = _columns(fields)
        return self.run(operations.put(self._core.routes, partition, keys, columns, tags, uuid.uuid4().hex), timeout)

    def get(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        partial: bool = False,
    ) -> Batch:
        """Read rows; ``fields`` None means those that all found rows have.

        With ``partial`` the batch holds a verdict per key and the rows of the good ones; without it a bad key raises
        its error (`KeyMissing`, `KeyCleared`, `KeyCorrupt`, `Unreachable`).
        """
        batch = self.run(operations.get(self._core.routes, partition, keys, fields), timeout)
        return batch if partial else batch.whole()

    def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int:
        """Remove rows; unknown keys are no error. Returns how many went."""
        return self.run(operations.clear(partition, keys), timeout)

    def list(
        self, partition: str, where: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """(key, tags) of all rows, or of those whose tags match ``where`` (see `policies.where`)."""
        return self.run(operations.list_keys(partition, where), timeout)

    def tag(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, timeout: float | None = None
    ) -> None:
        """Merge ``tags[i]`` into the tags of ``keys[i]``; fields and claims are not touched."""
        self.run(operations.tag(partition, keys, tags), timeout)

    def claim(
        self, partition: str, task: str, fields: Sequence[str], count: int, *, timeout: float = 30.0
    ) -> Sequence[str]:
        """Keys of ``count`` rows that have all ``fields`` and that ``task`` has not claimed before, oldest first.

        Waits for them; raises `RequestTimeout` after ``timeout`` seconds, and then nothing was claimed.
        """
        return self.run(operations.claim(partition, task, fields, count, timeout, uuid.uuid4().hex))

    def wait(self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout: float = 30.0) -> None:
        """Return when every key has every field; `RequestTimeout` after ``timeout`` seconds."""
        self.run(operations.wait(partition, keys, fields, timeout, uuid.uuid4().hex))

    def create_partition(
        self, partition: str, fields: Mapping[str, str] | None = None, expected_rows: int | None = None
    ) -> None:
        """Declare a partition; with ``fields`` (name → dtype) it takes these only. Made again the same way is no error.

        A plane with ``strict_partitions`` needs this before the first put; others make a partition with its first row.
        ``expected_rows`` says how many rows its producers will bring in all. Raises `Refused` when it exists otherwise.
        """
        self.run(operations.create_partition(partition, fields, expected_rows))

    def drop_partition(self, partition: str) -> int:
        """Forget a partition with its rows, fields and tasks; returns how many rows went. Who waits in it gets
        `UnknownPartition`."""
        return self.run(operations.drop_partition(partition))

    def describe(self) -> Mapping[str, Any]:
        """What the plane holds: partitions, fields, rows, tasks and blocks per unit."""
        return self.run(operations.describe())

    def close(self) -> None:
        self._core.close()
