"""A process that writes and reads rows through a system's client; an actor of Ray, the same for every system.

Of every GET the lengths of all rows and one whole row are kept, another one each time, and compared when the clock has
stopped. All processes of a machine share `time.perf_counter`, so a begin can be agreed on and an end be compared.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.bench.scenario import CheckFailed
from recipes.bench.storage.load import Fields, Load, Reading
from recipes.bench.storage.side import StorageClient

_STEP: Final = 37
"""Between the places of the rows that are compared in one GET and the next."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What is kept of a GET."""

    key: str
    row: Fields
    lengths: Sequence[NDArray[Any]]


class Worker:
    """Process ``number``. It writes the rows that it owns and reads those of its neighbour.

    No method is a coroutine, or Ray would run all of them on an event loop of its own, where none may block.
    """

    def __init__(self, number: int, connect: Callable[[Any], StorageClient], address: Any) -> None:
        self._number = number
        self._client = connect(address)
        self._loop = asyncio.new_event_loop()
        self._puts: list[tuple[list[str], Any]] = []

    def ready(self) -> None:
        """Answered when the process has its client."""

    def prepare(self, load: Load) -> None:
        """Make what `write` puts."""
        self._puts = [(keys, self._client.batch(keys, fields)) for keys, fields in load.puts_of(self._number)]

    def write(self, begin: float) -> float:
        """PUT after PUT, from ``begin`` on: when the last was acknowledged."""
        _wait_until(begin)
        for keys, batch in self._puts:
            self._client.put(keys, batch)
        return time.perf_counter()

    def check(self, load: Load) -> None:
        """Read one row of each PUT that was written and compare it."""
        rows = load.rows_per_put
        for put, (keys, _) in enumerate(self._puts):
            key = keys[put * _STEP % rows]
            _compare(load, 1, self._sample([key], self._client.get([key]), 0))

    def read(self, load: Load, reading: Reading, begin: float) -> float:
        """All rows of the neighbour, from ``begin`` on: when the last had come."""
        gets = reading.gets(load.keys((self._number + 1) % load.clients))
        _wait_until(begin)
        if reading.in_flight == 1:
            samples = [self._look(keys, self._client.get(keys), reading, turn) for turn, keys in enumerate(gets)]
        else:
            samples = self._loop.run_until_complete(self._together(gets, reading))
        end = time.perf_counter()
        for keys, sample in zip(gets, samples, strict=True):
            _compare(load, len(keys), sample)
        return end

    def round_trips(self, load: Load, count: int) -> list[float]:
        """Seconds of GETs of one key, one after another."""
        seconds, samples, keys = [], [], load.keys(self._number)
        for turn in range(count):
            asked = [keys[turn * _STEP % len(keys)]]
            began = time.perf_counter()
            found = self._client.get(asked)
            seconds.append(time.perf_counter() - began)
            samples.append(self._sample(asked, found, 0))
        for sample in samples:
            _compare(load, 1, sample)
        return seconds

    def clear(self) -> None:
        for keys, _ in self._puts:
            self._client.clear(keys)

    def _together(self, gets: Sequence[list[str]], reading: Reading) -> Awaitable[list[Sample]]:
        places = asyncio.Semaphore(reading.in_flight)

        async def one(turn: int, keys: list[str]) -> Sample:
            async with places:
                return self._look(keys, await self._client.get_together(keys), reading, turn)

        async def every() -> list[Sample]:
            return await asyncio.gather(*(one(turn, keys) for turn, keys in enumerate(gets)))

        return every()

    def _look(self, keys: list[str], found: Any, reading: Reading, turn: int) -> Sample:
        if reading.touched:
            self._client.touch(found)
        return self._sample(keys, found, turn * _STEP % len(keys))

    def _sample(self, keys: list[str], found: Any, place: int) -> Sample:
        return Sample(keys[place], self._client.row(found, place), self._client.lengths(found))


def _wait_until(begin: float) -> None:
    time.sleep(max(0.0, begin - time.perf_counter()))


def _compare(load: Load, rows: int, sample: Sample) -> None:
    for lengths in sample.lengths:
        if len(lengths) != rows or (lengths != load.tokens).any():
            raise CheckFailed(f"a GET of {rows} rows of {load.tokens} tokens answered rows of lengths {lengths}")
    expected = load.row(sample.key)
    if sample.row.keys() != expected.keys():
        raise CheckFailed(f"row {sample.key} was read back with fields {sorted(sample.row)}")
    for name, values in expected.items():
        found = sample.row[name]
        if found.dtype != values.dtype or not np.array_equal(found, values):
            raise CheckFailed(f"{name} of row {sample.key} was read back otherwise than it was written")
