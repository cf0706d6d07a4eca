"""ReadCoalescer: one per worker. It reads what many callers want in few GETs, and gives them chains that verify.

What is read together, shared and tried again is decided by `policies.coalescing`; this is its shell: a task per GET, a
future per caller, one timer. Everything runs on one event loop.

Guarantees: every read ends with its rows, its own key's error, or `ClosedError`; arrays are read-only and everything
else is the caller's own, so what one caller does to its rows no other sees.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from actors.client import PlaneAddress
from actors.plane_protocol import STAGING, Plane, connect
from policies.chain import (
    CHUNK_CLEARED,
    CHUNK_CORRUPT,
    CHUNK_FIELDS,
    CHUNK_MISSING,
    CHUNK_UNREACHABLE,
    CHUNK_UNREADABLE,
    Chain,
    ChainRefusal,
    verify_chain,
)
from policies.coalescing import (
    Answer,
    Closed,
    Coalescing,
    Event,
    GetDone,
    GetFailed,
    Instruction,
    Left,
    SetTimer,
    StartGet,
    TimerFired,
    Wanted,
)
from policies.config import CoalescerConfig
from policies.errors import (
    ClosedError,
    KeyCleared,
    KeyCorrupt,
    KeyMissing,
    RegraftError,
    RemoteError,
    RequestTimeout,
    Unreachable,
    error_from_plain,
    error_to_plain,
)
from policies.receipts import Continuation

BACKSTOP: Final = 1.25
"""A plane ends a GET at its deadline and tells what it has; after this many times the deadline it is not waited for."""

_REASONS: Final[Mapping[type[RegraftError], str]] = {
    KeyMissing: CHUNK_MISSING,
    KeyCleared: CHUNK_CLEARED,
    KeyCorrupt: CHUNK_CORRUPT,
    Unreachable: CHUNK_UNREACHABLE,
}


class ReadCoalescer:
    """``plane``: a client, or the address of a plane. ``fields``: those that are read of each row of ``partition``.
    ``clock``: seconds, monotonic."""

    def __init__(
        self,
        plane: Plane | PlaneAddress,
        config: CoalescerConfig,
        partition: str = STAGING,
        fields: Sequence[str] = CHUNK_FIELDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane, self._config, self._clock = connect(plane), config, clock
        self._partition, self._fields = partition, tuple(fields)
        self._policy = Coalescing(config)
        self._callers: dict[int, asyncio.Future[tuple[Any, ...]]] = {}
        self._next_caller = 0
        self._gets: set[asyncio.Task[None]] = set()
        self._timer: asyncio.Handle | None = None
        self._closed = False
        self._chains: Counter[str] = Counter()

    async def read(self, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of ``keys`` in their order, each field → value. Raises the error of the first key that fails
        (`KeyMissing`, `KeyCleared`, `KeyCorrupt`, `Unreachable`), or `ClosedError`."""
        number = self._next_caller
        self._next_caller += 1
        future = self._callers[number] = asyncio.get_running_loop().create_future()
        self._feed(Wanted(number, tuple(keys), self._clock()))
        try:
            rows = await future
        except asyncio.CancelledError:
            if self._callers.pop(number, None) is not None:
                self._feed(Left(number, self._clock()))
            raise
        return [{name: _own(value) for name, value in row.items()} for row in rows]

    async def read_chain(self, continuation: Continuation, current_version: int) -> Chain | ChainRefusal:
        """The chain that a cut call goes on from, verified, or why it has to be generated anew.

        ``current_version``: the weight version of the engine that will continue it. Raises `ClosedError` only.
        """
        chain: Chain | ChainRefusal
        try:
            chunks = await self.read(continuation.keys)
        except ClosedError:
            raise
        except RegraftError as error:
            reason = next((name for cls, name in _REASONS.items() if isinstance(error, cls)), CHUNK_UNREADABLE)
            chain = ChainRefusal(reason, f"{type(error).__name__}: {error.message}")
        else:
            chain = verify_chain(continuation, chunks, current_version)
        outcome = f"refused_{chain.reason}" if isinstance(chain, ChainRefusal) else "chains_restored"
        self._chains[outcome] += 1
        return chain

    def statistics(self) -> Mapping[str, float]:
        """Counts of `Coalescing.statistics`, ``keys_per_get``, ``chains_restored`` and ``refused_<reason>``."""
        counts = self._policy.statistics()
        return {**counts, "keys_per_get": counts["keys_read"] / max(1, counts["gets"]), **self._chains}

    async def close(self) -> None:
        """Answer everybody who waits with `ClosedError` and leave the plane."""
        if self._closed:
            return
        self._closed = True
        self._feed(Closed(self._clock()))
        if self._timer is not None:
            self._timer.cancel()
        for get in self._gets:
            get.cancel()
        if self._gets:
            await asyncio.wait(self._gets)
        await self._plane.close()

    def _feed(self, event: Event) -> None:
        for instruction in self._policy.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        loop = asyncio.get_running_loop()
        match instruction:
            case StartGet():
                get = loop.create_task(self._get(instruction))
                self._gets.add(get)
                get.add_done_callback(self._gets.discard)
            case Answer(caller, rows, error):
                future = self._callers.pop(caller, None)
                if future is None or future.done():
                    return
                if error is None:
                    future.set_result(rows)
                else:
                    future.set_exception(error_from_plain(error_to_plain(error)))
            case SetTimer(at):
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = loop.call_later(max(0.0, at - self._clock()), self._fire, at)

    def _fire(self, at: float) -> None:
        self._timer = None
        self._feed(TimerFired(max(at, self._clock())))

    async def _get(self, get: StartGet) -> None:
        timeout = self._config.timeout_s
        asked = self._plane.get(self._partition, get.keys, self._fields, timeout=timeout, partial=True)
        try:
            batch = await asyncio.wait_for(asked, BACKSTOP * timeout)
            rows, errors = dict(batch.rows()), batch.errors()
        except RegraftError as error:
            self._feed(GetFailed(get.number, error, self._clock()))
        except asyncio.TimeoutError:  # a class of its own before Python 3.11
            late = RequestTimeout(f"{len(get.keys)} keys, {get.keys[0]!r} first, were not read within {timeout:g} s")
            self._feed(GetFailed(get.number, late, self._clock()))
        except Exception as error:  # whatever it was, it costs the keys of this read and nothing else
            told = RemoteError(f"reading {len(get.keys)} keys failed: {type(error).__name__}: {error}")
            self._feed(GetFailed(get.number, told, self._clock()))
        else:
            self._feed(GetDone(get.number, rows, errors, self._clock()))


def _own(value: Any) -> Any:
    """A value that is the caller's alone: an array as a read-only view, anything else as a copy."""
    if not isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    view = value.view()
    view.flags.writeable = False
    return view
