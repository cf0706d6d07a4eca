"""The one place where the plain classes of this package become Ray actors.

All of them mostly wait, so none but the engine's host reserves a CPU. Those that hold many calls open at once are
asyncio actors with room for all of them, so that a control method never queues behind running generations.
"""

from __future__ import annotations

from typing import Any

import ray

from actors.controller import PatchedController
from actors.cut_coordinator import CutCoordinator
from actors.generation_worker import GenerationWorker
from actors.read_coalescer import ReadCoalescer
from actors.storage_unit import StorageUnit

CALLS_AT_ONCE = 16_384
"""Concurrent method calls that an asyncio actor takes on; a leader may run this many generations at a time."""


def _actor(cls: type, **options: Any) -> Any:
    decorate: Any = ray.remote
    return decorate(**options)(cls)


ControllerActor = _actor(PatchedController, num_cpus=0)
UnitActor = _actor(StorageUnit, num_cpus=0)
CoordinatorActor = _actor(CutCoordinator, num_cpus=0, max_concurrency=CALLS_AT_ONCE)
CoalescerActor = _actor(ReadCoalescer, num_cpus=0, max_concurrency=CALLS_AT_ONCE)
WorkerActor = _actor(GenerationWorker, num_cpus=1, max_concurrency=CALLS_AT_ONCE)
