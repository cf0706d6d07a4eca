"""What is restored, the same for every system, and the runner that has a side's workers do it.

A worker has calls of its own. In a mass resume it wants all of them at once; otherwise one after another at fixed
times, whether or not the ones before have come (an open loop): a restore's seconds count from the time at which it was
due. Workers begin at times spread evenly over the pause between two of their restores.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.bench.child import Child, Serve
from recipes.bench.scenario import CheckFailed

PER_REQUEST: Final = "per-request"
WINDOW: Final = "window"
NATURAL: Final = "natural"
MODES: Final = (PER_REQUEST, WINDOW, NATURAL)
WINDOW_S: Final = 0.002

ROWS_PER_READ: Final = 256
ROWS_PER_PUT: Final = 256


@dataclass(frozen=True, slots=True)
class Load:
    """``workers`` workers with ``restores`` calls each, of ``tokens`` tokens in ``chunks`` rows. ``pause_s``: between
    two restores of a worker; 0 is a mass resume."""

    mode: str
    workers: int
    restores: int
    tokens: int
    chunks: int = 1
    pause_s: float = 0.0

    @property
    def calls(self) -> int:
        return self.workers * self.restores

    def span(self, chunk: int) -> tuple[int, int]:
        """The tokens of each call that lie in ``chunk``, from and to."""
        return chunk * self.tokens // self.chunks, (chunk + 1) * self.tokens // self.chunks

    def ids(self, call: int) -> NDArray[np.int32]:
        return np.arange(call, call + self.tokens, dtype=np.int32)

    def calls_of(self, worker: int) -> range:
        return range(worker * self.restores, (worker + 1) * self.restores)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a process of workers answers: when they began and ended (`time.perf_counter`, which all processes of a
    machine share), the seconds of each restore, the reads that were sent and the keys in them."""

    began: float
    ended: float
    seconds: tuple[float, ...]
    gets: int
    keys: int


class RestoreRun:
    """A side: ``store`` begins the system and its rows and tells where they are, ``work`` is a process of workers.
    See `recipes.bench.scenario.Runner`."""

    def __init__(self, name: str, store: Serve, work: Serve, load: Load, processes: int) -> None:
        self._load = load
        with ExitStack() as starting:
            rows = Child(f"{name} rows", store, load)
            starting.callback(rows.close)
            self._children = []
            for first in range(min(processes, load.workers)):
                workers = range(first, load.workers, processes)
                child = Child(f"{name} workers {first}", work, load, rows.first, workers)
                starting.callback(child.close)
                self._children.append(child)
            self._started = starting.pop_all()

    def run(self) -> Mapping[str, float]:
        for child in self._children:
            child.tell(None)
        restored: list[Restored] = [child.answer() for child in self._children]
        seconds = np.concatenate([part.seconds for part in restored])
        if len(seconds) != self._load.calls:
            raise CheckFailed(f"{len(seconds)} of {self._load.calls} calls were restored")
        gets = sum(part.gets for part in restored)
        return {
            "wall_s": max(part.ended for part in restored) - min(part.began for part in restored),
            "p50_s": float(np.quantile(seconds, 0.5)),
            "p99_s": float(np.quantile(seconds, 0.99)),
            "gets": float(gets),
            "keys_per_get": sum(part.keys for part in restored) / gets,
        }

    def close(self) -> None:
        self._started.close()


Restore = Callable[[int], Awaitable[Any]]
"""Read a call's rows: its ids, or whatever the check takes."""


async def restore_all(
    load: Load, workers: Sequence[int], restore: Callable[[int], Restore]
) -> tuple[float, float, tuple[float, ...]]:
    """Have the workers restore their calls, each with its own ``restore(worker)``: begin, end, and seconds of each."""
    seconds: list[float] = []

    async def one(restore_call: Restore, call: int, due: float) -> None:
        await restore_call(call)
        seconds.append(time.perf_counter() - due)

    async def worker(number: int, began: float) -> None:
        restore_call, calls = restore(number), load.calls_of(number)
        tasks = []
        for place, call in enumerate(calls):
            due = began + load.pause_s * (place + number / load.workers)
            if due > time.perf_counter():
                await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(one(restore_call, call, due)))
        await asyncio.gather(*tasks)

    began = time.perf_counter()
    await asyncio.gather(*(worker(number, began) for number in workers))
    return began, time.perf_counter(), tuple(seconds)


def require_same(call: int, found: Any, expected: NDArray[np.int32]) -> None:
    if not np.array_equal(np.asarray(found).reshape(-1), expected):
        raise CheckFailed(f"call {call} was read back otherwise than it was written")
