"""CutCoordinator: one per DP leader. It holds the tokens of the leader's calls and carries out their cuts.

It is a process of its own, so tokens outlive the engine; it is fed one small message per engine step, and feeding goes
on during a cut, because everything runs on one event loop and a cut only awaits. What a cut does is decided by
`policies.cut`, what a call's state may become by `policies.capture`.

Guarantees: one cut at a time; a receipt is given again for the same question, without new writes; a cut that is
cancelled still clears what it wrote and gives the tokens back. Costs: O(new tokens) per observation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from actors.chunk_cleanup import ChunkCleanup
from actors.client import PlaneAddress
from actors.cut_run import CutRun
from actors.plane_protocol import STAGING, Plane, connect
from policies.calls import CallIdentity, StepDelta, Tokens
from policies.capture import CallCapture, CaptureTable, State
from policies.chain import Chain, chunk_place
from policies.config import RolloutRecoveryConfig
from policies.cut import CutTransaction
from policies.errors import ClosedError, CutRefused, Refused
from policies.receipts import Continuation, Inventory, Receipt

logger = logging.getLogger(__name__)

REMEMBERED_RECEIPTS: Final = 64


class CutCoordinator:
    """``plane``: a client, or the address of a plane. ``clock``: seconds, monotonic."""

    def __init__(
        self,
        plane: Plane | PlaneAddress,
        config: RolloutRecoveryConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plane, self._config, self._clock = connect(plane), config, clock
        self._table = CaptureTable()
        self._cleanup = ChunkCleanup(self._plane, STAGING)
        self._receipts: dict[tuple[str, str], Receipt] = {}
        self._run: CutRun | None = None
        self._task: asyncio.Task[Receipt] | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()

    def begin(self, identity: CallIdentity) -> None:
        """Make a call known, before its first token. Earlier attempts of it are superseded: their chunks are cleared.

        Saying it again changes nothing. Raises `Refused` when the call ended already or a later attempt is known.
        """
        if self._table.get(identity) is None:
            self._add(identity, inherited=())

    def adopt(self, continuation: Continuation, chain: Chain) -> None:
        """Make a resumed call known, with the verified chain it goes on from. Its chunks are this call's from now on.

        Earlier attempts that are known here are superseded; of their chunks only those outside the chain are cleared.
        Saying it again changes nothing. Raises `Refused` when the call ended, has other tokens, or is outlived by a
        later attempt.
        """
        identity = continuation.request.identity
        known = self._table.get(identity)
        if known is not None and known.keys[: len(continuation.keys)] == continuation.keys:
            return
        if any(chunk_place(identity, key) is None for key in continuation.keys):
            raise Refused(f"{list(continuation.keys)} are no chain of call {identity}")
        capture = known or self._add(identity, inherited=continuation.keys)
        try:
            capture.adopt(continuation.keys, chain, continuation.whole_reason)
        except ValueError as error:
            raise Refused(str(error)) from error

    def observe(self, deltas: Sequence[StepDelta]) -> None:
        """Take what engine steps produced, in order. Nothing in them can fail for more than the call it is about."""
        for delta in deltas:
            self._counts["steps"] += 1
            if len(delta.calls) != len(delta.tokens):
                cause = f"a step named {len(delta.calls)} calls and brought tokens for {len(delta.tokens)}"
                for identity in delta.calls:
                    self._poison(identity, cause)
                continue
            for identity, tokens in zip(delta.calls, delta.tokens, strict=True):
                self._take(identity, tokens)
            for identity, reason in delta.finished.items():
                capture = self._table.get(identity)
                if capture is not None and not capture.end(reason):
                    self._counts["unexpected_ends"] += 1

    def expect_vocabulary(self, size: int) -> None:
        """Token ids of ``size`` or more poison their call from now on."""
        self._table.expect_vocabulary(size)

    async def finish(self, identity: CallIdentity, finish_reason: str) -> None:
        """The call's whole row is stored elsewhere: forget its tokens and clear its chunks in the background.

        ``finish_reason`` counts when no delta has told it. A call that is not active is left as it is.
        """
        await self._cleanup.schedule(self._table.finish(identity, finish_reason))

    async def discard(self, keys: Sequence[str]) -> None:
        """Chunks that no call here has and nobody can use, those of a refused chain: clear them in the background."""
        await self._cleanup.schedule(keys)

    async def abort(self, identity: CallIdentity) -> None:
        """The call is not wanted any more: as `finish`, but it is no completion."""
        await self._cleanup.schedule(self._table.abort(identity))

    def active_calls(self) -> tuple[CallIdentity, ...]:
        """Calls that were neither finished nor aborted, in the order in which they came: what an inventory lists."""
        return self._table.active()

    async def cut(self, inventory: Inventory) -> Receipt:
        """Stage what the calls of ``inventory`` have generated; one acknowledgement for each of them, in its order.

        The same inventory asked again gives the same receipt. Raises `CutRefused` when another cut runs or the
        inventory does not match its digest, `ClosedError` after `close`. When this is cancelled, or the coordinator
        closed, what was not sealed is cleared and rolled back first.
        """
        question = (inventory.checkpoint_id, inventory.digest)
        if question in self._receipts:
            return self._receipts[question]
        if self._closed:
            raise ClosedError("the coordinator is closed; it cuts nothing any more")
        if self._task is not None:
            raise CutRefused(
                f"checkpoint {inventory.checkpoint_id!r} asks for a cut while another one runs on this coordinator; "
                "ask again when that has ended"
            )
        if Inventory.of(inventory.checkpoint_id, inventory.calls).digest != inventory.digest:
            raise CutRefused(f"the inventory of checkpoint {inventory.checkpoint_id!r} does not match its digest")
        transaction = CutTransaction(inventory, self._table, self._config)
        self._run = run = CutRun(self._plane, transaction, self._config.control_timeout_s, self._cleanup, self._clock)
        self._task = task = asyncio.get_running_loop().create_task(run.run())
        task.add_done_callback(partial(self._cut_ended, question, transaction))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.interrupt()
            await asyncio.wait([task])
            raise

    async def pause_cleanup(self) -> None:
        """When this returns no chunk is cleared any more until `resume_cleanup`: a save in between finds them all."""
        await self._cleanup.pause()

    def resume_cleanup(self) -> None:
        self._cleanup.resume()

    async def drain(self) -> None:
        """Wait until the chunks of all ended calls are cleared or given up. During a pause: until it is over."""
        await self._cleanup.drain()

    def statistics(self) -> Mapping[str, float]:
        """Calls by state, live and sealed tokens, steps, cuts, oddities that were seen, and the background clearing."""
        captures = self._table.captures()
        counts: Counter[str] = Counter(f"calls_{capture.state.value}" for capture in captures)
        counts["live_tokens"] = sum(capture.live_tokens for capture in captures)
        counts["sealed_tokens"] = sum(capture.sealed_tokens for capture in captures)
        return {**counts, **self._counts, **self._cleanup.statistics()}

    async def close(self) -> None:
        """Interrupt a running cut, clear what nobody needs and leave the plane. Sealed chains stay."""
        if self._closed:
            return
        self._closed = True
        if self._run is not None and self._task is not None:
            self._run.interrupt()
            await asyncio.wait([self._task])
        await self._cleanup.close()
        await self._plane.close()

    def _add(self, identity: CallIdentity, inherited: tuple[str, ...]) -> CallCapture:
        if self._closed:
            raise ClosedError(f"the coordinator is closed; it cannot take call {identity}")
        later = [o for o in self._table.others(identity) if o.rollout_id == identity.rollout_id and o > identity]
        if later:
            raise Refused(f"call {identity} comes after its attempt {later[0].attempt}, which has taken its place")
        try:
            capture = self._table.add(identity)
        except ValueError as error:
            raise Refused(str(error)) from error
        for earlier in self._table.earlier_attempts(identity):
            self._cleanup.add(key for key in self._table.abort(earlier) if key not in inherited)
        return capture

    def _take(self, identity: CallIdentity, tokens: Tokens) -> None:
        capture = self._table.get(identity)
        if capture is None:
            self._counts["deltas_of_unknown_calls"] += 1
            return
        trusted = capture.state is not State.POISONED
        capture.observe(tokens)
        if trusted and capture.state is State.POISONED:
            self._note_poisoned(capture)

    def _poison(self, identity: CallIdentity, cause: str) -> None:
        capture = self._table.get(identity)
        if capture is not None and capture.state is not State.POISONED:
            capture.poison(cause)
            self._note_poisoned(capture)

    def _note_poisoned(self, capture: CallCapture) -> None:
        self._counts["poisoned"] += 1
        logger.warning("call %s is poisoned and will be generated anew: %s", capture.identity, capture.cause)

    def _cut_ended(self, question: tuple[str, str], transaction: CutTransaction, task: asyncio.Task[Receipt]) -> None:
        """Runs when the cut has ended, also when nobody waits for it any more."""
        self._run = self._task = None
        self._counts["cuts"] += 1
        if task.cancelled() or task.exception() is not None:
            for capture in self._table.captures():
                capture.thaw()
            return
        if transaction.interrupted:
            return
        self._receipts[question] = task.result()
        if len(self._receipts) > REMEMBERED_RECEIPTS:
            del self._receipts[next(iter(self._receipts))]
