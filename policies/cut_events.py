"""What a cut transaction is told and what it asks for; see `policies.cut` for what it makes of them.

A `GoOn` is answered by one `GoneOn` as soon as everything else that waits had its turn, every `PackBatch` by one
`BatchPacked` or `PackFailed` of its number, every `PutBatch` by one `PutDone` or `PutFailed`, every `ClearKeys` by one
`ClearDone` or `ClearFailed`. Each event says when it happened, in the seconds of one clock.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.answers import PutAck
from policies.chunks import Frozen, Sent
from policies.receipts import Receipt


@dataclass(frozen=True, slots=True)
class Started:
    now: float


@dataclass(frozen=True, slots=True)
class GoneOn:
    now: float


@dataclass(frozen=True, slots=True)
class BatchPacked:
    """The batch is ready to be written. It is not to be kept unless the answer is its `PutBatch`."""

    number: int
    sent: Sent
    now: float


@dataclass(frozen=True, slots=True)
class PackFailed:
    number: int
    cause: str
    now: float


@dataclass(frozen=True, slots=True)
class PutDone:
    number: int
    ack: PutAck
    now: float


@dataclass(frozen=True, slots=True)
class PutFailed:
    """``in_doubt``: nobody knows whether the rows are stored, or will become visible later."""

    number: int
    cause: str
    in_doubt: bool
    now: float


@dataclass(frozen=True, slots=True)
class ClearDone:
    """``removed`` of the keys were there."""

    number: int
    removed: int
    now: float


@dataclass(frozen=True, slots=True)
class ClearFailed:
    number: int
    now: float


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The cut's deadline has come while nothing else happened (see `CutTransaction.deadline`)."""

    now: float


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Start no further write; undo what is not sealed."""

    now: float


Event = (
    Started
    | GoneOn
    | BatchPacked
    | PackFailed
    | PutDone
    | PutFailed
    | ClearDone
    | ClearFailed
    | DeadlinePassed
    | Interrupted
)


@dataclass(frozen=True, slots=True)
class GoOn:
    """There is more to do than may be done without giving tokens that arrive a turn."""


@dataclass(frozen=True, slots=True, eq=False)
class PackBatch:
    """Pack these chunks under these keys (`policies.chunks.pack`)."""

    number: int
    keys: tuple[str, ...]
    chunks: tuple[Frozen, ...]

    @property
    def nbytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class PutBatch:
    """Put what was packed for this number, in one PUT, into the staging partition."""

    number: int


@dataclass(frozen=True, slots=True)
class ClearKeys:
    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LeaveKeys:
    """Rows of one PUT that the cut could not clear for good: they are cleared after it, in the background.

    ``in_doubt``: they may become visible only later (see `policies.cleanup.Discard`).
    """

    keys: tuple[str, ...]
    in_doubt: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    receipt: Receipt


Instruction = GoOn | PackBatch | PutBatch | ClearKeys | LeaveKeys | Deliver
