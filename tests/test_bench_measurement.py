"""Interleaving: who runs when, what is counted, and that everything is closed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.bench.measurement import measure, rotated
from recipes.bench.scenario import CheckFailed, Metric, Scenario

SECONDS = Metric("wall_s", "s")


class Recorder:
    """A runner that writes down what happens to it; its n-th run takes n seconds."""

    def __init__(self, system: str, log: list[str], fails: bool = False) -> None:
        self._system, self._log, self._fails, self._runs = system, log, fails, 0
        log.append(f"make {system}")

    def run(self) -> Mapping[str, float]:
        self._log.append(self._system)
        if self._fails:
            raise CheckFailed("a row is missing")
        self._runs += 1
        return {"wall_s": float(self._runs)}

    def close(self) -> None:
        self._log.append(f"close {self._system}")


def scenario(log: list[str], systems: str, fails: str = "", **options: object) -> Scenario:
    makers: dict[str, Callable[[], Recorder]] = {s: partial(Recorder, s, log, s in fails) for s in systems}
    return Scenario("work/1", "some work", (SECONDS,), makers, **options)  # type: ignore[arg-type]


def test_systems_take_turns_and_each_repetition_begins_with_another_one() -> None:
    log: list[str] = []
    measure(scenario(log, "ab"), 3, lambda text: None)
    assert " ".join(log) == "make a make b a b a b b a a b close b close a"


@given(systems=st.sampled_from(["a", "ab", "abc"]), repetitions=st.integers(1, 12))
def test_every_system_is_first_equally_often_and_runs_once_per_repetition(systems: str, repetitions: int) -> None:
    orders = [rotated(systems, repetition) for repetition in range(repetitions)]
    assert all(sorted(order) == list(systems) for order in orders)
    firsts = [sum(order[0] == system for order in orders) for system in systems]
    assert max(firsts) - min(firsts) <= 1


def test_the_warm_up_is_not_counted() -> None:
    (record,) = measure(scenario([], "a"), 3, lambda text: None)
    assert (record.runs, record.min, record.median, record.max) == (3, 2.0, 3.0, 4.0)


def test_a_scenario_may_do_without_warm_up_and_bound_its_runs() -> None:
    (record,) = measure(scenario([], "a", warm_up=False, most_runs=2), 9, lambda text: None)
    assert (record.runs, record.min, record.max) == (2, 1.0, 2.0)


@given(st.integers(1, 9), st.sampled_from([None, 1, 4]), st.booleans())
def test_progress_hears_of_every_step(repetitions: int, most_runs: int | None, warm_up: bool) -> None:
    heard: list[str] = []
    planned = scenario([], "ab", warm_up=warm_up, most_runs=most_runs)
    measure(planned, repetitions, heard.append)
    assert len(heard) == len(set(heard)) == planned.steps(repetitions)


def test_a_failed_check_names_scenario_and_system_and_closes_all() -> None:
    log: list[str] = []
    with pytest.raises(CheckFailed, match="work/1, b: a row is missing"):
        measure(scenario(log, "ab", fails="b"), 3, lambda text: None)
    assert log[-2:] == ["close b", "close a"]


def test_what_was_made_is_closed_when_another_cannot_be_made() -> None:
    log: list[str] = []

    def broken() -> Recorder:
        raise CheckFailed("no port is free")

    with pytest.raises(CheckFailed, match="work/1, b: no port is free"):
        measure(
            Scenario("work/1", "", (SECONDS,), {"a": partial(Recorder, "a", log), "b": broken}), 1, lambda text: None
        )
    assert log == ["make a", "close a"]
