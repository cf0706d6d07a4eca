"""The rate of decoding around a cut against the rate before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.prefix_recovery.decode_rate import Step, decode_during_cut, ratios_without_cut


def steady(leader: int, begin: float, count: int, period: float, calls: int) -> list[Step]:
    """``count`` steps without gaps, each giving every call a token."""
    tokens = {f"c{leader}.{i}": 1 for i in range(calls)}
    return [Step(leader, begin + i * period, begin + (i + 1) * period, tokens) for i in range(count)]


@given(
    period=st.floats(0.005, 0.7),
    offset=st.floats(0, 0.7),
    calls=st.integers(1, 8),
    leaders=st.integers(1, 3),
    cuts=st.lists(st.tuples(st.floats(4, 16), st.floats(0, 0.5)), min_size=1, max_size=3),
)
def test_a_constant_rate_gives_one(
    period: float, offset: float, calls: int, leaders: int, cuts: list[tuple[float, float]]
) -> None:
    """Wherever the cuts fall and however coarse the steps are: step boundaries do not quantise the ratio."""
    steps = [step for i in range(leaders) for step in steady(i, offset + 0.1 * i, int(20 / period) + 2, period, calls)]
    assert decode_during_cut(steps, [(at, at + long) for at, long in cuts]) == pytest.approx(1.0, abs=1e-6)


@given(share=st.floats(0, 1), middle=st.floats(3, 6))
def test_a_pause_costs_its_share_of_the_window(share: float, middle: float) -> None:
    """Nothing decoded during ``share`` of the second around the cut leaves 1 - ``share``."""
    pause = (middle - share / 2, middle + share / 2)
    steps = [Step(0, middle - 3, pause[0], {"c": 300}), Step(0, pause[1], middle + 3, {"c": 300})]
    before = 300 / (pause[0] - middle + 3)
    after = 300 / (middle + 3 - pause[1])
    expected = ((pause[0] - middle + 0.5) * before + (middle + 0.5 - pause[1]) * after) / before
    assert decode_during_cut(steps, [(middle, middle)]) == pytest.approx(expected, abs=1e-6)


@given(st.floats(0.01, 0.5))
def test_a_kill_inside_the_window_does_not_count_against_the_cut(seen: float) -> None:
    """A window that ends early is judged by its rate."""
    steps = [Step(0, 0.0, 5.0 + seen, {"c": 1000})]
    assert decode_during_cut(steps, [(5.0, 5.0)]) == pytest.approx(1.0)


def test_a_stalled_engine_shows() -> None:
    """One step that takes as long as ten makes the cut's second slow."""
    steps = [*steady(0, 0, 45, 0.1, 4), Step(0, 4.5, 5.5, {"c": 4}), *steady(0, 5.5, 10, 0.1, 4)]
    assert decode_during_cut(steps, [(5.0, 5.0)]) == pytest.approx(0.1)


def test_steps_of_no_length_count_once() -> None:
    steps = [Step(0, t / 10, t / 10, {"c": 1}) for t in range(100)]
    assert decode_during_cut(steps, [(5.05, 5.05)]) == pytest.approx(1.0)


def test_without_a_cut_or_without_steps_there_is_no_ratio() -> None:
    assert decode_during_cut(steady(0, 0, 10, 1, 1), []) is None
    assert decode_during_cut([], [(1.0, 2.0)]) is None
    assert decode_during_cut(steady(0, 10, 5, 1, 1), [(5.0, 5.0)]) is None


@given(period=st.floats(0.01, 0.4), leaders=st.integers(1, 3), calls=st.integers(1, 4))
def test_a_steady_run_without_cuts_gives_one_everywhere(period: float, leaders: int, calls: int) -> None:
    steps = [step for i in range(leaders) for step in steady(i, 5.0, int(10 / period) + 1, period, calls)]
    ratios = ratios_without_cut(steps)
    assert len(ratios) >= 15
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-6)


def test_moments_at_which_a_call_begins_or_ends_are_left_out() -> None:
    """Two calls for ten seconds, then one: only windows that see one set of calls are compared."""
    steps = [*steady(0, 0.0, 100, 0.1, 2), *steady(0, 10.0, 100, 0.1, 1)]
    assert ratios_without_cut(steps) == pytest.approx([1.0] * len(ratios_without_cut(steps)), abs=1e-6)
    assert 25 <= len(ratios_without_cut(steps)) <= 38


def test_a_slow_second_shows() -> None:
    steps = [*steady(0, 0.0, 50, 0.1, 1), *steady(0, 5.0, 5, 0.2, 1), *steady(0, 6.0, 50, 0.1, 1)]
    ratios = ratios_without_cut(steps)
    assert min(ratios) == pytest.approx(0.5, abs=0.01) and max(ratios) == pytest.approx(2.0, abs=0.01)


def test_no_steps_tell_nothing() -> None:
    assert ratios_without_cut([]) == []
