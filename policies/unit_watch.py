"""What a reader thinks of each storage unit, from the reads that it has sent there.

- *well*: it is asked.
- *silent*: `SILENT_READS` reads are out to it for longer than reads take, and it has answered nothing since they left.
  It is asked nothing more until one of them ends.
- *down*: a read failed at it, and so did one that left after that failure. It is asked nothing until a probe, a read of
  one row that it owes, has come back. Probes leave `probe_after_s` apart, each interval twice the one before, up to
  `LONGEST_PROBE_INTERVALS` times the first.

Whatever a unit answers makes it well. Cost: O(1) per event; `avoided` O(reads out).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from policies.errors import RegraftError
from policies.read_queue import Name

SILENT_READS: Final = 2
LONGEST_PROBE_INTERVALS: Final = 8


@dataclass(slots=True, eq=False)
class _Down:
    """``probe``: the number of the probe that is out."""

    error: RegraftError
    row: Name
    interval_s: float
    next_probe: float
    probe: int | None = None


@dataclass(slots=True, eq=False)
class _Unit:
    """``owed``: reads that are out → when they left. ``struck``: reads below this number left before it failed."""

    owed: dict[int, float] = field(default_factory=dict)
    heard: float = float("-inf")
    struck: int | None = None
    down: _Down | None = None


class UnitWatch:
    def __init__(self, probe_after_s: float) -> None:
        self._probe_after_s = probe_after_s
        self._units: dict[str, _Unit] = {}

    def asked(self, unit: str, read: int, started: float) -> None:
        self._units.setdefault(unit, _Unit()).owed[read] = started

    def answered(self, unit: str, read: int, now: float) -> None:
        """The unit told something of a read: it is well."""
        state = self._units.setdefault(unit, _Unit())
        state.owed.pop(read, None)
        state.heard, state.struck, state.down = now, None, None

    def ended(self, unit: str, read: int) -> None:
        """A read to the unit is out no longer, and says nothing about it."""
        if unit in self._units:
            self._units[unit].owed.pop(read, None)

    def failed(self, unit: str, read: int, next_read: int, error: RegraftError, row: Name, now: float) -> None:
        """A read that was to bring ``row`` failed at the unit. ``next_read`` is the number of the next one to leave."""
        state = self._units.setdefault(unit, _Unit())
        state.owed.pop(read, None)
        if state.down is not None:
            return
        if state.struck is None:
            state.struck = next_read
        elif read >= state.struck:
            state.down = _Down(error, row, self._probe_after_s, now + self._probe_after_s)

    def down(self, unit: str) -> RegraftError | None:
        """Why the unit is down; None when it is not."""
        state = self._units.get(unit)
        return None if state is None or state.down is None else state.down.error

    def avoided(self, now: float, slow_s: float) -> frozenset[str]:
        """The units that are silent or down. A read is slow after ``slow_s``."""
        return frozenset(
            name for name, unit in self._units.items() if unit.down is not None or _silent(unit, now - slow_s)
        )

    def due_probe(self, now: float) -> tuple[str, Name, float] | None:
        """A unit whose probe is to leave, the row to probe it with, and how long it may take."""
        for name, unit in self._units.items():
            if unit.down is not None and unit.down.probe is None and unit.down.next_probe <= now:
                return name, unit.down.row, unit.down.interval_s
        return None

    def next_probe(self) -> float | None:
        """When the next probe is to leave."""
        waiting = [u.down.next_probe for u in self._units.values() if u.down is not None and u.down.probe is None]
        return min(waiting, default=None)

    def probing(self, unit: str, read: int) -> None:
        down = self._units[unit].down
        if down is not None:
            down.probe = read

    def probed(self, unit: str, read: int, back: bool, now: float) -> None:
        """A probe of the unit has ended; it counts unless the unit has been well meanwhile."""
        state = self._units[unit]
        if state.down is None or state.down.probe != read:
            return
        if back:
            state.struck, state.down = None, None
            return
        down = state.down
        down.probe = None
        down.interval_s = min(2 * down.interval_s, LONGEST_PROBE_INTERVALS * self._probe_after_s)
        down.next_probe = now + down.interval_s


def _silent(unit: _Unit, slow_before: float) -> bool:
    return sum(started <= slow_before and started >= unit.heard for started in unit.owed.values()) >= SILENT_READS
