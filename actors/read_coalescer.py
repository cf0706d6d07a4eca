"""ReadCoalescer: one per worker. It reads what many callers want in few GETs, and gives them chains that verify.

What is read together, shared and tried again is decided by `policies.coalescing`; this is its shell: a task per GET, a
future per caller, one timer. All of that lives on one event loop, its *home*: the one it was made on, or else one on a
thread of its own.

Guarantees: every read ends with its rows, its own key's error, or `ClosedError`; callers may be on any event loop of
any thread, and each is answered on its own; arrays are read-only and everything else is the caller's own, so what one
caller does to its rows no other sees. A caller at home costs no hop between threads, any other one there and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from actors.address import PlaneAddress
from actors.plane_protocol import STAGING, TRAIN, Plane, connect
from policies.answers import Placed, Told
from policies.chain import CHUNK_FIELDS, Chain, ChainRefusal, chunk_wishes, unread_chain, verify_chain
from policies.coalescing import Coalescing
from policies.coalescing_events import (
    Answer,
    Closed,
    Event,
    GetDone,
    GetFailed,
    GetPart,
    GetPlaced,
    Instruction,
    Left,
    SetTimer,
    Source,
    StartGet,
    TimerFired,
    Wanted,
    Wish,
)
from policies.config import CoalescerConfig
from policies.errors import (
    ClosedError,
    RegraftError,
    RemoteError,
    RequestTimeout,
    error_from_plain,
    error_to_plain,
)
from policies.receipts import Continuation

T = TypeVar("T")

CHUNKS: Final = Source(STAGING, CHUNK_FIELDS)
TURNS: Final = Source(TRAIN, CHUNK_FIELDS)
"""Finished calls, by `CallIdentity.row_key`: the earlier turns of a conversation."""

BACKSTOP: Final = 1.25
"""A plane ends a GET at its deadline and tells what it has; after this many times the deadline it is not waited for."""

LOOK_S: Final = 0.02
"""A GET that takes longer than this may be slow: then it matters which units it waits for."""


class _Caller(NamedTuple):
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[tuple[Any, ...]]

    def settle(self, answer: Answer) -> None:
        if self.future.done():
            return
        if answer.error is None:
            self.future.set_result(answer.rows)
        else:
            self.future.set_exception(error_from_plain(error_to_plain(answer.error)))


class ReadCoalescer:
    """``plane``: a client, or the address of a plane. ``clock``: seconds, monotonic."""

    def __init__(
        self,
        plane: Plane | PlaneAddress,
        config: CoalescerConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane, self._clock = connect(plane), clock
        self._policy = Coalescing(config)
        self._callers: dict[int, _Caller] = {}
        self._numbers = itertools.count()
        self._gets: dict[int, asyncio.Task[None]] = {}
        self._told: deque[tuple[int, Told]] = deque()  # by GETs, and not heeded yet; filled on the plane's thread
        self._timer: asyncio.Handle | None = None
        self._closed = False
        self._chains: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        try:
            self._home = asyncio.get_running_loop()
        except RuntimeError:
            self._home = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._home.run_forever, name="regraft-coalescer", daemon=True)
            self._thread.start()

    async def read(self, keys: Sequence[str], source: Source = CHUNKS) -> list[dict[str, Any]]:
        """The rows of ``keys`` in their order, each field → value. Raises the error of the first key that fails
        (`KeyMissing`, `KeyCleared`, `KeyCorrupt`, `Unreachable`), or `ClosedError`."""
        return await self._read(source, tuple([Wish(key) for key in keys]))

    async def read_chain(self, continuation: Continuation, current_version: int) -> Chain | ChainRefusal:
        """The chain that a cut call goes on from, verified, or why it has to be generated anew.

        ``current_version``: the weight version of the engine that will continue it. Raises `ClosedError` only.
        """
        chain: Chain | ChainRefusal
        source = Source(STAGING, (*CHUNK_FIELDS, *continuation.extras))
        try:
            chunks = await self._read(source, chunk_wishes(continuation))
        except ClosedError:
            raise
        except RegraftError as error:
            chain = unread_chain(error)
        else:
            chain = verify_chain(continuation, chunks, current_version)
        self._at_home(self._count, f"refused_{chain.reason}" if isinstance(chain, ChainRefusal) else "chains_restored")
        return chain

    def statistics(self) -> Mapping[str, Any]:
        """`Coalescing.statistics`, ``keys_per_get``, ``chains_restored`` and ``refused_<reason>``."""
        if _running() is self._home or self._home.is_closed():
            return self._statistics()
        found: Future[Mapping[str, Any]] = Future()
        self._at_home(lambda: found.set_result(self._statistics()))
        return found.result()

    async def close(self) -> None:
        """Answer everybody who waits with `ClosedError` and leave the plane."""
        if self._home.is_closed():
            return
        await self._from_anywhere(self._close())
        if self._thread is not None:
            self._home.call_soon_threadsafe(self._home.stop)
            await asyncio.to_thread(self._thread.join)
            self._home.close()

    async def _read(self, source: Source, wishes: tuple[Wish, ...]) -> list[dict[str, Any]]:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        caller = _Caller(loop, loop.create_future())
        self._at_home(self._enter, number, caller, source, wishes)
        try:
            rows = await caller.future
        except asyncio.CancelledError:
            with contextlib.suppress(ClosedError):
                self._at_home(self._leave, number)
            raise
        return [{name: _own(value) for name, value in row.items()} for row in rows]

    def _at_home(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the home loop: now, when this is it."""
        if _running() is self._home:
            function(*arguments)
            return
        try:
            self._home.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            raise ClosedError("the event loop that this coalescer lived on has ended") from None

    async def _from_anywhere(self, work: Coroutine[Any, Any, T]) -> T:
        if _running() is self._home:
            return await work
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    # At home

    def _enter(self, number: int, caller: _Caller, source: Source, wishes: tuple[Wish, ...]) -> None:
        self._callers[number] = caller
        self._feed(Wanted(number, source, wishes, self._clock()))

    def _leave(self, number: int) -> None:
        if self._callers.pop(number, None) is not None:
            self._feed(Left(number, self._clock()))

    def _count(self, outcome: str) -> None:
        self._chains[outcome] += 1

    def _statistics(self) -> Mapping[str, Any]:
        counts = self._policy.statistics()
        return {**counts, "keys_per_get": counts["keys_read"] / max(1, counts["gets"]), **self._chains}

    async def _close(self) -> None:
        if self._closed:
            return
        self._shut()
        gets = list(self._gets.values())
        for get in gets:
            get.cancel()
        if gets:
            await asyncio.wait(gets)
        await self._plane.close()

    def _shut(self) -> None:
        self._closed = True
        self._feed(Closed(self._clock()))
        if self._timer is not None:
            self._timer.cancel()

    def _feed(self, event: Event) -> None:
        self._heed()
        self._handle(event)

    def _heed(self) -> None:
        """Hand on what GETs have told, in its order."""
        while self._told:
            number, told = self._told.popleft()
            if number not in self._gets:
                continue  # it was given up before
            if isinstance(told, Placed):
                self._handle(GetPlaced(number, told.units, self._clock()))
            else:
                self._handle(GetPart(number, dict(told.rows()), told.errors(), self._clock()))

    def _handle(self, event: Event) -> None:
        for instruction in self._policy.handle(event):
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case StartGet(number):
                self._gets[number] = self._home.create_task(self._get(instruction))
            case Answer(number):
                caller = self._callers.pop(number, None)
                if caller is None:
                    return
                if caller.loop is self._home:
                    caller.settle(instruction)
                else:
                    with contextlib.suppress(RuntimeError):  # its loop has ended
                        caller.loop.call_soon_threadsafe(caller.settle, instruction)
            case SetTimer(at):
                if self._timer is not None:
                    self._timer.cancel()
                left = at - self._clock()
                later = partial(self._home.call_later, left) if left > 0 else self._home.call_soon
                self._timer = later(self._fire, at)

    def _fire(self, at: float) -> None:
        self._timer = None
        self._feed(TimerFired(max(at, self._clock())))

    async def _get(self, get: StartGet) -> None:
        """Carry out a read and tell the policy how it ended."""
        (partition, fields), timeout = get.source, get.timeout_s
        task = self._gets[get.number]
        look = self._home.call_later(LOOK_S, self._heed)
        backstop = self._home.call_later(BACKSTOP * timeout, task.cancel)
        event: GetDone | GetFailed
        try:
            batch = await self._plane.stream(
                partition, get.keys, fields, partial(self._tell, get), avoid=get.avoid, timeout=timeout
            )
            event = GetDone(get.number, dict(batch.rows()), batch.errors(), self._clock())
        except asyncio.CancelledError:
            if self._home.time() < backstop.when():  # this coalescer is being closed, or its loop ends
                if not self._closed:
                    self._shut()
                raise
            late = RequestTimeout(f"{len(get.keys)} keys, {get.keys[0]!r} first, were not read within {timeout:g} s")
            event = GetFailed(get.number, late, self._clock())
        except RegraftError as error:
            event = GetFailed(get.number, error, self._clock())
        except Exception as error:  # whatever it was, it costs the keys of this read and nothing else
            failure = RemoteError(f"reading {len(get.keys)} keys failed: {type(error).__name__}: {error}")
            event = GetFailed(get.number, failure, self._clock())
        finally:
            look.cancel()
            backstop.cancel()
        self._feed(event)
        del self._gets[get.number]

    def _tell(self, get: StartGet, told: Told) -> None:
        """On the plane's thread. Rows wake the home loop. Where they are seldom matters before they come, so it waits
        for the next event, unless a unit was not asked."""
        self._told.append((get.number, told))
        if not isinstance(told, Placed) or not get.avoid.isdisjoint(told.units.values()):
            self._home.call_soon_threadsafe(self._heed)


def _running() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _own(value: Any) -> Any:
    """A value that is the caller's alone: an array as a read-only view, anything else as a copy."""
    if not isinstance(value, np.ndarray):
        return copy.deepcopy(value)
    view = value.view()
    view.flags.writeable = False
    return view
