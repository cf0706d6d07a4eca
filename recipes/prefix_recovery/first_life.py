"""The first life: the reference run, then the same calls again, cut while they generate, and a checkpoint of it all.

It does not end by itself: once the checkpoint is published the calls go on, until somebody kills every process of this
life.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.generation_worker import TRAIN
from actors.leaders import Leader
from policies.calls import CallIdentity, GenerationRequest
from policies.errors import RegraftError
from policies.receipts import DURABLE_FAILURE, DURABLE_PREFIX, Acknowledgement, Inventory, Receipt, merged_numbers
from recipes.prefix_recovery import events
from recipes.prefix_recovery.job import POLL_S, Job
from recipes.prefix_recovery.plan import Plan

REFERENCE_ROLLOUT = "reference"
ROLLOUT = "r0"
EPOCH = 1
"""Of the one checkpoint that this life writes."""


class NothingToCut(RegraftError):
    """Every call had ended before it could be cut."""


def live(plan: Plan) -> None:
    with Job(plan) as job:
        asyncio.run(_live(job))


async def _live(job: Job) -> None:
    await job.engines_ready()
    await _reference(job)
    requests = await job.requests(ROLLOUT)
    cutting = _Cutting(job, requests)
    await job.run(events.CUT, [cutting.call(i) for i in range(len(requests))], cutting.cut_and_save)
    await asyncio.Event().wait()


async def _reference(job: Job) -> None:
    """Run every call without interruption and keep the rows outside the plane, so that no checkpoint holds them."""
    requests = await job.requests(REFERENCE_ROLLOUT)
    calls = [_generate(job.leader_of(i), request) for i, request in enumerate(requests)]
    completions = await job.run(events.REFERENCE, calls)
    await job.save_rows(completions, Path(job.plan.reference))
    job.client.clear(TRAIN, [completion.key for completion in completions])


def _generate(leader: Leader, request: GenerationRequest) -> Any:
    return lambda: leader.worker.generate.remote(request)


class _Cutting:
    """Cuts the calls at the planned tokens, then saves the plane."""

    def __init__(self, job: Job, requests: Sequence[GenerationRequest]) -> None:
        self._job, self._requests = job, requests
        self._finished: set[CallIdentity] = set()

    def call(self, index: int) -> Any:
        request = self._requests[index]

        async def generate() -> Any:
            completion = await self._job.leader_of(index).worker.generate.remote(request)
            self._finished.add(request.identity)
            return completion

        return generate

    async def cut_and_save(self) -> None:
        plan = self._job.plan
        for leader in self._job.leaders:
            await leader.coordinator.pause_cleanup.remote(EPOCH)
        receipts: list[Receipt] = []
        for number in range(plan.cuts):
            await self._reach(plan.cut_after + number * plan.cut_gap)
            receipts = await self._cut(number)
        await self._save(receipts)
        for leader in self._job.leaders:
            await leader.coordinator.resume_cleanup.remote(EPOCH)

    def _active(self) -> list[CallIdentity]:
        return [r.identity for r in self._requests if r.identity not in self._finished]

    async def _reach(self, tokens: int) -> None:
        """Wait until every active call has at least ``tokens`` tokens."""
        while min((self._job.tokens.get(call, 0) for call in self._active()), default=tokens) < tokens:
            await asyncio.sleep(POLL_S / 2)
        if not self._active():
            raise NothingToCut(
                f"every call had ended before it had {tokens} tokens, so there was nothing left to cut; choose a "
                "smaller --cut-after or a larger --max-tokens"
            )

    async def _cut(self, number: int) -> list[Receipt]:
        """Cut all active calls, each at its own leader, all leaders at once."""
        leaders, active = self._job.leaders, set(self._active())
        inventories = [
            Inventory.of(
                f"cut-{number}", [r.identity for r in self._requests[i :: len(leaders)] if r.identity in active]
            )
            for i in range(len(leaders))
        ]
        began = time.time()
        receipts: list[Receipt] = await asyncio.gather(
            *(leader.coordinator.cut.remote(inv) for leader, inv in zip(leaders, inventories, strict=True))
        )
        acknowledged = [a for receipt in receipts for a in receipt.acknowledgements]
        events.emit(_cut_event(number, began, time.time(), receipts, acknowledged))
        return receipts

    async def _save(self, receipts: Sequence[Receipt]) -> None:
        job, at = self._job, time.time()
        state = {
            "requests": [request.to_plain() for request in self._requests],
            "receipts": [receipt.to_plain() for receipt in receipts],
        }
        fingerprint = await job.fingerprint()
        saved = await asyncio.to_thread(job.plane.save, job.plan.checkpoints, job=state, fingerprint=fingerprint)
        events.emit(
            events.Checkpoint(path=str(saved.path), seconds=sum(saved.seconds.values()), bytes=saved.nbytes, at=at)
        )


def _cut_event(
    number: int, began: float, ended: float, receipts: Sequence[Receipt], acknowledged: Sequence[Acknowledgement]
) -> events.Cut:
    failures: dict[str, int] = {}
    for acknowledgement in acknowledged:
        if acknowledgement.disposition == DURABLE_FAILURE:
            reason = acknowledgement.reason or "unknown"
            failures[reason] = failures.get(reason, 0) + 1
    return events.Cut(
        index=number,
        began=began,
        ended=ended,
        durable=sum(a.disposition == DURABLE_PREFIX for a in acknowledged),
        failures=failures,
        numbers=merged_numbers(receipts),
        prefix_tokens={a.identity.call_id: a.tokens for a in acknowledged if a.disposition == DURABLE_PREFIX},
    )
