"""What several benchmarks start alike: a Ray of their own, and TransferQueue on it as its documentation recommends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import ray

RAY: Final = {"address": "local", "include_dashboard": False, "log_to_driver": False}
"""How a benchmark starts Ray: one of its own, whatever else runs on the machine."""
LOGICAL_CPUS: Final = 8
"""TransferQueue's controller and units ask Ray for one each, whatever the machine has."""
_THREADS: Final = 8


@contextmanager
def local_ray(**options: Any) -> Iterator[None]:
    """A Ray of this process's own, of `LOGICAL_CPUS`."""
    ray.init(**RAY, num_cpus=LOGICAL_CPUS, **options)
    try:
        yield
    finally:
        ray.shutdown()


def limit_peer_threads() -> None:
    """To as many as there are processors: it warns at every put that asks for more, and 8 are its default. To be called
    before it is imported; processes that are started later inherit it."""
    os.environ.setdefault("TQ_NUM_THREADS", str(min(_THREADS, os.cpu_count() or 1)))


@contextmanager
def transfer_queue_servers() -> Iterator[None]:
    """Its controller and its default of two storage units, and this process's client of them."""
    limit_peer_threads()
    import transfer_queue

    transfer_queue.init()
    try:
        yield
    finally:
        transfer_queue.close()
