"""The record: what is known of a run after each event."""

from __future__ import annotations

from recipes.prefix_recovery import events
from tests import recorded_run
from tests.recorded_run import START


def test_lives_know_when_they_began_were_ready_and_ended() -> None:
    first, second = recorded_run.record().lives
    assert (first.started, first.engines_ready, first.ended, first.killed) == (START, START + 10, START + 27, 15)
    assert (second.engines_ready, second.killed) == (START + 40, None)


def test_tokens_are_counted_by_phase_and_call() -> None:
    record = recorded_run.record()
    assert record.tokens("reference") == {"c0": 8, "c1": 8, "c2": 8}
    assert record.tokens("cut") == {"c0": 7, "c1": 7, "c2": 7}
    assert record.tokens("resume") == {"c0": 3, "c1": 3, "c2": 3}
    assert record.first_resumed_token() == START + 41
    assert record.last_time() == START + 49


def test_a_refused_call_has_no_prefix_and_is_regenerated() -> None:
    """Also when its chain had been read before it was refused."""
    record = recorded_run.record(refuse="c1")
    assert [record.prefix(call) for call in recorded_run.CALLS] == [5, None, 5]
    assert record.regenerated() == ["c1"]
    record.add(events.Refused(call="c2", reason="versions"))
    assert record.prefix("c2") is None
    assert record.regenerated() == ["c1", "c2"]


def test_a_phase_runs_until_its_end_is_told() -> None:
    record = recorded_run.record()
    assert record.phases["reference"] == (START + 10, START + 18)
    assert record.phases["cut"] == (START + 20, None)
