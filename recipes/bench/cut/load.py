"""What is staged, the same for every system, and the runner that has a side do it.

A call's tokens are a function of its number, so whatever comes back can be checked against it. Of a chain of several
cuts every cut stages an equal part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.bench.child import Child, Serve
from recipes.bench.scenario import CheckFailed

ROUTES: Final = (48, 8)
"""Layers and experts per token whose indices a mixture-of-experts model is resumed with, int16."""

CHECKED_CALLS: Final = 16


@dataclass(frozen=True, slots=True)
class Load:
    """``calls`` calls of ``tokens`` tokens on ``coordinators`` coordinators, staged by ``cuts`` cuts, at most
    ``rows_per_put`` rows in one PUT. ``padded``: regraft stages as many bytes per token as the peer."""

    calls: int
    coordinators: int
    tokens: int
    rows_per_put: int
    cuts: int = 1
    routes: bool = False
    padded: bool = False

    @property
    def rows(self) -> int:
        return self.calls * self.cuts

    @property
    def puts(self) -> int:
        """PUTs that are needed in all when a coordinator's calls fill them."""
        return -(-(self.calls // self.coordinators) // self.rows_per_put) * self.coordinators * self.cuts

    def span(self, cut: int) -> tuple[int, int]:
        """The tokens of each call that ``cut`` stages, from and to."""
        return cut * self.tokens // self.cuts, (cut + 1) * self.tokens // self.cuts

    def ids(self, call: int, cut: int) -> NDArray[np.int32]:
        first, last = self.span(cut)
        return np.arange(call + first, call + last, dtype=np.int32)

    def checked(self) -> range:
        """Numbers of the calls that are read back after every run."""
        return range(0, self.calls, max(1, self.calls // CHECKED_CALLS))


@dataclass(frozen=True, slots=True)
class Staged:
    """What a side answers: how long its cuts took in all and each row on average waited, PUTs, and bytes of memory that
    the staging process used at most beyond what it held before."""

    wall_s: float
    row_wait_s: float
    puts: int
    peak_bytes: int


class CutRun:
    """A side in a process of its own; see `recipes.bench.scenario.Runner`."""

    def __init__(self, name: str, serve: Serve, load: Load) -> None:
        self._load = load
        self._child = Child(name, serve, load)

    def run(self) -> Mapping[str, float]:
        staged: Staged = self._child.ask()
        if staged.puts < self._load.puts:
            raise CheckFailed(f"{staged.puts} PUTs were made, {self._load.puts} are needed: rows are missing")
        return {
            "wall_s": staged.wall_s,
            "rows_per_s": self._load.rows / staged.wall_s,
            "row_wait_s": staged.row_wait_s,
            "puts": float(staged.puts),
            "peak_bytes": float(staged.peak_bytes),
        }

    def close(self) -> None:
        self._child.close()


class PeakMemory:
    """Most resident memory of this process between `begin` and `end`, beyond that at `begin` (Linux)."""

    def begin(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5): the high-water mark begins anew
        self._before = _status("VmRSS")

    def end(self) -> int:
        return max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise CheckFailed(f"/proc/self/status has no {name}; peak memory can be measured on Linux only")


class Waits:
    """Rows by how long they waited for their acknowledgement."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._began = clock, 0.0
        self._rows, self._sum, self.puts = 0, 0.0, 0

    def begin(self) -> None:
        self._began = self._clock()

    def acknowledged(self, rows: int) -> None:
        self.puts += 1
        self._rows += rows
        self._sum += rows * (self._clock() - self._began)

    def mean(self) -> float:
        return self._sum / max(1, self._rows)


def require_same(call: int, found: Any, expected: NDArray[np.int32]) -> None:
    if not np.array_equal(np.asarray(found).reshape(-1), expected):
        raise CheckFailed(f"call {call} was read back otherwise than it was staged")
