"""What may be out at one peer: never more than the limits, and always something."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from policies.in_flight import InFlight


@given(st.lists(st.one_of(st.integers(0, 300), st.just("end"))))
def test_the_limits_hold_and_one_request_always_goes(steps: list[int | str]) -> None:
    window, out = InFlight(most_requests=3, most_bytes=200), []  # type: ignore[var-annotated]
    for step in steps:
        if isinstance(step, str):
            if out:
                window.release(out.pop(0))
        elif window.take(step):
            out.append(step)
        else:
            assert len(out) == 3 or sum(out) + step > 200
            assert out, "a lone request always goes"
        assert len(out) <= 3 and (len(out) <= 1 or sum(out) <= 200)
        assert (window.requests, window.nbytes) == (len(out), sum(out))
