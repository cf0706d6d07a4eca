"""The small asynchronous generation job that both lives of the recipe run: a plane, its leaders, and their calls.

Calls go to the leaders in turn. While they run, the job polls the leaders for the steps they made and keeps count of
every call's tokens; that is what decides when to cut, and what the view and the picture show.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from safetensors.numpy import save_file

from actors.client import DataPlaneClient
from actors.data_plane import DataPlane
from actors.engines.registry import EngineSpec
from actors.generation_worker import TRAIN, Completion, Resumption
from actors.leaders import Leader
from policies.calls import CallIdentity, GenerationRequest
from policies.config import PlaneConfig
from recipes.prefix_recovery import events
from recipes.prefix_recovery.plan import Plan

POLL_S = 0.1
OBJECT_STORE_BYTES = 200 << 20


class Job:
    """One life's plane and leaders. Use as a context manager; leaving it ends everything it started."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = EngineSpec(plan.engine, {"device": "auto"})
        self.tokens: dict[CallIdentity, int] = {}
        self.resumptions: list[Resumption] = []
        began = time.time()
        self.plane = _launch(plan)
        events.emit(events.Cluster(seconds=time.time() - began, processes=1 + self.plane.config.units))
        gpus = 1 if ray.cluster_resources().get("GPU", 0) >= plan.leaders else 0
        self.leaders = [Leader.start(self.plane, self.engine, num_gpus=gpus) for _ in range(plan.leaders)]
        self._leaders_began = time.time()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for leader in self.leaders:
            leader.kill()
        self.plane.close()

    @property
    def client(self) -> DataPlaneClient:
        return self.plane.client()

    async def fingerprint(self) -> Mapping[str, Any]:
        """What shapes this job's data, as its loaded engine says."""
        return asdict(await self.leaders[0].worker.ready.remote())

    def leader_of(self, index: int) -> Leader:
        return self.leaders[index % len(self.leaders)]

    async def engines_ready(self) -> None:
        async def ready(index: int, leader: Leader) -> None:
            await leader.worker.ready.remote()
            events.emit(events.EngineReady(leader=index, seconds=time.time() - self._leaders_began))

        await asyncio.gather(*(ready(i, leader) for i, leader in enumerate(self.leaders)))

    async def requests(self, rollout: str) -> list[GenerationRequest]:
        """The job's calls, their prompts encoded by the engine."""
        worker = self.leaders[0].worker
        prompts = await asyncio.gather(*(worker.encode.remote(call.prompt) for call in self.plan.calls))
        return [
            GenerationRequest(
                identity=CallIdentity(rollout, call.id),
                prompt_ids=prompt,
                max_tokens=self.plan.max_tokens,
                temperature=self.plan.temperature,
                top_p=self.plan.top_p,
                seed=call.seed,
            )
            for call, prompt in zip(self.plan.calls, prompts, strict=True)
        ]

    async def run(
        self,
        phase: str,
        calls: Sequence[Callable[[], Awaitable[Completion]]],
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> list[Completion]:
        """Run ``calls`` to their ends as ``phase``, reporting what they generate; ``beside`` runs along with them."""

        async def follow(call: Callable[[], Awaitable[Completion]]) -> Completion:
            completion = await call()
            events.emit(
                events.Finished(
                    phase=phase,
                    call=completion.identity.call_id,
                    tokens=completion.tokens,
                    reason=completion.finish_reason,
                    at=time.time(),
                )
            )
            return completion

        events.emit(events.Phase(name=phase, state="start"))
        watching = asyncio.create_task(self._watch(phase))
        companion = asyncio.create_task(beside()) if beside is not None else None
        try:
            completions = await asyncio.gather(*(follow(call) for call in calls))
            if companion is not None:
                await companion
        finally:
            for task in filter(None, (watching, companion)):
                task.cancel()
            await self._report_progress(phase)
        events.emit(events.Phase(name=phase, state="end"))
        return completions

    async def _watch(self, phase: str) -> None:
        while True:
            await self._report_progress(phase)
            await asyncio.sleep(POLL_S)

    async def _report_progress(self, phase: str) -> None:
        taken = await asyncio.gather(*(leader.worker.take_progress.remote() for leader in self.leaders))
        for index, (steps, resumptions) in enumerate(taken):
            for resumption in resumptions:
                self.resumptions.append(resumption)
                self._report_resumption(resumption)
            made = [step for step in steps if step.tokens]
            for step in made:
                for identity, count in step.tokens.items():
                    self.tokens[identity] = self.tokens.get(identity, 0) + count
            if made:
                plain = [[s.began, s.ended, {c.call_id: n for c, n in s.tokens.items()}] for s in made]
                events.emit(events.Tokens(phase=phase, leader=index, steps=plain))

    def _report_resumption(self, resumption: Resumption) -> None:
        call = resumption.identity.call_id
        if resumption.refusal is not None:
            events.emit(events.Refused(call=call, reason=resumption.refusal.reason))
        elif resumption.chunks:
            events.emit(events.Chain(call=call, tokens=resumption.tokens, at=resumption.at, keys=resumption.chunks))

    async def save_rows(self, completions: Sequence[Completion], path: Path) -> None:
        """Read finished rows from the plane and write them as one safetensors file."""
        batch = self.client.get(TRAIN, [c.key for c in completions], ["ids", "logprobs"])
        tensors: dict[str, NDArray[Any]] = {}
        for completion, (_, row) in zip(completions, batch.rows(), strict=True):
            for field, values in row.items():
                tensors[f"{completion.identity.call_id}/{field}"] = np.array(values)
        save_file(tensors, path, {"fingerprint": events.to_json(await self.fingerprint())})


def _launch(plan: Plan) -> DataPlane:
    """A plane on a Ray of its own, or on the cluster that the plan names."""
    if plan.address:
        ray.init(address=plan.address, log_to_driver=False)
        return DataPlane.launch(PlaneConfig(unit_placement="here"), name=f"prefix-recovery-{secrets.token_hex(4)}")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    options = {
        "address": "local",
        "num_cpus": plan.leaders,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": plan.temp_dir,
        "log_to_driver": False,
    }
    return DataPlane.launch(PlaneConfig(), ray_options=options)
