"""The one place where the plain classes of this package become Ray actors.

All of them mostly wait, so none but the engine's host reserves a CPU. The worker has a lane of its own for control
methods, so that asking for progress or aborting a call never queues behind running generations.
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

ControllerActor: Any = ray.remote(num_cpus=0)(PatchedController)
UnitActor: Any = ray.remote(num_cpus=0)(StorageUnit)
CoordinatorActor: Any = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(CutCoordinator)
CoalescerActor: Any = ray.remote(num_cpus=0, max_concurrency=CALLS_AT_ONCE)(ReadCoalescer)
WorkerActor: Any = ray.remote(num_cpus=1, max_concurrency=CALLS_AT_ONCE)(GenerationWorker)
