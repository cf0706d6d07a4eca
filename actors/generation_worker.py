"""GenerationWorker: a data-parallel leader. It hosts one engine and streams what it generates to its coordinator.

The engine runs on a thread of its own, one step after another; the actor's event loop starts calls, sends deltas and
stores finished rows, and never waits for a step. Deltas leave in order, one message at a time: what the engine makes
while a message is on its way rides along with the next, so a slow coordinator never slows the engine.

A finished call is stored in the ``train`` partition *before* its coordinator is told, so that a cut at any moment
covers it either as a call or as a row. Prefixes are asked for as soon as a call is resumed, also while the engine is
still loading.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np

from actors.client import AsyncDataPlaneClient, PlaneAddress
from actors.engines.contract import Engine, EngineFingerprint, ResumeMode
from actors.engines.registry import EngineSpec, build_engine
from actors.plane_protocol import TRAIN
from policies.calls import CallIdentity, GenerationRequest, StepDelta, Tokens
from policies.chain import Chain, ChainRefusal
from policies.columns import Column
from policies.errors import ClosedError, EngineError, RegraftError
from policies.manifest import require_fingerprint
from policies.receipts import Continuation

logger = logging.getLogger(__name__)

REMEMBERED_STEPS = 65_536
"""Steps kept for whoever asks for progress; the oldest go first when nobody does."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A call that ended: its row is in partition ``train`` under ``key``.

    ``prefix_tokens`` of its ``tokens`` came from a restored chain; ``refusal`` says why a chain was not used and the
    call was regenerated from its prompt.
    """

    identity: CallIdentity
    key: str
    tokens: int
    finish_reason: str
    prefix_tokens: int = 0
    refusal: ChainRefusal | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One engine step: wall-clock seconds (unix) at its begin and end, and the new tokens of each call."""

    began: float
    ended: float
    tokens: Mapping[CallIdentity, int]


@dataclass(frozen=True, slots=True)
class Resumption:
    """When a resumed call's prefix was in hand (unix seconds), and how many tokens it has."""

    identity: CallIdentity
    at: float
    tokens: int
    chunks: int
    refusal: ChainRefusal | None


class _RunningCall:
    """A call between its request and its completion. ``ended`` gets its finish reason, or why it ends without one."""

    __slots__ = ("ended", "given_up", "parts", "prefix_tokens")

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.parts: list[Tokens] = []
        self.prefix_tokens = 0
        self.given_up = False

    def fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Nobody is to go on with the call, so its coordinator forgets it too."""
        self.given_up = True
        self.fail(error)


class GenerationWorker:
    """``coordinator`` and ``coalescer`` are handles of this leader's actors. ``weight_version`` is the version of the
    weights that the engine loads: its tokens carry it, and chains with newer tokens are refused.

    A call that the engine cannot take, or that is aborted, is forgotten by the coordinator as well. When the engine
    fails, the worker is closed or a caller stops waiting, the coordinator keeps the call's tokens for whoever goes on.
    """

    def __init__(
        self,
        engine: EngineSpec,
        address: PlaneAddress,
        coordinator: Any,
        coalescer: Any,
        weight_version: int = 0,
    ) -> None:
        self._spec, self._coordinator, self._coalescer = engine, coordinator, coalescer
        self._weight_version = weight_version
        self._client = AsyncDataPlaneClient(address)
        self._commands: queue.SimpleQueue[Callable[[Engine], object] | None] = queue.SimpleQueue()
        self._calls: dict[CallIdentity, _RunningCall] = {}
        self._steps: deque[Step] = deque(maxlen=REMEMBERED_STEPS)
        self._resumptions: deque[Resumption] = deque(maxlen=REMEMBERED_STEPS)
        self._failure: EngineError | ClosedError | None = None
        self._deltas: list[StepDelta] = []
        self._fresh = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        self._engine: asyncio.Future[Engine] = self._event_loop.create_future()
        self._streaming = self._event_loop.create_task(self._stream())
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self._thread.start()

    async def ready(self) -> EngineFingerprint:
        """Wait until the engine has loaded. Raises `EngineError` when it cannot."""
        return (await asyncio.shield(self._engine)).fingerprint

    async def encode(self, text: str) -> tuple[int, ...]:
        """Prompt token ids of a user's message."""
        return (await asyncio.shield(self._engine)).encode(text)

    async def decode(self, ids: list[int]) -> str:
        return (await asyncio.shield(self._engine)).decode(ids)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Run a call to its end and store its row. Raises `EngineError` when it cannot be served or was aborted."""
        with self._admitted(request.identity) as call:
            await self._coordinator.begin.remote(request.identity)
            return await self._run_call(request, call, None, "exact")

    async def resume(
        self, continuation: Continuation, mode: ResumeMode, fingerprint: Mapping[str, Any] | None = None
    ) -> Completion:
        """Run a cut call to its end from its chain, or from its prompt when the chain cannot be used.

        ``fingerprint`` is the checkpoint's: a call is not resumed on an engine with another one
        (`FingerprintMismatch` naming the field).
        """
        request, identity = continuation.request, continuation.request.identity
        if mode not in get_args(ResumeMode):
            raise EngineError(f"call {identity}: resume mode {mode!r}; it must be one of {get_args(ResumeMode)}")
        with self._admitted(identity) as call:
            chain: Chain | ChainRefusal | None = None
            if continuation.keys:
                chain = await self._coalescer.read_chain.remote(continuation, self._weight_version)
            self._note_resumption(continuation, chain)
            if fingerprint is not None:
                require_fingerprint(fingerprint, asdict(await self.ready()), "the checkpoint")
            if isinstance(chain, Chain):
                return await self._regrow(continuation, call, chain, mode)
            await self._coordinator.begin.remote(identity)
            completion = await self._run_call(request, call, None, mode, chain)
            await self._coordinator.discard.remote(continuation.keys)
            return completion

    async def abort(self, identity: CallIdentity) -> None:
        """Forget a call; whoever waits for it gets an `EngineError`."""
        call = self._calls.get(identity)
        if call is not None:
            call.give_up(EngineError(f"call {identity} was aborted"))
        await self._coordinator.abort.remote(identity)

    async def take_progress(self) -> tuple[list[Step], list[Resumption]]:
        """The steps and resumptions since this was asked last (at most `REMEMBERED_STEPS` of each)."""
        taken = list(self._steps), list(self._resumptions)
        self._steps.clear()
        self._resumptions.clear()
        return taken

    async def close(self) -> None:
        """End the engine; whoever waits for a call gets a `ClosedError`, the coordinator keeps its tokens."""
        self._fail_all(ClosedError("this worker was closed"))
        self._commands.put(None)
        self._streaming.cancel()
        await asyncio.to_thread(self._thread.join)
        await self._client.close()

    @contextmanager
    def _admitted(self, identity: CallIdentity) -> Iterator[_RunningCall]:
        """The call for as long as it is somebody's business; its engine request ends with it."""
        if self._failure is not None:
            raise self._failure
        if identity in self._calls:
            raise EngineError(f"call {identity} is running here already; a second one of it needs the next attempt")
        call = self._calls[identity] = _RunningCall()
        try:
            yield call
        finally:
            del self._calls[identity]
            call.ended.cancel()
            self._commands.put(lambda engine: engine.abort(identity))

    def _note_resumption(self, continuation: Continuation, chain: Chain | ChainRefusal | None) -> None:
        refusal = chain if isinstance(chain, ChainRefusal) else None
        if refusal is not None:
            logger.warning("a call is regenerated: %s: %s", refusal.reason, refusal.cause)
        tokens = len(chain) if isinstance(chain, Chain) else 0
        identity = continuation.request.identity
        self._resumptions.append(Resumption(identity, time.time(), tokens, len(continuation.keys), refusal))

    async def _regrow(
        self, continuation: Continuation, call: _RunningCall, chain: Chain, mode: ResumeMode
    ) -> Completion:
        """Go on from a verified chain; one that is the whole call needs no engine."""
        await self._coordinator.adopt.remote(continuation, chain)
        prefix = Tokens(chain.ids, chain.logprobs, chain.versions, np.ones(len(chain), bool), chain.extras)
        if continuation.whole_reason is None:
            return await self._run_call(continuation.request, call, prefix, mode)
        call.parts, call.prefix_tokens = [prefix], len(prefix)
        return await self._complete(continuation.request.identity, call, continuation.whole_reason, None)

    async def _run_call(
        self,
        request: GenerationRequest,
        call: _RunningCall,
        prefix: Tokens | None,
        mode: ResumeMode,
        refusal: ChainRefusal | None = None,
    ) -> Completion:
        if prefix is not None:
            call.parts, call.prefix_tokens = [prefix], len(prefix)

        def start(engine: Engine) -> None:
            try:
                engine.start(request, prefix, mode)
            except RegraftError as error:
                self._event_loop.call_soon_threadsafe(call.give_up, error)

        if not call.ended.done():
            self._commands.put(start)
        try:
            reason = await call.ended
        except RegraftError:
            if call.given_up:
                await self._coordinator.abort.remote(request.identity)
            raise
        return await self._complete(request.identity, call, reason, refusal)

    async def _complete(
        self, identity: CallIdentity, call: _RunningCall, reason: str, refusal: ChainRefusal | None
    ) -> Completion:
        """Store the finished row, then tell the coordinator, which clears the call's chunks."""
        try:
            tokens = Tokens.joined(call.parts)
        except ValueError as error:
            raise EngineError(f"call {identity} has no row: {error}") from error
        count, prefix_tokens = len(tokens), call.prefix_tokens
        parts = {"ids": tokens.ids, "logprobs": tokens.logprobs, "versions": tokens.versions, **tokens.extras}
        fields = {name: Column.jagged(array, [count]) for name, array in parts.items()}
        tags = {"attempt": identity.attempt, "finish_reason": reason, "tokens": count, "prefix_tokens": prefix_tokens}
        await self._client.put(TRAIN, [identity.row_key], fields, tags=[tags])
        await self._coordinator.finish.remote(identity, reason)
        return Completion(identity, identity.row_key, count, reason, prefix_tokens, refusal)

    async def _stream(self) -> None:
        """Send deltas to the coordinator in order; a call ends for its caller once its last delta has arrived there."""
        try:
            fingerprint = await self.ready()
            await self._coordinator.expect_vocabulary.remote(fingerprint.vocab_size)
            while True:
                await self._fresh.wait()
                self._fresh.clear()
                deltas, self._deltas = self._deltas, []
                await self._coordinator.observe.remote(deltas)
                for identity, reason in ((i, r) for delta in deltas for i, r in delta.finished.items()):
                    call = self._calls.get(identity)
                    if call is not None and not call.ended.done():
                        call.ended.set_result(reason)
        except EngineError as error:
            self._fail_all(error)
        except Exception as error:
            self._fail_all(EngineError(f"this leader's coordinator did not take its tokens: {error}"))

    def _fail_all(self, error: EngineError | ClosedError) -> None:
        """No call of this worker goes on, and none is admitted any more."""
        self._failure = self._failure or error
        for call in self._calls.values():
            call.fail(error)

    def _take(self, delta: StepDelta, began: float, ended: float) -> None:
        self._steps.append(
            Step(began, ended, {call: len(new) for call, new in zip(delta.calls, delta.tokens, strict=True)})
        )
        for identity, tokens in zip(delta.calls, delta.tokens, strict=True):
            call = self._calls.get(identity)
            if call is not None:
                call.parts.append(tokens)
        if delta.calls or delta.finished:
            self._deltas.append(delta)
            self._fresh.set()

    def _run_engine(self) -> None:
        """The engine's thread: load, then step while there is work and obey commands between steps."""
        call_soon = self._event_loop.call_soon_threadsafe
        try:
            engine = build_engine(self._spec)
            engine.weight_version = self._weight_version
        except Exception as error:
            told = error if isinstance(error, EngineError) else EngineError(f"engine {self._spec.name!r}: {error!r}")
            call_soon(self._engine_failed, told)
            return
        call_soon(self._engine.set_result, engine)
        while True:
            while engine.unfinished == 0 or not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(engine)
            began = time.time()
            try:
                delta = engine.step()
            except Exception as error:
                logger.exception("the engine failed in a step")
                call_soon(self._engine_failed, EngineError(f"the engine failed in a step: {error!r}"))
                return
            call_soon(self._take, delta, began, time.time())

    def _engine_failed(self, error: EngineError) -> None:
        if not self._engine.done():
            self._engine.set_exception(error)
        self._fail_all(error)
