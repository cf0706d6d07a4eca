"""Requests whose buffers travel by reference: objects in Ray's store, handed on by calls of the unit's actor.

A request and its answer are what they are over ZeroMQ (`policies.codec.Message`); only the way of their buffers
differs. The writer's object is copied into the store once; the unit keeps the view that Ray gives it, which outlives
the writer. A reader is lent references and reads the unit's memory itself.

Ray's calls stay within the cluster and its authentication; what comes in is buffers that `policies.codec` checks like
any that come over a socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
import ray.exceptions
from numpy.typing import NDArray

from actors.address import NAMESPACE
from actors.wire.loop import Loop
from policies.codec import Buffer, Message, decode_columns, encode_columns
from policies.columns import Column
from policies.errors import (
    ReferenceUnavailable,
    RegraftError,
    RequestTimeout,
    Unreachable,
    error_from_plain,
    error_to_plain,
)
from policies.operations import Ask

logger = logging.getLogger(__name__)

Outcome = Message | RegraftError
Answer = tuple[dict[str, Any], list[Any]]
"""What a unit's `refer` returns: ``{"body": …}`` or ``{"error": …}``, and references to lists of arrays."""


def this_node() -> str | None:
    """The id of the node that this process runs on; None when it has no part in Ray."""
    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else None


def share(buffers: Sequence[Buffer]) -> Any:
    """A reference to copies of ``buffers`` in the store. `ReferenceUnavailable` when they do not fit."""
    try:
        return ray.put([np.frombuffer(buffer, np.uint8) for buffer in buffers])
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise ReferenceUnavailable(f"the object store has no room: {error}") from None


def shared_columns(columns: Mapping[str, Column]) -> tuple[Any, dict[str, Column]]:
    """A reference to a copy of ``columns`` in the store, and the columns over that copy."""
    buffers: list[Buffer] = []
    plain = encode_columns(columns, buffers)
    reference = share(buffers)
    return reference, decode_columns(plain, ray.get(reference))


class ReferredRequest:
    """At the unit: a request that came through Ray, with the interface of `actors.wire.server.Request`.

    ``backing`` is the reference that its buffers belong to.
    """

    def __init__(self, op: str, body: Mapping[str, Any], buffers: Sequence[NDArray[Any]], backing: Any) -> None:
        self.message = Message(0, op, body, [memoryview(buffer.data) for buffer in buffers])
        self.backing = backing
        self._answer: Future[Answer] = Future()

    @property
    def body(self) -> Mapping[str, Any]:
        return self.message.body

    def answer(self, body: Mapping[str, Any] | None = None, references: Sequence[Any] = ()) -> None:
        self._answer.set_result(({"body": dict(body or {})}, list(references)))

    def fail(self, error: RegraftError) -> None:
        self._answer.set_result(({"error": error_to_plain(error)}, []))

    def wait(self, seconds: float) -> Answer:
        """The answer; for a thread that is not the loop's."""
        try:
            return self._answer.result(seconds)
        except TimeoutError:
            return {"error": error_to_plain(RequestTimeout(f"{self.message.op!r} took more than {seconds:g} s"))}, []


class ReferenceConnection:
    """At the client: the way to one unit's actor. Every request ends exactly once, as in `actors.wire.connection`.

    ``name``: the actor's name in Ray. Methods are for the loop's thread; copies into the store and calls of Ray happen
    on ``pool``.
    """

    def __init__(self, loop: Loop, pool: ThreadPoolExecutor, name: str, peer: str) -> None:
        self._loop, self._pool, self._name, self._peer = loop, pool, name, peer
        self._actor: Any = None

    def request(self, ask: Ask, timeout: float, finish: Callable[[Outcome], None]) -> None:
        """Send ``ask`` and call ``finish`` once on the loop's thread, within about ``timeout`` seconds."""
        ended = threading.Event()

        def end(outcome: Outcome) -> None:
            if not ended.is_set():
                ended.set()
                timer.cancel()
                finish(outcome)

        late = RequestTimeout(f"{self._peer} did not answer {ask.op!r} by reference within {timeout:g} s")
        timer = self._loop.call_later(timeout, lambda: end(late))
        self._pool.submit(self._carry, ask, timeout, lambda outcome: self._loop.call_soon(lambda: end(outcome)))

    def _carry(self, ask: Ask, timeout: float, tell: Callable[[Outcome], None]) -> None:
        try:
            tell(self._ask(ask, timeout))
        except ReferenceUnavailable as error:
            logger.warning("%r of %s goes in frames: %s", ask.op, self._peer, error.message)
            tell(error)
        except RegraftError as error:
            tell(error)
        except ray.exceptions.GetTimeoutError:
            tell(RequestTimeout(f"{self._peer} did not answer {ask.op!r} by reference within {timeout:g} s"))
        except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
            tell(Unreachable(f"{ask.op!r} of {self._peer} through Ray failed: {type(error).__name__}: {error}"))

    def _ask(self, ask: Ask, timeout: float) -> Message:
        if self._actor is None:
            self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
        shared = [share(ask.buffers)] if ask.buffers else []
        answer = self._actor.refer.remote(ask.op, dict(ask.body), timeout, shared, *shared)
        plain, references = ray.get(answer, timeout=timeout)
        if "error" in plain:
            raise error_from_plain(plain["error"])
        buffers = [buffer for buffers in ray.get(references, timeout=timeout) for buffer in buffers]
        return Message(0, "answer", plain["body"], [memoryview(buffer) for buffer in buffers])
