"""The Ray on which all systems run, with one object store: each has its servers there, and as many client processes.

Guarantees: a system is started when it is first asked for and then stays; all of it, Ray too, ends when a system is
asked for in another ``period``. So what is done first in a period is done cold, also by the object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import psutil
import ray
import ray.exceptions

from recipes.bench.scenario import CheckFailed
from recipes.bench.servers import limit_peer_threads, local_ray
from recipes.bench.storage.footprint import Footprint, processes
from recipes.bench.storage.side import StorageSide
from recipes.bench.storage.worker import Worker

PATIENCE_S: Final = 300.0


class System:
    """The servers ``side`` and ``clients`` processes. ``idle``: its footprint before it stored anything.

    ``others``: the systems that run already, whose units may have the same title.
    """

    def __init__(self, side: StorageSide, clients: int, others: Iterable[System]) -> None:
        actor: Any = ray.remote(num_cpus=0)(Worker)
        self.side = side
        theirs = [unit for other in others for unit in other._units]
        self._units: list[psutil.Process] = [
            process for process in processes(side.unit_processes) if process not in theirs
        ]
        if not self._units:
            raise CheckFailed(f"no process {side.unit_processes!r} was started, so memory cannot be measured")
        self._workers = [actor.remote(number, side.connect, side.address) for number in range(clients)]
        self.each("ready")
        self.idle = self.footprint()

    def footprint(self) -> Footprint:
        return Footprint.of(self._units)

    def each(self, method: str, *arguments: Any) -> list[Any]:
        """Have every process do something, all at once: the answers."""
        return _answers([getattr(worker, method).remote(*arguments) for worker in self._workers])

    def one(self, method: str, *arguments: Any) -> Any:
        """Have one process do something."""
        return _answers([getattr(self._workers[0], method).remote(*arguments)])[0]

    def empty(self) -> None:
        """Clear all rows that were prepared and wait until they are gone."""
        self.each("clear")
        self.side.settle()

    def close(self) -> None:
        for worker in self._workers:
            ray.kill(worker)
        self.side.close()


@dataclass(frozen=True, slots=True)
class Period:
    """What runs at a time: ``name`` tells it from others, ``clients`` processes of each system, the store's bytes."""

    name: str
    clients: int
    store_bytes: int


class Cluster:
    """``makers``: what starts each system's servers, by its name. Nothing is started before it is needed."""

    def __init__(self, makers: Mapping[str, Callable[[], StorageSide]]) -> None:
        self._makers = makers
        self._period: Period | None = None
        self._running = ExitStack()
        self._systems: dict[str, System] = {}

    def system(self, name: str, period: Period) -> System:
        if period != self._period:
            self.close()
            limit_peer_threads()
            self._running.enter_context(local_ray(object_store_memory=period.store_bytes))
            self._period = period
        if name not in self._systems:
            side = self._makers[name]()
            with ExitStack() as starting:
                starting.callback(side.close)
                self._systems[name] = System(side, period.clients, self._systems.values())
                starting.pop_all()
            self._running.callback(self._systems[name].close)
        return self._systems[name]

    def close(self) -> None:
        self._systems.clear()
        self._period = None
        self._running.close()


def _answers(asked: list[Any]) -> list[Any]:
    try:
        return ray.get(asked, timeout=PATIENCE_S)
    except ray.exceptions.GetTimeoutError:
        raise CheckFailed(f"a client process has not answered for {PATIENCE_S:g} s") from None
    except ray.exceptions.RayError as error:
        raise CheckFailed(f"a client process failed:\n{error}") from error
