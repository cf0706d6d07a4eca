"""A data-parallel leader as a user starts it: a generation worker with its coordinator and its coalescer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import ray

from actors.data_plane import DataPlane
from actors.engines.registry import EngineSpec
from actors.remote import CoalescerActor, CoordinatorActor, WorkerActor


@dataclass(frozen=True, slots=True)
class Leader:
    """Handles of one leader's actors."""

    worker: Any
    coordinator: Any
    coalescer: Any

    @classmethod
    def start(
        cls,
        plane: DataPlane,
        engine: EngineSpec,
        *,
        weight_version: int = 0,
        num_gpus: float = 0,
    ) -> Leader:
        """Start the three actors, with the plane's configuration; returns at once, while the engine is still loading.

        ``num_gpus`` is what Ray reserves for the engine's process. Coordinator and coalescer are processes of their
        own, so that tokens outlive the engine and prefixes are read while it loads.
        """
        coordinator = CoordinatorActor.remote(plane.address, plane.config.rollout_recovery)
        coalescer = CoalescerActor.remote(plane.address, plane.config.restore)
        leader = cls(None, coordinator, coalescer)
        return leader.with_new_worker(plane, engine, weight_version=weight_version, num_gpus=num_gpus)

    def with_new_worker(
        self, plane: DataPlane, engine: EngineSpec, *, weight_version: int = 0, num_gpus: float = 0
    ) -> Leader:
        """This leader with another worker in the place of one that died. Coordinator and coalescer stay: cut the
        coordinator's active calls and resume each as its next attempt, and it goes on from its own tokens."""
        worker = WorkerActor.options(num_gpus=num_gpus).remote(
            engine, plane.address, self.coordinator, self.coalescer, weight_version
        )
        return replace(self, worker=worker)

    def kill(self) -> None:
        """End the three processes at once."""
        for actor in (self.worker, self.coordinator, self.coalescer):
            ray.kill(actor)
