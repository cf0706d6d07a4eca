"""How fast engines decode."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.decode_meter import STEPS, DecodeMeter


@given(st.integers(1, 50), st.floats(0.001, 2.0), st.integers(2, 60), st.floats(0, 100), st.floats(0, 100))
def test_a_steady_engine_has_one_rate_wherever_it_is_looked_at(
    tokens: int, step_s: float, steps: int, begin: float, length: float
) -> None:
    meter = DecodeMeter()
    for number in range(steps):
        meter.note(number * step_s, tokens)
    rate = meter.rate(begin, begin + length)
    assert rate is None or rate == pytest.approx(tokens / step_s, rel=1e-6)


def test_there_is_no_rate_without_a_step_or_without_the_beginning_of_the_first() -> None:
    meter = DecodeMeter()
    assert meter.rate(0.0, 9.0) is None
    meter.note(1.0, 5)
    assert meter.rate(0.0, 9.0) is None
    meter.note(3.0, 6)
    assert meter.rate(1.0, 2.9) is None
    assert meter.rate(2.0, 3.0) == 3.0


def test_old_steps_are_forgotten() -> None:
    meter = DecodeMeter()
    for number in range(STEPS + 2):
        meter.note(float(number), 1)
    assert meter.rate(2.0, 5.0) == 1.0 and meter.rate(1.0, 5.0) is None
