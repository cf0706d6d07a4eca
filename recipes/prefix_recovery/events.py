"""What a job driver tells: one JSON object a line on its standard output, each a dataclass here.

Rules: a line is pure ASCII and ends with a newline; ``event`` names the class, ``t`` is the Unix time (seconds) at
which the event was made; all other times are Unix seconds too. `parse` takes only what `to_line` can have written: an
unknown event, an unknown or missing field or a value of another type is a `WireError` that quotes the line. Cost:
some 10 µs a line, a few lines a second.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

from policies.errors import WireError

REFERENCE: Final = "reference"
CUT: Final = "cut"
RESUME: Final = "resume"
PHASES: Final = (REFERENCE, CUT, RESUME)

_QUOTED = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a life of the job."""

    t: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(Event):
    """``name``, one of `PHASES`, has reached its ``state``: ``"start"`` or ``"end"``."""

    name: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster(Event):
    """The plane is up, ``seconds`` after it was asked for, with so many actors."""

    seconds: float
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady(Event):
    """The engine of ``leader`` has loaded its model, ``seconds`` after it was asked to."""

    leader: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens(Event):
    """Engine steps of ``leader`` that generated something, each ``[began, ended, {call: new tokens}]``.

    Tokens of a prefix that an engine merely consumes again are not among them.
    """

    phase: str
    leader: int
    steps: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Event):
    """Cut ``index`` (from 0) of all active calls: how many are durable, the others by reason, its measurements, and
    the tokens of each durable call's whole chain."""

    index: int
    began: float
    ended: float
    durable: int
    failures: Mapping[str, int]
    numbers: Mapping[str, float]
    prefix_tokens: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Event):
    """A checkpoint was published at ``at``; saving took ``seconds`` and wrote ``bytes``."""

    path: str
    seconds: float
    bytes: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(Event):
    """The plane holds a checkpoint's rows again, after ``seconds``."""

    seconds: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain(Event):
    """The chain of ``call`` was read and verified at ``at``: ``tokens`` in ``keys`` chunks."""

    call: str
    tokens: int
    at: float
    keys: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Event):
    """The chain of ``call`` was not trusted; the call is regenerated from its prompt."""

    call: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """``call`` has ended with ``tokens`` in all, for ``reason``: ``"stop"`` or ``"length"``."""

    phase: str
    call: str
    tokens: int
    reason: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics(Event):
    """Counts of a whole life, at its end: GETs in which its coalescers read chains; and the versions of what ran."""

    get_calls: int
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Error(Event):
    """The life ends, because of ``message``; ``kind`` is the class of the error."""

    message: str
    kind: str


_NAMES: Final[Mapping[type[Event], str]] = {
    Phase: "phase",
    Cluster: "cluster",
    EngineReady: "engine_ready",
    Tokens: "tokens",
    Cut: "cut",
    Checkpoint: "checkpoint",
    Restored: "restored",
    Chain: "chain",
    Refused: "refused",
    Finished: "finished",
    Statistics: "statistics",
    Error: "error",
}
_CLASSES: Final[Mapping[str, type[Event]]] = {name: cls for cls, name in _NAMES.items()}


def to_json(value: Any) -> str:
    """Compact JSON in one ASCII line; a number that JSON cannot say is a `ValueError`."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def to_line(event: Event) -> str:
    """The line, newline included, that `parse` turns into an equal event."""
    return to_json({"event": _NAMES[type(event)], **dataclasses.asdict(event)}) + "\n"


_output: TextIO = sys.stdout


def reserve_output() -> None:
    """Keep standard output for events: what else this process writes to it, or a library it uses, goes to standard
    error from now on."""
    global _output
    _output = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def emit(event: Event) -> None:
    """Write the event and flush it. A reader that has gone is a `BrokenPipeError`."""
    _output.write(to_line(event))
    _output.flush()


def parse(line: str) -> Event:
    """The event of one line. Raises `WireError` that says what is wrong and quotes the line's start."""
    try:
        plain = json.loads(line)
    except ValueError as error:
        raise _malformed(line, f"it is not JSON ({error})") from error
    if not isinstance(plain, dict) or str(plain.get("event")) not in _CLASSES:
        raise _malformed(line, f'it must be an object whose "event" is one of {", ".join(sorted(_CLASSES))}')
    cls = _CLASSES[str(plain.pop("event"))]
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, value in plain.items():
        if name not in fields:
            raise _malformed(line, f"{cls.__name__} has no field {name!r}")
        if not _fits(name, str(fields[name].type), value):
            raise _malformed(line, f"field {name!r} is {value!r:.60}; it must be {fields[name].type}")
    missing = [n for n, f in fields.items() if n not in plain and (n == "t" or not _has_default(f))]
    if missing:
        raise _malformed(line, f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**plain)


def _has_default(declared: dataclasses.Field[Any]) -> bool:
    return declared.default is not dataclasses.MISSING or declared.default_factory is not dataclasses.MISSING


def _malformed(line: str, why: str) -> WireError:
    return WireError(f"the job driver wrote a line that is no event: {why}. The line: {line.rstrip()[:_QUOTED]!r}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _is_step(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and _is_number(value[0])
        and _is_number(value[1])
        and value[0] <= value[1]
        and isinstance(value[2], dict)
        and all(_is_whole(n) and n >= 0 for n in value[2].values())
    )


_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "str": lambda value: isinstance(value, str),
    "int": _is_whole,
    "int | None": lambda value: value is None or _is_whole(value),
    "float": _is_number,
    "Mapping[str, int]": lambda value: isinstance(value, dict) and all(map(_is_whole, value.values())),
    "Mapping[str, float]": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "Mapping[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
    "Sequence[Sequence[Any]]": lambda value: isinstance(value, list) and all(map(_is_step, value)),
}
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {"phase": PHASES, "name": PHASES, "state": ("start", "end")}


def _fits(name: str, kind: str, value: Any) -> bool:
    return _CHECKS[kind](value) and (name not in _WORDS or value in _WORDS[name])
