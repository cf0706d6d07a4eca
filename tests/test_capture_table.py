"""Who is admitted, who takes whose place, and what is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calls import CallIdentity, StepDelta
from policies.capture_table import CaptureTable
from policies.errors import Refused
from tests.generated_tokens import tokens

CALL = CallIdentity("r0", "c0")
names = st.builds(CallIdentity, st.sampled_from(("r0", "r1")), st.sampled_from(("c0", "c1")), st.integers(0, 3))


def sealed(table: CaptureTable, identity: CallIdentity, chunks: int) -> tuple[str, ...]:
    """Admit a call and give it a chain."""
    capture = table.admit(identity, 0.0).capture
    for start in range(chunks):
        capture.observe(tokens(start, 1))
        frozen = capture.freeze()
        capture.seal(frozen, capture.new_key(), frozen.digest())
    return capture.keys


@given(st.lists(names, max_size=12))
def test_of_every_call_the_latest_attempt_is_active_and_no_chunk_is_forgotten(order: list[CallIdentity]) -> None:
    table, unneeded, given_out = CaptureTable(600.0), [], []
    for identity in order:
        latest = max((o for o in given_out if o.row_key == identity.row_key), default=None)
        if latest is not None and identity < latest:
            with pytest.raises(Refused, match=r"ended already|has taken its place"):
                table.admit(identity, 0.0)
            continue
        unneeded += table.admit(identity, 0.0).unneeded
        if identity not in given_out:
            sealed(table, identity, 2)
            given_out.append(identity)
    latest_of = {o.row_key: o for o in sorted(given_out)}
    assert set(table.active()) == set(latest_of.values())
    kept = [key for capture in table.captures() for key in capture.keys]
    assert sorted([*kept, *unneeded]) == sorted(o.chunk_key(i) for o in given_out for i in range(2))


def test_a_takeover_keeps_what_it_inherits() -> None:
    table = CaptureTable(600.0)
    first, second = sealed(table, CALL, 2)
    assert table.admit(CALL.next_attempt(), 0.0, [first]).unneeded == (second,)
    answer = table.acknowledge(CALL)
    assert (answer.reason, answer.cause) == ("unknown_call", "attempt 1 has taken its place")


def test_admitting_again_changes_nothing() -> None:
    table = CaptureTable(600.0)
    capture = table.admit(CALL, 0.0).capture
    again = table.admit(CALL, 0.0)
    assert again.capture is capture and again.unneeded == ()


@given(st.lists(st.floats(0, 100), max_size=12), st.floats(0, 50), st.integers(1, 6))
def test_evidence_is_kept_for_its_time_and_up_to_its_number(gaps: list[float], keep: float, most: int) -> None:
    table, now, ended = CaptureTable(keep, remembered=most), 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        identity = CallIdentity("r", f"c{number}")
        table.admit(identity, now).capture.observe(tokens(0, 2))
        assert table.finish(identity, "stop", now) == () == table.finish(identity, "stop", now)
        ended.append((identity, now))
    table.forget(now)
    expected = [identity for identity, at in ended[-most:] if at + keep >= now]
    assert [identity for identity, _ in ended if table.ended(identity) is not None] == expected
    for identity, _ in ended:
        answer = table.acknowledge(identity)
        assert answer.finish_reason == ("stop" if identity in expected else None)
        assert answer.reason == (None if identity in expected else "unknown_call")


@pytest.mark.parametrize("stranger", [CallIdentity("r1", "c0"), CallIdentity("r0", "c0", 4)])
def test_a_call_id_of_another_rollout_or_attempt_is_an_error_for_that_call(stranger: CallIdentity) -> None:
    table = CaptureTable(600.0)
    sealed(table, CALL, 1)
    answer = table.acknowledge(stranger)
    assert answer.reason == "wrong_identity" and "r0/c0@a0" in answer.cause
    assert table.acknowledge(CALL).reason is None


@pytest.mark.parametrize("reason", ["abort", "error", "", None])
def test_an_odd_end_is_counted_and_is_no_completion(reason: str | None) -> None:
    table = CaptureTable(600.0)
    sealed(table, CALL, 1)
    table.observe(StepDelta((), (), {CALL: reason}))  # type: ignore[dict-item]
    assert table.counts["unexpected_ends"] == 1
    answer = table.acknowledge(CALL)
    assert answer.finish_reason is None and "no completion" in answer.cause


def test_a_delta_fails_only_for_the_calls_it_is_about() -> None:
    table = CaptureTable(600.0)
    calls = [CallIdentity("r0", f"c{i}") for i in range(4)]
    for call in calls[:3]:
        table.admit(call, 0.0)
    good, bad = tokens(0, 1), tokens(-1, 1)
    poisoned = table.observe(StepDelta((calls[0], calls[1], calls[3]), (good, bad, good), {}))
    assert [capture.identity for capture in poisoned] == [calls[1]]
    assert table.observe(StepDelta((calls[0], calls[1]), (good,), {})) == (table.get(calls[0]), table.get(calls[1]))[:1]
    assert dict(table.counts) == {
        "steps": 2, "deltas_of_unknown_calls": 1, "poisoned": 2,
    }  # fmt: skip
    assert table.acknowledge(calls[2]).reason == "no_tokens"
