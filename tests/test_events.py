"""Events: what a driver writes is what the orchestrator reads, and nothing else is taken for an event."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import WireError
from recipes.prefix_recovery import events

ROOT = Path(__file__).resolve().parent.parent

texts = st.text(max_size=20)
counts = st.integers(0, 1 << 40)
seconds = st.floats(0, 1e10)
phases = st.sampled_from(events.PHASES)


@st.composite
def steps(draw: st.DrawFn) -> list[list[object]]:
    times = draw(st.tuples(seconds, seconds).map(sorted))
    return [[*times, draw(st.dictionaries(texts, counts, max_size=3))]]


all_events = st.one_of(
    st.builds(events.Phase, name=phases, state=st.sampled_from(("start", "end"))),
    st.builds(events.Cluster, seconds=seconds, processes=counts),
    st.builds(events.EngineReady, leader=counts, seconds=seconds),
    st.builds(events.Tokens, phase=phases, leader=counts, steps=steps()),
    st.builds(
        events.Cut,
        index=counts,
        began=seconds,
        ended=seconds,
        durable=counts,
        failures=st.dictionaries(texts, counts, max_size=3),
        numbers=st.dictionaries(texts, seconds, max_size=3),
        prefix_tokens=st.dictionaries(texts, counts, max_size=3),
    ),
    st.builds(events.Checkpoint, path=texts, seconds=seconds, bytes=counts, at=seconds),
    st.builds(events.Restored, seconds=seconds, rows=counts),
    st.builds(events.Chain, call=texts, tokens=counts, at=seconds, keys=counts),
    st.builds(events.Refused, call=texts, reason=texts),
    st.builds(events.Finished, phase=phases, call=texts, tokens=counts, reason=texts, at=seconds),
    st.builds(events.Statistics, get_calls=counts, versions=st.dictionaries(texts, texts, max_size=3)),
    st.builds(events.Error, message=texts, kind=texts),
)


@given(all_events)
def test_a_line_says_the_event_and_nothing_else(event: events.Event) -> None:
    """to_line and parse are inverse; a line is ASCII and holds no newline but its last character."""
    line = events.to_line(event)
    assert events.parse(line) == event
    assert line.isascii() and line.count("\n") == 1 and line.endswith("\n")


@given(all_events, st.data())
def test_an_event_without_one_of_its_values_is_refused(event: events.Event, data: st.DataObject) -> None:
    plain = json.loads(events.to_line(event))
    del plain[data.draw(st.sampled_from(sorted(plain)))]
    with pytest.raises(WireError):
        events.parse(json.dumps(plain))


@given(st.text(max_size=60))
def test_text_that_no_driver_wrote_is_an_error_that_quotes_it(text: str) -> None:
    with pytest.raises(WireError, match="no event"):
        events.parse(text)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"event":"party","t":1}', "Cluster|cluster"),
        ('{"event":"restored","t":1,"seconds":1,"rows":"two"}', "'rows' is 'two'"),
        ('{"event":"restored","t":1,"seconds":1,"rows":true}', "'rows' is True"),
        ('{"event":"restored","t":1,"seconds":Infinity,"rows":1}', "'seconds' is inf"),
        ('{"event":"restored","t":1,"seconds":1,"rows":1,"extra":2}', "no field 'extra'"),
        ('{"event":"restored","seconds":1,"rows":1}', "lacks t"),
        ('{"event":"phase","t":1,"name":"lunch","state":"start"}', "'name' is 'lunch'"),
        ('{"event":"tokens","t":1,"phase":"cut","leader":0,"steps":[[2,1,{}]]}', "'steps'"),
        ('{"event":"tokens","t":1,"phase":"cut","leader":0,"steps":[[1,2,{"c0":-1}]]}', "'steps'"),
        ('{"event":["cut"],"t":1}', "must be an object"),
    ],
)
def test_what_is_wrong_is_named(line: str, named: str) -> None:
    with pytest.raises(WireError, match=named):
        events.parse(line)


def test_reserved_output_carries_events_only() -> None:
    """What else is printed, by Python or by a library below it, goes to standard error."""
    script = """
import os, sys
from recipes.prefix_recovery import events
events.reserve_output()
print("from python", flush=True)
os.write(1, b"from below")
events.emit(events.Restored(seconds=1.0, rows=2, t=3.0))
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == '{"event":"restored","t":3.0,"seconds":1.0,"rows":2}\n'
    assert "from python" in ended.stderr and "from below" in ended.stderr
