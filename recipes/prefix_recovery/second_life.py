"""The second life: a fresh cluster restores the checkpoint and every call goes on from where it was.

Prefixes are asked for as soon as the plane is restored, while the engines are still loading.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from actors.checkpoint_files import StoredCheckpoint
from actors.generation_worker import TRAIN, Completion
from policies.calls import CallIdentity, GenerationRequest
from policies.receipts import Continuation, Receipt
from recipes.prefix_recovery import events
from recipes.prefix_recovery.job import Job
from recipes.prefix_recovery.plan import Plan


def live(plan: Plan) -> None:
    stored = StoredCheckpoint.open(plan.checkpoints)
    with Job(plan) as job:
        asyncio.run(_live(job, stored))


async def _live(job: Job, stored: StoredCheckpoint) -> None:
    began = time.time()
    job.plane.restore(stored)
    finished = _finished_rows(job)
    events.emit(events.Restored(seconds=time.time() - began, rows=_row_count(job)))
    continuations = _continuations(stored.job, finished)
    calls = [_resume(job, index, c, stored.manifest.fingerprint) for index, c in continuations]
    resumed = await job.run(events.RESUME, calls, job.engines_ready)
    await job.save_rows([*finished.values(), *resumed], Path(job.plan.rows))
    events.emit(
        events.Statistics(
            get_calls=sum([(await leader.coalescer.statistics.remote())["gets"] for leader in job.leaders]),
            versions={"ray": ray.__version__},
        )
    )


def _finished_rows(job: Job) -> dict[tuple[str, str], Completion]:
    """Calls whose rows were complete in the checkpoint, by rollout and call id: they are not run again."""
    finished = {}
    for key, tags in job.client.list(TRAIN):
        rollout, call = key.split("/", 1)
        identity = CallIdentity(rollout, call, tags["attempt"])
        finished[rollout, call] = Completion(identity, key, tags["tokens"], tags["finish_reason"], tags["tokens"])
    return finished


def _row_count(job: Job) -> int:
    return sum(partition["rows"] for partition in job.client.describe()["partitions"].values())


def _continuations(
    state: Mapping[str, Any], finished: Mapping[tuple[str, str], Completion]
) -> list[tuple[int, Continuation]]:
    """(number of the call, its continuation as the next attempt) for every call that has no finished row."""
    acknowledged = {
        (a.identity.rollout_id, a.identity.call_id): a
        for plain in state["receipts"]
        for a in Receipt.from_plain(plain).acknowledgements
    }
    continuations = []
    for index, plain in enumerate(state["requests"]):
        request = GenerationRequest.from_plain(plain)
        call = (request.identity.rollout_id, request.identity.call_id)
        if call not in finished:
            attempt = request.with_identity(request.identity.next_attempt())
            continuations.append((index, Continuation.of(acknowledged[call], attempt)))
    return continuations


def _resume(job: Job, index: int, continuation: Continuation, fingerprint: Mapping[str, Any]) -> Any:
    worker = job.leader_of(index).worker
    return lambda: worker.resume.remote(continuation, job.plan.resume, fingerprint)
