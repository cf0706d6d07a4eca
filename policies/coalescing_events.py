"""What a coalescer is told and what it asks for; see `policies.coalescing` for what it makes of them.

Every `StartGet` is answered by any number of `GetPlaced` and `GetPart` and then one `GetDone` or `GetFailed` of its
number. Each event says when it happened, in the seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from policies.errors import RegraftError
from policies.row_cache import Row


class Source(NamedTuple):
    """Where rows are read: ``fields`` of rows of ``partition``. A read has one source."""

    partition: str
    fields: tuple[str, ...]


class Wish(NamedTuple):
    """A key, and what is known of its row: how many ``tokens`` and at least how many bytes it has (0: not known).
    ``again``: others will probably want it soon."""

    key: str
    tokens: int = 0
    nbytes: int = 0
    again: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """``caller`` is a number that was not used before; keys may repeat."""

    caller: int
    source: Source
    wishes: tuple[Wish, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Left:
    """The caller does not wait any more. Harmless when it has been answered."""

    caller: int
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class GetPlaced:
    """Read ``number`` is asking these units for these keys, except for the units that it avoids."""

    number: int
    units: Mapping[str, str]
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class GetPart:
    """A row or an error for some of the keys of read ``number``."""

    number: int
    rows: Mapping[str, Row]
    errors: Mapping[str, RegraftError]
    now: float


@dataclass(frozen=True, slots=True, eq=False)
class GetDone:
    """Read ``number`` has ended: a row or an error for each of its keys that no part has told of."""

    number: int
    rows: Mapping[str, Row]
    errors: Mapping[str, RegraftError]
    now: float


@dataclass(frozen=True, slots=True)
class GetFailed:
    """Read ``number`` failed as a whole, or what was left of it."""

    number: int
    error: RegraftError
    now: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    now: float


@dataclass(frozen=True, slots=True)
class Closed:
    now: float


Event = Wanted | Left | GetPlaced | GetPart | GetDone | GetFailed | TimerFired | Closed


@dataclass(frozen=True, slots=True)
class StartGet:
    """Read these keys, all different, within ``timeout_s``, and ask no unit of ``avoid``."""

    number: int
    source: Source
    keys: tuple[str, ...]
    avoid: frozenset[str]
    timeout_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """``rows`` in the order of the caller's keys, or the ``error`` it gets instead."""

    caller: int
    rows: tuple[Row, ...] = ()
    error: RegraftError | None = None


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `TimerFired` at ``at``, and in a later turn than this one even if that is now. Replaces an earlier timer."""

    at: float


Instruction = StartGet | Answer | SetTimer
