"""What a person sees while the job runs: bars on a terminal, plain lines anywhere else.

On a terminal each phase has a bar (calls, tokens, tokens/s) and what happens (cuts, kill, restore) scrolls above the
bars. Elsewhere the same happenings are lines, with one line of progress every few seconds. The view reads the
`Record` and changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from recipes.prefix_recovery import events
from recipes.prefix_recovery.decode_rate import Step
from recipes.prefix_recovery.events import CUT, REFERENCE, RESUME, Event
from recipes.prefix_recovery.plan import Plan
from recipes.prefix_recovery.record import Record

_TITLES: Final = {
    REFERENCE: "0 reference, uninterrupted",
    CUT: "1 the same calls, to be cut",
    RESUME: "2 regrown after the restart",
}
_LINE_EVERY_S = 5.0
_RATE_WINDOW_S = 3.0


class LiveView:
    """Use as a context manager. ``now`` is the clock (Unix seconds)."""

    def __init__(self, plan: Plan, record: Record, console: Console, now: Callable[[], float] = time.time) -> None:
        self._plan, self._record, self._console, self._now = plan, record, console, now
        self._began = now()
        self._last_line = self._began
        self._bars: dict[str, TaskID] = {}
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                TextColumn("{task.description:<28}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[state]}"),
                TimeElapsedColumn(),
                console=console,
            )

    def __enter__(self) -> LiveView:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str, style: str = "") -> None:
        """One line about something that has happened."""
        self._console.print(
            f"[{self._now() - self._began:6.1f} s] {text}", style=style, markup=False, highlight=False, soft_wrap=True
        )

    def show(self, event: Event) -> None:
        """Tell of an event that the record has just taken in."""
        match event:
            case events.Phase(name=name, state=state):
                self._phase(name, state)
            case events.Tokens(phase=phase):
                self._tokens(phase)
            case _:
                if text := _sentence(event):
                    self.say(*text)

    def _phase(self, name: str, state: str) -> None:
        self._last_line = self._now()
        if self._progress is None:
            self.say(f"{_TITLES[name]}: {'begins' if state == 'start' else self._state(name)}")
        elif state == "start":
            self._bars[name] = self._progress.add_task(_TITLES[name], total=self._expected(name), state="")
        elif name in self._bars:
            done = sum(self._record.tokens(name).values())
            self._progress.update(self._bars[name], total=done, completed=done, state=self._state(name))
            self._progress.stop_task(self._bars[name])

    def _tokens(self, phase: str) -> None:
        if self._progress is not None and phase in self._bars:
            done = sum(self._record.tokens(phase).values())
            self._progress.update(self._bars[phase], completed=done, state=self._state(phase))
        elif self._progress is None and self._now() - self._last_line >= _LINE_EVERY_S:
            self._last_line = self._now()
            self.say(f"{_TITLES[phase]}: {self._state(phase)}")

    def _expected(self, phase: str) -> int:
        """Tokens that the phase will generate at most; what the reference generated, once that is known."""
        known = self._record.finished.get(REFERENCE, {})
        total = sum(known[call.id].tokens if call.id in known else self._plan.max_tokens for call in self._plan.calls)
        prefixes = sum(chain.tokens for chain in self._record.chains.values()) if phase == RESUME else 0
        return max(1, total - prefixes)

    def _state(self, phase: str) -> str:
        counts, finished = self._record.tokens(phase), self._record.finished.get(phase, {})
        rate = _recent_rate(self._record.steps.get(phase, []))
        return (
            f"{len(finished)}/{len(self._plan.calls)} calls ended, {sum(counts.values())} tokens, {rate:.0f} tokens/s"
        )


def _recent_rate(steps: list[Step]) -> float:
    """Tokens a second over the last seconds that were reported."""
    if not steps:
        return 0.0
    end = max(step.ended for step in steps)
    recent = [step for step in steps if step.ended > end - _RATE_WINDOW_S]
    return sum(step.total for step in recent) / max(end - min(step.began for step in recent), 1e-3)


def _sentence(event: Event) -> tuple[str, str] | None:
    """What to say of the event, and in which style."""
    match event:
        case events.Cluster(seconds=seconds, processes=processes):
            return f"the plane is up: {processes} actors in {seconds:.1f} s", "dim"
        case events.EngineReady(leader=leader, seconds=seconds):
            return f"the engine of leader {leader} is loaded ({seconds:.1f} s)", "dim"
        case events.Cut(index=index, began=began, ended=ended, durable=durable, failures=failures):
            tokens = sum(event.prefix_tokens.values())
            bad = "".join(f", {count} failed: {reason}" for reason, count in failures.items())
            took = f"in {ended - began:.3f} s, decoding goes on"
            return f"cut {index + 1}: {durable} calls durable, {tokens} tokens, {took}{bad}", "yellow"
        case events.Checkpoint(path=path, seconds=seconds, bytes=size):
            return f"checkpoint published in {seconds:.2f} s, {size / 1e6:.2f} MB: {path}", "bold yellow"
        case events.Restored(seconds=seconds, rows=rows):
            return f"checkpoint restored from disk: {rows} rows in {seconds:.2f} s", "bold green"
        case events.Chain(call=call, tokens=tokens, keys=keys):
            return f"call {call}: prefix of {tokens} tokens read and verified ({keys} chunks)", "green"
        case events.Refused(call=call, reason=reason):
            return f"call {call}: prefix refused ({reason}); it is regenerated from its prompt", "bold red"
    return None
