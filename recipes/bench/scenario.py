"""What a benchmark measures: scenarios, and for each of them one runner per system.

A scenario says what is done; a runner does it in one system. The same work is done on both sides, and a runner checks
what came back: work that was answered wrongly is a `CheckFailed`, never a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from policies.errors import RegraftError

REGRAFT: Final = "regraft"
TRANSFERQUEUE: Final = "transferqueue"
PATCHED_TRANSFERQUEUE: Final = "transferqueue+patch"
REGRAFT_FRAMES: Final = "regraft-frames"
"""regraft without references to Ray's object store: all bytes travel in frames."""
MEMCPY: Final = "memcpy"
ZMQ_SOCKET: Final = "zmq-socket"
SYSTEMS: Final = (REGRAFT, REGRAFT_FRAMES, TRANSFERQUEUE, PATCHED_TRANSFERQUEUE, ZMQ_SOCKET, MEMCPY)
"""All that records may name, in the order in which tables and pictures show them."""


class CheckFailed(RegraftError):
    """A system did not do what the benchmark asked it to do, so there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` ends in its meaning, as in ``wall_s``; ``unit`` is ``"s"``, ``"bytes"`` or whatever is counted."""

    name: str
    unit: str
    lower_is_better: bool = True


class Runner(Protocol):
    """One system, made ready for one scenario when it is constructed."""

    def run(self) -> Mapping[str, float]:
        """Do the work once: the value of each of the scenario's metrics. Must leave the system as it was found."""

    def close(self) -> None:
        """End everything that was started."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """``name`` is ``family/size/…``; ``shows`` one line on what is timed. ``systems``: system → what makes its runner.

    ``warm_up``: a first run of each system is not counted. ``most_runs`` bounds the repetitions of a scenario whose
    figures hardly vary.
    """

    name: str
    shows: str
    metrics: tuple[Metric, ...]
    systems: Mapping[str, Callable[[], Runner]]
    warm_up: bool = True
    most_runs: int | None = None

    def runs(self, repetitions: int) -> int:
        return repetitions if self.most_runs is None else min(repetitions, self.most_runs)

    def steps(self, repetitions: int) -> int:
        """Set-ups and runs, the uncounted ones too: what a progress bar counts."""
        return len(self.systems) * (1 + self.warm_up + self.runs(repetitions))
