"""What is known of a run so far: the events of all lives, kept so that view, report and picture read the same facts.

`Record.add` is the only way in; it never fails and keeps what it is given. Times are Unix seconds. Cost: constant per
event, memory linear in engine steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.prefix_recovery import events
from recipes.prefix_recovery.decode_rate import Step
from recipes.prefix_recovery.events import RESUME, Event


@dataclass(slots=True)
class LifeRecord:
    """A life of the job: when it was started, when its engines were ready and when it ended, and how.

    ``killed`` is the number of processes that ended by SIGKILL, None while the life has not been killed.
    """

    name: str
    started: float
    engines_ready: float | None = None
    ended: float | None = None
    killed: int | None = None


@dataclass(slots=True)
class Record:
    """``phases``: begin and end (None while it runs) by name. ``steps`` and ``finished`` by phase. ``chains``,
    ``refusals`` by call."""

    lives: list[LifeRecord] = field(default_factory=list)
    phases: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    steps: dict[str, list[Step]] = field(default_factory=dict)
    finished: dict[str, dict[str, events.Finished]] = field(default_factory=dict)
    cuts: list[events.Cut] = field(default_factory=list)
    checkpoint: events.Checkpoint | None = None
    restored: events.Restored | None = None
    chains: dict[str, events.Chain] = field(default_factory=dict)
    refusals: dict[str, events.Refused] = field(default_factory=dict)
    statistics: list[events.Statistics] = field(default_factory=list)

    def begin_life(self, name: str, at: float) -> None:
        self.lives.append(LifeRecord(name, at))

    def end_life(self, at: float, killed: int | None = None) -> None:
        """``killed``: processes that SIGKILL ended; None when the life ended by itself."""
        self.lives[-1].ended, self.lives[-1].killed = at, killed

    def add(self, event: Event) -> None:
        match event:
            case events.Phase(name=name, state="start"):
                self.phases[name] = (event.t, None)
            case events.Phase(name=name):
                self.phases[name] = (self.phases.get(name, (event.t, None))[0], event.t)
            case events.EngineReady():
                self.lives[-1].engines_ready = event.t
            case events.Tokens(phase=phase, leader=leader, steps=steps):
                self.steps.setdefault(phase, []).extend(Step(leader, *step) for step in steps)
            case events.Cut():
                self.cuts.append(event)
            case events.Checkpoint():
                self.checkpoint = event
            case events.Restored():
                self.restored = event
            case events.Chain(call=call):
                self.chains[call] = event
            case events.Refused(call=call):
                self.refusals[call] = event
            case events.Finished(phase=phase, call=call):
                self.finished.setdefault(phase, {})[call] = event
            case events.Statistics():
                self.statistics.append(event)

    def tokens(self, phase: str) -> Mapping[str, int]:
        """New tokens of each call in the phase."""
        counts: dict[str, int] = {}
        for step in self.steps.get(phase, ()):
            for call, new in step.tokens.items():
                counts[call] = counts.get(call, 0) + new
        return counts

    def prefix(self, call: str) -> int | None:
        """Tokens of the prefix that the call was resumed with, None when it has none or it was refused."""
        chain = self.chains.get(call)
        return None if chain is None or call in self.refusals or not chain.tokens else chain.tokens

    def regenerated(self) -> list[str]:
        """Calls that started over from their prompts in the second life."""
        ran = {**self.tokens(RESUME), **self.finished.get(RESUME, {}), **self.refusals}
        return sorted(call for call in ran if self.prefix(call) is None)

    def first_resumed_token(self) -> float | None:
        """When the first new token of a resumed call was generated."""
        return min((step.ended for step in self.steps.get(RESUME, ()) if step.total), default=None)

    def last_time(self) -> float:
        """The latest moment known of."""
        lives = [t for life in self.lives for t in (life.started, life.ended) if t is not None]
        return max([*lives, *(step.ended for steps in self.steps.values() for step in steps)])
