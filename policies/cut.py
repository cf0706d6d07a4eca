"""The cut: freeze, stage, validate, seal, for every call of an inventory, as a transaction without I/O.

Events go in, instructions come out; whoever runs it carries the instructions out and tells what became of them. Every
`StageBatch` is answered by one `PutDone` or `PutFailed` of its number, every `ClearKeys` by one `ClearDone` or
`ClearFailed`. The last instruction is one `Deliver`.

Rules:
1. A chunk is sealed only after the acknowledgement of its PUT was validated (key, bytes, checksum), and a key is in the
   receipt only when its chunk was sealed.
2. A row is put at most twice: in its batch, and alone when the whole batch failed. Each put has keys of its own.
3. What was written, or may have been, and was not sealed is cleared before the receipt is delivered.
4. Before every PUT the deadline is checked. Past it what waits rolls back; what is on its way may still be sealed.
5. A failure belongs to one call. Its tokens are live again, so the next cut has them.
6. A call may finish, abort or be poisoned at any moment; then its chunk is not sealed and its fate is its answer.

Costs: O(calls) to start; one copy and two passes over a batch's bytes when it is packed and checked. At most
`PUTS_IN_FLIGHT` batches are packed at a time, so memory does not grow with the number of calls.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from policies.answers import PutAck
from policies.batching import plan_batches
from policies.calls import CallIdentity
from policies.capture import CallCapture, CaptureTable, Frozen, State, sealed_prefix
from policies.chain import CHUNK_FIELDS
from policies.checksums import block_checksum
from policies.columns import Column
from policies.config import RolloutRecoveryConfig
from policies.receipts import (
    CONTROL_DEADLINE,
    CUT_ERROR,
    DURABLE_FAILURE,
    DURABLE_PREFIX,
    INTERRUPTED,
    NO_TOKENS,
    POISONED,
    UNKNOWN_CALL,
    WRONG_IDENTITY,
    Acknowledgement,
    Inventory,
    Receipt,
)

PUTS_IN_FLIGHT: Final = 2
"""While one batch is on its way the next is packed."""


@dataclass(frozen=True, slots=True)
class Started:
    now: float


@dataclass(frozen=True, slots=True)
class PutDone:
    number: int
    ack: PutAck
    now: float


@dataclass(frozen=True, slots=True)
class PutFailed:
    number: int
    cause: str
    now: float


@dataclass(frozen=True, slots=True)
class ClearDone:
    number: int
    now: float


@dataclass(frozen=True, slots=True)
class ClearFailed:
    """Whoever ran the clear keeps its keys and clears them later."""

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


Event = Started | PutDone | PutFailed | ClearDone | ClearFailed | DeadlinePassed | Interrupted


@dataclass(frozen=True, slots=True, eq=False)
class StageBatch:
    """Put these rows, in one PUT, into the staging partition."""

    number: int
    keys: tuple[str, ...]
    columns: Mapping[str, Column]
    tags: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class ClearKeys:
    number: int
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deliver:
    receipt: Receipt


Instruction = StageBatch | ClearKeys | Deliver


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A PUT on its way: ``chunks[i]`` under ``keys[i]``."""

    chunks: tuple[Frozen, ...]
    keys: tuple[str, ...]
    checksum: int
    alone: bool


class CutTransaction:
    """One cut of ``inventory`` over the calls of ``table``. Feed it `Started` first, and `DeadlinePassed` as soon as
    ``deadline`` is over while it has not delivered."""

    def __init__(self, inventory: Inventory, table: CaptureTable, config: RolloutRecoveryConfig) -> None:
        self._inventory, self._table, self._config = inventory, table, config
        self._answers: dict[CallIdentity, Acknowledgement] = {}
        self._waiting: deque[tuple[tuple[Frozen, ...], bool]] = deque()
        self._flights: dict[int, _Flight] = {}
        self._clears: set[int] = set()
        self._garbage: list[str] = []
        self._started_at = self.deadline = 0.0
        self._next_number = 0
        self._interrupted = self._delivered = False
        self._numbers: Counter[str] = Counter()
        self._longest_frozen = 0.0

    @property
    def interrupted(self) -> bool:
        return self._interrupted

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event and say what is to be done now. An answer to nothing that was asked is a `ValueError`."""
        match event:
            case Started(now):
                self._start(now)
            case PutDone(number, ack, now):
                self._settle(self._flight(number), ack, now)
            case PutFailed(number, cause, now):
                self._fail_batch(self._flight(number), cause, now)
            case ClearDone(number):
                self._cleared(number)
            case ClearFailed(number):
                self._cleared(number)
                self._numbers["clears_failed"] += 1
            case DeadlinePassed():
                pass  # what follows from the time is done after every event
            case Interrupted():
                self._interrupted = True
        return self._advance(event.now)

    def _start(self, now: float) -> None:
        self._started_at, self.deadline = now, now + self._config.control_timeout_s
        chunks: list[Frozen] = []
        for identity in dict.fromkeys(self._inventory.calls):
            capture = self._table.get(identity)
            frozen = capture.freeze() if capture is not None and capture.state is State.LIVE else None
            if frozen is None:
                self._answer(identity)
            else:
                chunks.append(frozen)
        config = self._config
        batches = plan_batches(
            chunks,
            config.generation_prefix_batch_size,
            config.generation_prefix_batch_max_tokens,
            config.generation_prefix_batch_max_bytes,
        )
        self._waiting.extend((batch, False) for batch in batches)

    def _advance(self, now: float) -> list[Instruction]:
        instructions: list[Instruction] = []
        if self._interrupted:
            self._give_up(INTERRUPTED, "the cut was interrupted before this call was written", now)
        if now > self.deadline:
            cause = f"{self._config.control_timeout_s:g} s had passed before this call could be written"
            self._give_up(CONTROL_DEADLINE, cause, now)
        while self._waiting and len(self._flights) < PUTS_IN_FLIGHT:
            chunks, alone = self._waiting.popleft()
            held = [(capture, chunk) for chunk in chunks if (capture := self._holder(chunk)) is not None]
            if held:
                instructions.append(self._stage(held, alone))
        if self._garbage:
            self._clears.add(self._next_number)
            instructions.append(ClearKeys(self._new_number(), tuple(self._garbage)))
            self._garbage.clear()
        if not (self._waiting or self._flights or self._clears or self._delivered):
            self._delivered = True
            instructions.append(Deliver(self._receipt(now)))
        return instructions

    def _stage(self, held: list[tuple[CallCapture, Frozen]], alone: bool) -> StageBatch:
        keys = tuple(capture.new_key() for capture, _ in held)
        chunks = tuple(chunk for _, chunk in held)
        lengths = [chunk.tokens for chunk in chunks]
        columns = {
            name: Column.jagged(np.concatenate([chunk.parts[name] for chunk in chunks]), lengths)
            for name in CHUNK_FIELDS
        }
        number = self._new_number()
        self._flights[number] = _Flight(chunks, keys, block_checksum(columns), alone)
        nbytes = sum(chunk.nbytes for chunk in chunks)
        self._numbers["puts"] += 1
        self._numbers["largest_put_bytes"] = max(self._numbers["largest_put_bytes"], nbytes)
        return StageBatch(number, keys, columns, tuple(map(_tags, chunks, keys)))

    def _settle(self, flight: _Flight, ack: PutAck, now: float) -> None:
        """Validate the acknowledgement of a PUT, then seal its calls."""
        if ack.checksum != flight.checksum or len(ack.keys) != len(ack.row_bytes):
            cause = f"unit {ack.unit!r} acknowledged other bytes than were sent (checksum or row count)"
            self._fail_batch(flight, cause, now)
            return
        stored = dict(zip(ack.keys, ack.row_bytes, strict=True))
        for chunk, key in zip(flight.chunks, flight.keys, strict=True):
            capture = self._holder(chunk)
            if capture is not None and stored.get(key) == chunk.nbytes and not self._interrupted:
                self._seal(capture, chunk, key, now)
                continue
            self._garbage.append(key)
            if self._interrupted:
                self._fail(chunk, INTERRUPTED, "the cut was interrupted before this call was sealed", now)
            else:
                cause = f"unit {ack.unit!r} acknowledged {stored.get(key)} bytes for {key!r}, not {chunk.nbytes}"
                self._fail(chunk, CUT_ERROR, cause, now)

    def _seal(self, capture: CallCapture, chunk: Frozen, key: str, now: float) -> None:
        capture.seal(chunk, key)
        self._longest_frozen = max(self._longest_frozen, now - self._started_at)
        self._numbers["rows"] += 1
        self._numbers["tokens"] += chunk.tokens
        self._numbers["bytes"] += chunk.nbytes
        self._answer(chunk.identity)

    def _fail_batch(self, flight: _Flight, cause: str, now: float) -> None:
        self._garbage += flight.keys
        for chunk in flight.chunks:
            if self._interrupted:
                self._fail(chunk, INTERRUPTED, "the cut was interrupted before this call was sealed", now)
            elif flight.alone:
                self._fail(chunk, CUT_ERROR, cause, now)
            else:
                self._numbers["rows_retried"] += 1
                self._waiting.append(((chunk,), True))

    def _give_up(self, reason: str, cause: str, now: float) -> None:
        """Roll back everything that waits."""
        for chunks, _ in self._waiting:
            for chunk in chunks:
                self._fail(chunk, reason, cause, now)
        self._waiting.clear()

    def _fail(self, chunk: Frozen, reason: str, cause: str, now: float) -> None:
        """The call gets its tokens back and ``reason`` for an answer, unless its fate has answered already."""
        capture = self._holder(chunk)
        if capture is not None:
            capture.roll_back(chunk)
            self._longest_frozen = max(self._longest_frozen, now - self._started_at)
            self._answers[chunk.identity] = _failure(chunk.identity, reason, cause)

    def _holder(self, chunk: Frozen) -> CallCapture | None:
        """The call, if it still waits for this chunk; when it does not, its fate is its answer."""
        capture = self._table.get(chunk.identity)
        if capture is not None and capture.holds(chunk):
            return capture
        self._answer(chunk.identity)
        return None

    def _answer(self, identity: CallIdentity) -> None:
        self._answers[identity] = acknowledge(self._table, identity)

    def _flight(self, number: int) -> _Flight:
        try:
            return self._flights.pop(number)
        except KeyError:
            raise ValueError(f"no PUT of number {number} is on its way") from None

    def _cleared(self, number: int) -> None:
        if number not in self._clears:
            raise ValueError(f"no clear of number {number} is on its way")
        self._clears.remove(number)

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _receipt(self, now: float) -> Receipt:
        acknowledgements = tuple(self._answers[identity] for identity in self._inventory.calls)
        numbers = dict.fromkeys(("puts", "rows", "tokens", "bytes", "largest_put_bytes", "rows_retried"), 0.0)
        numbers |= {name: float(count) for name, count in self._numbers.items()}
        numbers["calls"] = float(len(acknowledgements))
        numbers["longest_frozen_s"] = self._longest_frozen
        numbers["wall_s"] = now - self._started_at
        for disposition in (DURABLE_PREFIX, DURABLE_FAILURE):
            numbers[disposition] = float(sum(a.disposition == disposition for a in acknowledgements))
        for reason, count in Counter(a.reason for a in acknowledgements if a.reason is not None).items():
            numbers[f"failed_{reason}"] = float(count)
        numbers["terminal"] = float(sum(a.finish_reason is not None for a in acknowledgements))
        return Receipt(self._inventory.checkpoint_id, self._inventory.digest, acknowledgements, numbers)


def acknowledge(table: CaptureTable, identity: CallIdentity) -> Acknowledgement:
    """What can be said of a call for which nothing is being written.

    A call that finished and is stored elsewhere is a prefix with a finish reason and no keys: its tokens and digest
    say what it came to, and its row, not a chain, holds it.
    """
    capture, ended = table.get(identity), table.ended(identity)
    if capture is not None:
        if capture.state is State.POISONED:
            return _failure(identity, POISONED, capture.cause)
        if capture.keys:
            return sealed_prefix(capture)
        cause = f"none of its {capture.live_tokens} tokens can be cut yet" if capture.live_tokens else "not started"
        return _failure(identity, NO_TOKENS, f"{cause}; {capture.cause}" if capture.cause else cause)
    if ended is not None and ended.finish_reason is not None:
        return Acknowledgement(
            identity, DURABLE_PREFIX, tokens=ended.tokens, digest=ended.digest, finish_reason=ended.finish_reason
        )
    if ended is not None:
        return _failure(identity, UNKNOWN_CALL, "the call was aborted or superseded")
    others = table.others(identity)
    if others:
        known = ", ".join(map(str, others[:3]))
        return _failure(identity, WRONG_IDENTITY, f"this coordinator knows the call id as {known}")
    return _failure(identity, UNKNOWN_CALL, "this coordinator has never been told of the call")


def _failure(identity: CallIdentity, reason: str, cause: str) -> Acknowledgement:
    return Acknowledgement(identity, DURABLE_FAILURE, reason=reason, cause=cause)


def _tags(chunk: Frozen, key: str) -> dict[str, Any]:
    identity = chunk.identity
    return {
        "rollout_id": identity.rollout_id,
        "call_id": identity.call_id,
        "attempt": identity.attempt,
        "index": int(key.rpartition("#")[2]),
        "start": chunk.start,
        "tokens": chunk.tokens,
    }
