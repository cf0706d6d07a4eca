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
from dataclasses import replace
from functools import partial
from typing import Final

from actors.address import PlaneAddress
from actors.chunk_cleanup import ChunkCleanup
from actors.cut_run import CutRun
from actors.metrics import report_cut
from actors.plane_protocol import STAGING, Plane, connect
from policies.calls import CallIdentity, StepDelta
from policies.capture_table import Admission, CaptureTable
from policies.chain import Chain, chunk_place
from policies.cleanup import CleanupLimits
from policies.config import RolloutRecoveryConfig
from policies.cut import CutTransaction
from policies.decode_meter import DecodeMeter
from policies.errors import ClosedError, CutRefused, Refused
from policies.receipts import Continuation, Inventory, Receipt, ReceiptCache

logger = logging.getLogger(__name__)

DECODE_WINDOW_S: Final = 5.0
"""Decoding before a cut is measured over this time."""


class CutCoordinator:
    """``plane``: a client, or the address of a plane. ``clock``: seconds, monotonic."""

    def __init__(
        self,
        plane: Plane | PlaneAddress,
        config: RolloutRecoveryConfig,
        clock: Callable[[], float] = time.monotonic,
        limits: CleanupLimits | None = None,
    ) -> None:
        self._plane, self._config, self._clock = connect(plane), config, clock
        self._table = CaptureTable(config.terminal_evidence_s)
        self._cleanup = ChunkCleanup(self._plane, STAGING, clock, limits)
        self._meter = DecodeMeter()
        self._receipts = ReceiptCache()
        self._run: CutRun | None = None
        self._task: asyncio.Task[Receipt] | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()

    def begin(self, identity: CallIdentity) -> None:
        """Make a call known, before its first token. Earlier attempts of it are superseded: their chunks are cleared.

        Saying it again changes nothing. Raises `Refused` when the call ended already or a later attempt is known.
        """
        self._admit(identity)

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
        capture = self._admit(identity, continuation.keys).capture
        try:
            capture.adopt(continuation.keys, chain, continuation.whole_reason)
        except ValueError as error:
            raise Refused(str(error)) from error

    def observe(self, deltas: Sequence[StepDelta]) -> None:
        """Take what engine steps produced, in order. Nothing in them can fail for more than the call it is about."""
        for delta in deltas:
            for capture in self._table.observe(delta):
                logger.warning("call %s is poisoned and will be generated anew: %s", capture.identity, capture.cause)
            self._meter.note(self._clock(), sum(map(len, delta.tokens)))

    def expect_vocabulary(self, size: int) -> None:
        """Token ids of ``size`` or more poison their call from now on."""
        self._table.expect_vocabulary(size)

    async def finish(self, identity: CallIdentity, finish_reason: str) -> None:
        """The call's whole row is stored elsewhere: forget its tokens and clear its chunks in the background.

        ``finish_reason`` counts when no delta has told it. A call that is not active is left as it is.
        """
        await self._cleanup.schedule(self._table.finish(identity, finish_reason, self._clock()))

    async def discard(self, keys: Sequence[str]) -> None:
        """Chunks that no call here has and nobody can use, those of a refused chain: clear them in the background."""
        await self._cleanup.schedule(keys)

    async def abort(self, identity: CallIdentity) -> None:
        """The call is not wanted any more: as `finish`, but it is no completion."""
        await self._cleanup.schedule(self._table.abort(identity, self._clock()))

    def active_calls(self) -> tuple[CallIdentity, ...]:
        """Calls that were neither finished nor aborted, in the order in which they came: what an inventory lists."""
        return self._table.active()

    async def cut(self, inventory: Inventory) -> Receipt:
        """Stage what the calls of ``inventory`` have generated; one acknowledgement for each of them, in its order.

        The same inventory asked again gives the same receipt. Raises `CutRefused` when another cut runs or the
        inventory does not match its digest, `ClosedError` after `close`. When this is cancelled, or the coordinator
        closed, what was not sealed is cleared and rolled back first.
        """
        known = self._receipts.get(inventory)
        if known is not None:
            return known
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
        self._task = task = asyncio.get_running_loop().create_task(self._measured(run))
        task.add_done_callback(partial(self._cut_ended, transaction))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            run.interrupt()
            await asyncio.wait([task])
            raise

    async def pause_cleanup(self, epoch: int) -> None:
        """When this returns no chunk of a call is cleared any more until `resume_cleanup`: a save in between finds them
        all. ``epoch``: a number of the checkpoint that rises from one to the next. Raises `Refused` when that epoch or
        a later one was resumed already: the message comes late, its checkpoint was given up."""
        await self._cleanup.pause(epoch)

    def resume_cleanup(self, epoch: int) -> None:
        """The checkpoint of ``epoch`` is done with, published or not; so are all before it."""
        self._cleanup.resume(epoch)

    async def drain(self) -> None:
        """Wait until the chunks of all ended calls are cleared or given up. During a pause: until it is over.

        Raises `CleanupFailed` for what was given up since this was asked last.
        """
        await self._cleanup.drain()

    def statistics(self) -> Mapping[str, float]:
        """Calls by state, live and sealed tokens, steps, cuts, oddities that were seen, and the background clearing."""
        captures = self._table.captures()
        counts: Counter[str] = Counter(f"calls_{capture.state.value}" for capture in captures)
        counts["live_tokens"] = sum(capture.live_tokens for capture in captures)
        counts["sealed_tokens"] = sum(capture.sealed_tokens for capture in captures)
        return {**counts, **self._table.counts, **self._counts, **self._cleanup.statistics()}

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

    def _admit(self, identity: CallIdentity, inherited: tuple[str, ...] = ()) -> Admission:
        if self._closed:
            raise ClosedError(f"the coordinator is closed; it cannot take call {identity}")
        admission = self._table.admit(identity, self._clock(), inherited)
        self._cleanup.unneed(admission.unneeded)
        return admission

    async def _measured(self, run: CutRun) -> Receipt:
        """The receipt of a cut, with how fast engines decoded before and during it; as metrics, too."""
        receipt = await run.run()
        rates = {
            "decode_before_per_s": self._meter.rate(run.began - DECODE_WINDOW_S, run.began),
            "decode_during_per_s": self._meter.rate(run.began, self._clock()),
        }
        numbers = {**receipt.numbers, **{name: rate for name, rate in rates.items() if rate is not None}}
        report_cut(numbers)
        return replace(receipt, numbers=numbers)

    def _cut_ended(self, transaction: CutTransaction, task: asyncio.Task[Receipt]) -> None:
        """Runs when the cut has ended, also when nobody waits for it any more."""
        self._run = self._task = None
        self._counts["cuts"] += 1
        if task.cancelled() or task.exception() is not None:
            for capture in self._table.captures():
                capture.thaw()
        elif not transaction.interrupted:
            self._receipts.add(task.result())
