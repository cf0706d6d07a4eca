"""The in-process scenarios: what is done in one repetition, whichever system does it.

Every run leaves as many rows behind as it found: what it made it removes, what it removed it puts back, with the clock
stopped.
"""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from recipes.bench.child import Child
from recipes.bench.controller.rows import BLOCK_ROWS, Columns, RowMaker
from recipes.bench.controller.subject import Subject

CLEARED_TOGETHER: Final = 16
"""Rows of one removal."""

FILLED_TOGETHER: Final = 16
"""Publications that are prepared at once to fill a subject."""

MakeSubject = Callable[[], Subject]


def fill(subject: Subject, maker: RowMaker, rows: int) -> None:
    """Publish so many new rows, some blocks at a time, so that little is prepared at once."""
    batches = maker.batches(rows, BLOCK_ROWS)
    while some := list(islice(batches, FILLED_TOGETHER)):
        subject.publish(some)


def _split(keys: Sequence[str], size: int) -> list[Sequence[str]]:
    return [keys[at : at + size] for at in range(0, len(keys), size)]


class _Filled:
    """A subject in which ``live`` rows live."""

    def __init__(self, subject: Subject, columns: Columns, live: int) -> None:
        self.subject, self.live = subject, live
        self.maker = RowMaker(columns)
        fill(subject, self.maker, live)
        subject.check_rows(live)

    def close(self) -> None:
        self.subject.close()


class CycleRun(_Filled):
    """Rows are created, published, looked up and tagged, one at a time."""

    def __init__(self, subject: Subject, columns: Columns, live: int, cycles: int) -> None:
        super().__init__(subject, columns, live)
        self._cycles = cycles

    def run(self) -> Mapping[str, float]:
        batches = [self.maker.batch(1) for _ in range(self._cycles)]
        seconds = self.subject.cycle(batches)
        self.subject.check(batches, tagged=True)
        self.subject.clear([[key for rows in batches for key in rows.keys]])
        self.subject.check_rows(self.live)
        return {"cycle_s": seconds / self._cycles}


class PublishRun(_Filled):
    """Batches of new rows are published."""

    def __init__(self, subject: Subject, columns: Columns, live: int, rows: int, publications: int) -> None:
        super().__init__(subject, columns, live)
        self._rows, self._publications = rows, publications

    def run(self) -> Mapping[str, float]:
        batches = [self.maker.batch(self._rows) for _ in range(self._publications)]
        seconds = self.subject.publish(batches)
        self.subject.check(batches, tagged=False)
        self.subject.clear([[key for rows in batches for key in rows.keys]])
        self.subject.check_rows(self.live)
        return {"publish_s": seconds / self._publications}


class RemovalRun(_Filled):
    """Rows of one jagged field are cleared, `CLEARED_TOGETHER` of them at a time.

    Those of one removal lie next to each other in one publication; or, if ``scattered``, are any of those that live.
    """

    def __init__(self, subject: Subject, live: int, removals: int, scattered: bool) -> None:
        super().__init__(subject, Columns(fields=1, jagged=1), live)
        self._removals, self._scattered = removals, scattered
        self._blocks = _split([f"rollout-{number}" for number in range(live)], BLOCK_ROWS)
        self._draw = random.Random(0)

    def run(self) -> Mapping[str, float]:
        count = -(-self._removals * CLEARED_TOGETHER // BLOCK_ROWS)
        if self._scattered:
            keys = [key for block in self._blocks for key in block]
            self._draw.shuffle(keys)
            self._blocks = _split(keys, BLOCK_ROWS)
        chosen = self._draw.sample(self._blocks, min(count, len(self._blocks)))
        groups = [group for block in chosen for group in _split(block, CLEARED_TOGETHER)]
        self._draw.shuffle(groups)
        seconds = self.subject.clear(groups)
        self.subject.check_rows(self.live - sum(map(len, groups)))
        put_back = [self.maker.again(tuple(block)) for block in chosen]
        self.subject.publish(put_back)
        self.subject.check(put_back, tagged=False)
        self.subject.check_rows(self.live)
        return {"removal_s": seconds / len(groups)}


class MemoryRun:
    """By how much a process grows when rows come into it: its resident memory, so that what a tensor or an array holds
    counts as what an object does. Each run is a process of its own, in which some rows live already."""

    def __init__(self, make: MakeSubject, columns: Columns, live: int) -> None:
        self._make, self._columns, self._live = make, columns, live

    def run(self) -> Mapping[str, float]:
        child = Child("memory", _weigh, self._make, self._columns, self._live)
        child.close()
        return {"row_bytes": child.first / self._live}

    def close(self) -> None:
        """Its processes ended with each run."""


def _weigh(make: MakeSubject, columns: Columns, live: int) -> Generator[int, Any, None]:
    subject = make()
    maker = RowMaker(columns)
    already = BLOCK_ROWS * FILLED_TOGETHER
    fill(subject, maker, already)
    before = _resident_bytes()
    fill(subject, maker, live)
    grown = _resident_bytes() - before
    subject.check_rows(already + live)
    yield grown


def _resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
