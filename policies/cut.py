"""The cut: freeze, stage, validate, seal, for every call of an inventory, as a transaction without I/O.

Events go in, instructions come out (`policies.cut_events`); whoever runs it carries the instructions out and tells what
became of them. The last instruction is one `Deliver`.

Rules:
1. A call is frozen just before its batch is packed, so it waits for one batch to be written and not for all of them.
2. A chunk is sealed only after the acknowledgement of its PUT was validated (key, bytes, checksum), and a key is in the
   receipt only when its chunk was sealed.
3. A row is put at most twice: in its batch, and alone when the whole batch failed. Each put has keys of its own.
4. What was written, or may have been, and was not sealed is cleared before the receipt is delivered. When nobody knows
   whether it was written and the clear found nothing, it is left to be cleared again: it may become visible later.
5. The deadline is checked before every PUT, retries included, and after packing. Past it what waits rolls back; what is
   on its way may still be sealed.
6. A failure belongs to one call. Its tokens are live again, so the next cut has them.
7. A call may finish, abort or be poisoned at any moment; then its chunk is not sealed and its fate is its answer.

Costs: O(`ROWS_AT_ONCE`) per event, O(calls) for the receipt; nothing here touches a token. At most `PUTS_IN_FLIGHT`
batches are packed at a time, so memory does not grow with the number of calls.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Final, NamedTuple

from policies.answers import PutAck
from policies.batching import Batching
from policies.calls import CallIdentity
from policies.capture import CallCapture
from policies.capture_table import CaptureTable, standing
from policies.chain import ChainDigest
from policies.chunks import Frozen, Sent
from policies.config import RolloutRecoveryConfig
from policies.cut_events import (
    BatchPacked,
    ClearDone,
    ClearFailed,
    ClearKeys,
    DeadlinePassed,
    Deliver,
    Event,
    GoneOn,
    GoOn,
    Instruction,
    Interrupted,
    LeaveKeys,
    PackBatch,
    PackFailed,
    PutBatch,
    PutDone,
    PutFailed,
    Started,
)
from policies.receipts import (
    CONTROL_DEADLINE,
    CUT_ERROR,
    DURABLE_FAILURE,
    DURABLE_PREFIX,
    INTERRUPTED,
    Acknowledgement,
    Inventory,
    Receipt,
    failure,
)

PUTS_IN_FLIGHT: Final = 2
"""While one batch is on its way the next is packed."""

ROWS_AT_ONCE: Final = 32
"""Rows that are frozen or sealed before new tokens get their turn, well below a millisecond."""

_COUNTS: Final = (
    "puts", "rows", "tokens", "bytes", "largest_put_bytes", "rows_retried", "puts_in_doubt", "clears_failed",
)  # fmt: skip


class _Row:
    """A frozen chunk on its way through the cut, beside the call that waits for it."""

    __slots__ = ("capture", "chunk", "frozen_at", "identity", "layout", "nbytes", "tokens")

    def __init__(self, capture: CallCapture, chunk: Frozen, frozen_at: float) -> None:
        self.capture, self.chunk, self.frozen_at = capture, chunk, frozen_at
        self.identity, self.layout = chunk.identity, chunk.layout
        self.tokens, self.nbytes = chunk.tokens, chunk.nbytes

    @property
    def is_held(self) -> bool:
        """Whether the call still waits for the chunk; when it does not, its fate is its answer."""
        return self.capture.holds(self.chunk)


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch under way: ``rows[i]`` under ``keys[i]``. ``sent`` is set when it was packed and its PUT began."""

    rows: tuple[_Row, ...]
    keys: tuple[str, ...]
    alone: bool
    sent: Sent | None = None


class _Stored(NamedTuple):
    """A row that is written and may be sealed, unless ``fault`` says what is wrong with it."""

    row: _Row
    key: str
    digest: ChainDigest
    fault: str | None


class CutTransaction:
    """One cut of ``inventory`` over the calls of ``table``. Feed it `Started` first, and `DeadlinePassed` as soon as
    ``deadline`` is over while it has not delivered."""

    def __init__(
        self,
        inventory: Inventory,
        table: CaptureTable,
        config: RolloutRecoveryConfig,
        rows_at_once: int = ROWS_AT_ONCE,
    ) -> None:
        self._inventory, self._table, self._config = inventory, table, config
        self._rows_at_once, self._rows_left, self._going_on = rows_at_once, 0, False
        self._unreached = deque(dict.fromkeys(inventory.calls))
        self._batching: Batching[_Row] = Batching(
            config.generation_prefix_batch_size,
            config.generation_prefix_batch_max_tokens,
            config.generation_prefix_batch_max_bytes,
        )
        self._alone: deque[_Row] = deque()
        self._answers: dict[CallIdentity, Acknowledgement] = {}
        self._flights: dict[int, _Flight] = {}
        self._stored: deque[_Stored] = deque()
        self._clears: dict[int, tuple[tuple[str, ...], bool]] = {}  # keys, and whether they are in doubt
        self._garbage: list[str] = []
        self._doubtful: list[tuple[str, ...]] = []
        self._started_at = self.deadline = 0.0
        self._next_number = 0
        self.interrupted = self._delivered = False
        self._numbers: Counter[str] = Counter()
        self._longest_unsealed = 0.0

    @property
    def sealed_rows(self) -> int:
        return self._numbers["rows"]

    def handle(self, event: Event) -> list[Instruction]:
        """Take an event and say what is to be done now. An answer to nothing that was asked is a `ValueError`."""
        now, instructions = event.now, list[Instruction]()
        match event:
            case Started():
                self._started_at, self.deadline = now, now + self._config.control_timeout_s
                self._table.forget(now)
            case GoneOn():
                self._going_on = False
            case BatchPacked(number, sent):
                instructions += self._begin_put(number, sent, now)
            case PackFailed(number, cause):
                self._fail_batch(self._landed(number, written=False), cause, now)
            case PutDone(number, ack):
                self._validate(self._landed(number, written=True), ack, now)
            case PutFailed(number, cause, in_doubt):
                flight = self._landed(number, written=True)
                self._throw_away(flight.keys, in_doubt)
                self._fail_batch(flight, cause, now)
            case ClearDone(number, removed):
                keys, in_doubt = self._cleared(number)
                if in_doubt and not removed:
                    instructions.append(LeaveKeys(keys, in_doubt=True))
            case ClearFailed(number):
                keys, in_doubt = self._cleared(number)
                self._numbers["clears_failed"] += 1
                instructions.append(LeaveKeys(keys, in_doubt))
            case Interrupted():
                self.interrupted = True
            case DeadlinePassed():
                pass  # what follows from the time is done after every event
        return instructions + self._advance(now)

    def _advance(self, now: float) -> list[Instruction]:
        if self._ending(now) is not None:
            self._give_up(now)
        self._rows_left = self._rows_at_once
        self._settle(now)
        instructions: list[Instruction] = []
        while len(self._flights) < PUTS_IN_FLIGHT and (batch := self._next_batch(now)) is not None:
            number = self._new_number()
            self._flights[number] = batch
            instructions.append(PackBatch(number, batch.keys, tuple(row.chunk for row in batch.rows)))
        instructions += self._start_clears()
        more = self._stored or (self._unreached and len(self._flights) < PUTS_IN_FLIGHT)
        if more and not self._going_on:
            self._going_on = True
            instructions.append(GoOn())
        if not (self._flights or self._stored or self._clears or self._going_on or self._delivered):
            self._delivered = True
            instructions.append(Deliver(self._receipt(now)))
        return instructions

    def _next_batch(self, now: float) -> _Flight | None:
        """Freeze calls until a batch is full. Rows that go alone come after all others."""
        while (found := self._next_rows(now)) is not None:
            rows, alone = found
            held = tuple(row for row in rows if row.is_held)
            for row in rows if len(held) < len(rows) else ():
                self._answer(row.identity)
            if held:
                return _Flight(held, tuple(row.capture.new_key() for row in held), alone)
        return None

    def _next_rows(self, now: float) -> tuple[tuple[_Row, ...], bool] | None:
        while self._unreached:
            if not self._rows_left:
                return None
            self._rows_left -= 1
            row = self._freeze(self._unreached.popleft(), now)
            batch = None if row is None else self._batching.add(row)
            if batch is not None:
                return batch, False
        batch = self._batching.rest()
        if batch is not None:
            return batch, False
        return ((self._alone.popleft(),), True) if self._alone else None

    def _freeze(self, identity: CallIdentity, now: float) -> _Row | None:
        capture = self._table.get(identity)
        if capture is not None and capture.cuttable_tokens:
            return _Row(capture, capture.freeze(), now)
        self._answer(identity)
        return None

    def _begin_put(self, number: int, sent: Sent, now: float) -> list[Instruction]:
        """The batch is packed: write it, unless the time for that is over."""
        flight = self._flights.get(number)
        if flight is None or flight.sent is not None:
            raise ValueError(f"no batch of number {number} is being packed")
        ending = self._ending(now)
        if ending is not None:
            del self._flights[number]
            for row in flight.rows:
                self._fail(row, *ending, now)
            return []
        flight.sent = sent
        nbytes = sum(row.nbytes for row in flight.rows)
        self._numbers["puts"] += 1
        self._numbers["largest_put_bytes"] = max(self._numbers["largest_put_bytes"], nbytes)
        return [PutBatch(number)]

    def _validate(self, flight: _Flight, ack: PutAck, now: float) -> None:
        """Compare the acknowledgement of a PUT with what was sent."""
        sent = flight.sent
        if sent is None or ack.checksum != sent.checksum or len(ack.keys) != len(ack.row_bytes):
            self._throw_away(flight.keys, in_doubt=False)
            cause = f"unit {ack.unit!r} acknowledged other bytes than were sent (checksum or row count)"
            self._fail_batch(flight, cause, now)
            return
        stored = dict(zip(ack.keys, ack.row_bytes, strict=True))
        for row, key, digest in zip(flight.rows, flight.keys, sent.digests, strict=True):
            found = stored.get(key)
            right = found == row.nbytes
            fault = None if right else f"unit {ack.unit!r} acknowledged {found} bytes for {key!r}, not {row.nbytes}"
            self._stored.append(_Stored(row, key, digest, fault))

    def _settle(self, now: float) -> None:
        """Seal what is stored; what is wrong, not wanted any more, or comes too late for this cut is cleared."""
        while self._stored and self._rows_left:
            self._rows_left -= 1
            row, key, digest, fault = self._stored.popleft()
            ending = self._interruption() or (None if fault is None else (CUT_ERROR, fault))
            if ending is None and row.is_held:
                self._seal(row, key, digest, now)
                continue
            self._garbage.append(key)
            self._fail(row, *(ending or (CUT_ERROR, "")), now)

    def _seal(self, row: _Row, key: str, digest: ChainDigest, now: float) -> None:
        row.capture.seal(row.chunk, key, digest)
        self._longest_unsealed = max(self._longest_unsealed, now - row.frozen_at)
        self._numbers["rows"] += 1
        self._numbers["tokens"] += row.tokens
        self._numbers["bytes"] += row.nbytes
        self._answers[row.identity] = standing(row.capture)

    def _fail_batch(self, flight: _Flight, cause: str, now: float) -> None:
        ending = self._interruption() or ((CUT_ERROR, cause) if flight.alone else None)
        for row in flight.rows:
            if ending is not None:
                self._fail(row, *ending, now)
            else:
                self._numbers["rows_retried"] += 1
                self._alone.append(row)

    def _give_up(self, now: float) -> None:
        """Roll back everything that waits; a call that needs no write has its answer all the same."""
        ending = self._ending(now) or (CONTROL_DEADLINE, "")
        while (rest := self._batching.rest()) is not None:
            self._alone.extend(rest)
        for row in self._alone:
            self._fail(row, *ending, now)
        self._alone.clear()
        for identity in self._unreached:
            capture = self._table.get(identity)
            if capture is not None and capture.cuttable_tokens:
                self._answers[identity] = failure(identity, *ending)
            else:
                self._answer(identity)
        self._unreached.clear()

    def _ending(self, now: float) -> tuple[str, str] | None:
        """Why nothing is written any more, as reason and cause; None while writes may start."""
        if now > self.deadline and not self.interrupted:
            limit = self._config.control_timeout_s
            return CONTROL_DEADLINE, f"{limit:g} s had passed before this call could be written"
        return self._interruption()

    def _interruption(self) -> tuple[str, str] | None:
        return (INTERRUPTED, "the cut was interrupted before this call was sealed") if self.interrupted else None

    def _fail(self, row: _Row, reason: str, cause: str, now: float) -> None:
        """The call gets its tokens back and ``reason`` for an answer, unless its fate is its answer."""
        if not row.is_held:
            self._answer(row.identity)
            return
        row.capture.roll_back(row.chunk)
        self._longest_unsealed = max(self._longest_unsealed, now - row.frozen_at)
        self._answers[row.identity] = failure(row.identity, reason, cause)

    def _answer(self, identity: CallIdentity) -> None:
        self._answers[identity] = self._table.acknowledge(identity)

    def _landed(self, number: int, written: bool) -> _Flight:
        flight = self._flights.get(number)
        if flight is None or (flight.sent is not None) != written:
            raise ValueError(f"no {'PUT' if written else 'packing'} of number {number} is on its way")
        return self._flights.pop(number)

    def _throw_away(self, keys: tuple[str, ...], in_doubt: bool) -> None:
        if in_doubt:
            self._numbers["puts_in_doubt"] += 1
            self._doubtful.append(keys)
        else:
            self._garbage += keys

    def _start_clears(self) -> list[Instruction]:
        """Rows of a PUT in doubt are cleared by themselves, so that what the clear removed tells of that PUT."""
        wanted = [(keys, True) for keys in self._doubtful] + ([(tuple(self._garbage), False)] if self._garbage else [])
        self._doubtful.clear()
        self._garbage.clear()
        numbered = [(self._new_number(), clear) for clear in wanted]
        self._clears.update(numbered)
        return [ClearKeys(number, keys) for number, (keys, _) in numbered]

    def _cleared(self, number: int) -> tuple[tuple[str, ...], bool]:
        try:
            return self._clears.pop(number)
        except KeyError:
            raise ValueError(f"no clear of number {number} is on its way") from None

    def _new_number(self) -> int:
        self._next_number += 1
        return self._next_number - 1

    def _receipt(self, now: float) -> Receipt:
        acknowledgements = tuple(self._answers[identity] for identity in self._inventory.calls)
        numbers = {name: float(self._numbers[name]) for name in _COUNTS}
        numbers["calls"] = float(len(acknowledgements))
        numbers["longest_unsealed_s"] = self._longest_unsealed
        numbers["wall_s"] = now - self._started_at
        for disposition in (DURABLE_PREFIX, DURABLE_FAILURE):
            numbers[disposition] = float(sum(a.disposition == disposition for a in acknowledgements))
        for reason, count in Counter(a.reason for a in acknowledgements if a.reason is not None).items():
            numbers[f"failed_{reason}"] = float(count)
        numbers["terminal"] = float(sum(a.finish_reason is not None for a in acknowledgements))
        return Receipt(self._inventory.checkpoint_id, self._inventory.digest, acknowledgements, numbers)
