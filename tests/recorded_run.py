"""A run written down by hand, second by second: what the record of a real one looks like, without running it.

Leader 0 has the calls c0 and c2, leader 1 has c1. Engines load from 0 to 10 s, the reference runs from 10 to 18 s with
one step a second, the cut run from 20 s on; cuts at 23 and 25 s, kill at 27 s, restart at 30 s, resumption at 41 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipes.prefix_recovery import events
from recipes.prefix_recovery.arguments import parse
from recipes.prefix_recovery.comparison import Comparison, RowComparison
from recipes.prefix_recovery.plan import Plan
from recipes.prefix_recovery.record import Record

START = 1_700_000_000.0
LENGTH = 8
CALLS = ("c0", "c1", "c2")


def plan() -> Plan:
    return parse(["--out", "out", "--calls", "3", "--max-tokens", "8", "--cut-after", "3", "--cut-gap", "2"]).plan


def comparison(different: str = "") -> Comparison:
    return Comparison(tuple(RowComparison(c, LENGTH, LENGTH, c != different, LENGTH, LENGTH - 1, 0.25) for c in CALLS))


def generation(phase: str, begin: float, tokens: int, calls: tuple[str, ...] = CALLS) -> Iterator[events.Event]:
    """One token for each call in every second from ``begin`` on."""
    for i in range(tokens):
        for leader in range(2):
            new = {call: 1 for call in calls if int(call[1:]) % 2 == leader}
            if new:
                step = [START + begin + i, START + begin + i + 1, new]
                yield events.Tokens(t=step[1], phase=phase, leader=leader, steps=[step])


def start(begin: float) -> Iterator[events.Event]:
    yield events.Cluster(t=START + begin + 3, seconds=3, processes=3)
    for leader in range(2):
        yield events.EngineReady(t=START + begin + 9 + leader, leader=leader, seconds=9 + leader)


def finished(phase: str, at: float) -> Iterator[events.Event]:
    for call in CALLS:
        yield events.Finished(t=START + at, phase=phase, call=call, tokens=LENGTH, reason="length", at=START + at)


def cut(index: int, at: float, tokens: int, failures: dict[str, int]) -> events.Cut:
    return events.Cut(
        index=index,
        began=START + at - 0.1,
        ended=START + at + 0.1,
        durable=3,
        failures=failures,
        numbers={"puts": 2, "rows": 3},
        prefix_tokens=dict.fromkeys(CALLS, tokens),
    )


def first_life() -> Iterator[events.Event]:
    yield from start(0)
    yield events.Phase(t=START + 10, name="reference", state="start")
    yield from generation("reference", 10, LENGTH)
    yield from finished("reference", 18)
    yield events.Phase(t=START + 18, name="reference", state="end")
    yield events.Phase(t=START + 20, name="cut", state="start")
    yield from generation("cut", 20, 3)
    yield cut(0, 23, 3, {"no_tokens": 1})
    yield from generation("cut", 23, 2)
    yield cut(1, 25, 5, {})
    yield events.Checkpoint(t=START + 26, path="checkpoint-00000001", seconds=0.5, bytes=10, at=START + 26)
    yield from generation("cut", 25, 2)


def second_life(begin: float, refuse: str = "") -> Iterator[events.Event]:
    yield events.Restored(t=START + begin + 4, seconds=0.25, rows=6)
    yield events.Phase(t=START + begin + 4, name="resume", state="start")
    for call in CALLS:
        at = START + begin + 5
        if call == refuse:
            yield events.Refused(t=at, call=call, reason="digest")
        else:
            yield events.Chain(t=at, call=call, tokens=5, at=at, keys=2)
    yield from start(begin)
    yield from generation("resume", begin + 10, 3, tuple(c for c in CALLS if c != refuse))
    if refuse:
        yield from generation("resume", begin + 10, LENGTH, (refuse,))
    yield from finished("resume", begin + 18)
    yield events.Phase(t=START + begin + 18, name="resume", state="end")
    yield events.Statistics(t=START + begin + 18, get_calls=2, versions={"ray": "0.0-recorded"})


def record(refuse: str = "", only_second: bool = False) -> Record:
    found = Record()
    if not only_second:
        found.begin_life("first", START)
        for event in first_life():
            found.add(event)
        found.end_life(START + 27, 15)
    found.begin_life("second", START + 30)
    for event in second_life(30, refuse):
        found.add(event)
    found.end_life(START + 49)
    return found
