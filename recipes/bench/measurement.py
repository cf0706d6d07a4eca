"""Measuring one scenario: all systems in turn, again and again, so that the machine's moods hit them alike.

Rules: every runner is made ready before the first is measured; each runs once uncounted; then in every repetition each
runs once, and the one that begins changes from repetition to repetition. While one runs, the others are idle. Runners
are closed in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

from recipes.bench.record import Record
from recipes.bench.scenario import CheckFailed, Runner, Scenario

T = TypeVar("T")


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The items in their order, beginning with another one for each ``by``."""
    start = by % len(items) if items else 0
    return [*items[start:], *items[:start]]


def measure(scenario: Scenario, repetitions: int, progress: Callable[[str], None]) -> list[Record]:
    """The records of a scenario, system by system. ``progress`` hears what is about to begin.

    Raises `CheckFailed` naming scenario and system when one of them does not do its work.
    """
    values: dict[str, list[Mapping[str, float]]] = {system: [] for system in scenario.systems}
    with ExitStack() as open_runners:
        runners: dict[str, Runner] = {}
        for system, make in scenario.systems.items():
            progress(f"{scenario.name}: {system}, set-up")
            runners[system] = _checked(scenario, system, make)
            open_runners.callback(runners[system].close)
        for system in runners if scenario.warm_up else ():
            progress(f"{scenario.name}: {system}, warm-up")
            _checked(scenario, system, runners[system].run)
        runs = scenario.runs(repetitions)
        for repetition in range(runs):
            for system in rotated(list(runners), repetition):
                progress(f"{scenario.name}: {system}, {repetition + 1} of {runs}")
                values[system].append(_checked(scenario, system, runners[system].run))
    return [
        Record.of(scenario.name, system, metric, [run[metric.name] for run in values[system]])
        for system in scenario.systems
        for metric in scenario.metrics
    ]


def _checked(scenario: Scenario, system: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except CheckFailed as failure:
        raise CheckFailed(f"{scenario.name}, {system}: {failure.message}") from failure
