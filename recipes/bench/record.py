"""A figure of a report: one scenario, one system, one metric, over all repetitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from recipes.bench.scenario import Metric


@dataclass(frozen=True, slots=True)
class Record:
    """``median``, ``min`` and ``max`` of ``runs`` repetitions, in ``unit``."""

    scenario: str
    system: str
    metric: str
    unit: str
    median: float
    min: float
    max: float
    runs: int
    lower_is_better: bool

    @classmethod
    def of(cls, scenario: str, system: str, metric: Metric, values: Sequence[float]) -> Record:
        """The record of at least one value."""
        return cls(
            scenario=scenario,
            system=system,
            metric=metric.name,
            unit=metric.unit,
            median=median(values),
            min=min(values),
            max=max(values),
            runs=len(values),
            lower_is_better=metric.lower_is_better,
        )

    @property
    def family(self) -> str:
        return self.scenario.partition("/")[0]

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)


def advantage(ours: Record, theirs: Record) -> float | None:
    """How many times better ``ours`` is than ``theirs``, by their medians; below 1 it is worse.

    None where a median of zero allows no ratio.
    """
    better, worse = (theirs.median, ours.median) if ours.lower_is_better else (ours.median, theirs.median)
    return better / worse if worse else None
