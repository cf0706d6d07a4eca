"""Figures: medians with their ranges, and ratios that know which way is better."""

from __future__ import annotations

from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.bench.record import Record, advantage
from recipes.bench.scenario import REGRAFT, TRANSFERQUEUE, Metric

SECONDS, RATE = Metric("wall_s", "s"), Metric("rows_per_s", "rows/s", lower_is_better=False)
values = st.floats(1e-9, 1e9)


@given(st.lists(values, min_size=1, max_size=20))
def test_a_record_holds_the_median_the_range_and_the_number_of_runs(runs: list[float]) -> None:
    record = Record.of("write/1024/256", REGRAFT, SECONDS, runs)
    assert (record.median, record.min, record.max, record.runs) == (median(runs), min(runs), max(runs), len(runs))
    assert record.family == "write"


@given(values, values)
def test_an_advantage_above_one_is_better_whichever_way_is_better(ours: float, theirs: float) -> None:
    for metric, wins in ((SECONDS, ours < theirs), (RATE, ours > theirs)):
        mine, yours = Record.of("a", REGRAFT, metric, [ours]), Record.of("a", TRANSFERQUEUE, metric, [theirs])
        ratio = advantage(mine, yours)
        assert ratio is not None and (ratio > 1) == (wins and ratio != 1)
        assert advantage(yours, mine) == pytest.approx(1 / ratio)


def test_nothing_is_a_multiple_of_zero() -> None:
    mine, yours = Record.of("a", REGRAFT, SECONDS, [0.0]), Record.of("a", TRANSFERQUEUE, SECONDS, [1.0])
    assert advantage(mine, yours) is None
