"""The live view: plain lines where there is no terminal, bars where there is one."""

from __future__ import annotations

import io

from rich.console import Console

from recipes.prefix_recovery.live_view import LiveView
from recipes.prefix_recovery.record import Record
from tests import recorded_run


def watch(console: Console, refuse: str = "") -> None:
    """Show a whole run on a clock that follows its events."""
    now, record = recorded_run.START, Record()
    with LiveView(recorded_run.plan(), record, console, now=lambda: now) as view:
        record.begin_life("first", now)
        for event in [*recorded_run.first_life(), *recorded_run.second_life(30, refuse)]:
            now = event.t if event.t < recorded_run.START + 1000 else now
            record.add(event)
            view.show(event)
        view.say("the end")


def test_without_a_terminal_every_happening_is_one_plain_line() -> None:
    stream = io.StringIO()
    watch(Console(file=stream, width=40), refuse="c1")
    text = stream.getvalue()
    for words in (
        "0 reference, uninterrupted: begins",
        "cut 1: 3 calls durable, 9 tokens, in 0.200 s, decoding goes on, 1 failed: no_tokens",
        "checkpoint published in 0.50 s",
        "6 rows in 0.25 s",
        "call c0: prefix of 5 tokens read and verified (2 chunks)",
        "call c1: prefix refused (digest)",
        "3/3 calls ended, 24 tokens, 3 tokens/s",
        "the end",
    ):
        assert words in text
    assert "\x1b" not in text
    assert all(line.startswith("[") for line in text.splitlines())


def test_progress_is_told_every_few_seconds_not_every_step() -> None:
    stream = io.StringIO()
    watch(Console(file=stream, width=200))
    steps = len(recorded_run.record().steps["reference"])
    assert 1 <= stream.getvalue().count("0 reference, uninterrupted: ") - 2 < steps / 3


def test_on_a_terminal_there_is_a_bar_for_each_phase() -> None:
    stream = io.StringIO()
    watch(Console(file=stream, width=160, force_terminal=True))
    text = stream.getvalue()
    for words in ("0 reference, uninterrupted", "1 the same calls, to be cut", "2 regrown after the restart", "cut 2"):
        assert words in text
    assert "━" in text
