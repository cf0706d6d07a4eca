"""A storage unit's blocks and the rules by which puts become visible.

Rules, all in this file:

1. A put becomes a block, is published to the controller, and only then acknowledged. Publishes that arrive while one is
   on its way leave together with the next.
2. A batch id is stored once. A repeated put waits for the same outcome, or gets the same acknowledgement again.
3. A refused publish drops its block. A publish whose outcome is unknown is sent again until the controller answers.
   When the controller cannot take a message of several, each is published alone, so that one put fails for itself.
4. A block goes when its last row is freed. While anybody *holds* the unit (a checkpoint is about to capture its
   blocks) frees wait.

Costs: a put is one dict insert per batch; a read is one lookup and one gather per field; a free is O(rows freed).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED, MISSING
from policies.checksums import block_checksum
from policies.columns import Column
from policies.errors import CapacityExceeded, Refused, RegraftError, Unreachable, WireError
from policies.locations import FieldSchema, Publication

REMEMBERED_BATCHES = 65_536
"""Acknowledgements kept for repeated puts. A writer repeats a put within seconds, so this is minutes of writing."""


@dataclass(slots=True)
class StoredBlock:
    """The rows of one put. ``dead`` marks freed rows; the array is made when the first row goes."""

    id: int
    rows: int
    columns: dict[str, Column]
    nbytes: int
    live: int
    dead: NDArray[np.bool_] | None = None

    @classmethod
    def of(cls, block_id: int, rows: int, columns: Mapping[str, Column]) -> StoredBlock:
        return cls(block_id, rows, dict(columns), sum(c.nbytes for c in columns.values()), rows)

    def free(self, positions: NDArray[np.int64]) -> None:
        if self.dead is None:
            self.dead = np.zeros(self.rows, bool)
        self.dead[positions] = True
        self.live = self.rows - int(self.dead.sum())


@dataclass(frozen=True, slots=True)
class Stored:
    """The acknowledgement of a put."""

    block: int
    keys: tuple[str, ...]
    row_bytes: NDArray[np.int64]
    checksum: int


@dataclass(frozen=True, slots=True)
class Answer:
    """An instruction: answer the put that came as ``token`` with ``result``."""

    token: Any
    result: Stored | RegraftError


@dataclass(slots=True)
class _Put:
    publication: Publication
    stored: Stored
    waiting: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """The answer to one read of one block: the rows asked for, except those listed in ``bad`` as
    (index in the read, verdict, cause)."""

    columns: Mapping[str, Column]
    bad: Sequence[tuple[int, str, str]] = ()


class UnitState:
    """``name`` is the unit's name in the plane; ``incarnation`` (0 ≤ n < 2³¹) makes its block ids unique over the
    plane's life."""

    def __init__(self, name: str, incarnation: int, capacity_bytes: int) -> None:
        self._name = name
        self._ids = itertools.count(incarnation << 32)
        self._capacity = capacity_bytes
        self.blocks: dict[int, StoredBlock] = {}
        self.nbytes = 0
        self._puts: dict[str, _Put] = {}
        self._unpublished: list[str] = []
        self._alone: list[str] = []
        self._publishing: list[str] = []
        self._acknowledged: OrderedDict[str, Stored] = OrderedDict()
        self._loaded: dict[str, list[int]] = {}
        self._holds: set[str] = set()
        self._held_frees: list[tuple[int, NDArray[np.int64]]] = []

    def put(
        self,
        token: Any,
        batch_id: str,
        partition: str,
        keys: Sequence[str],
        columns: Mapping[str, Column],
        tags: Sequence[Mapping[str, Any] | None] | None,
        checksum: int,
    ) -> list[Answer]:
        """Take a put in. Its answer may come at once (a repeat) or after its publish. ``checksum`` is the
        `block_checksum` of the columns when the writer gave them."""
        if batch_id in self._acknowledged:
            return [Answer(token, self._acknowledged[batch_id])]
        if batch_id in self._puts:
            self._puts[batch_id].waiting.append(token)
            return []
        found = block_checksum(columns)
        if found != checksum:
            changed = WireError(f"checksum {checksum} was sent, the put has {found}: its arrays changed on their way")
            return [Answer(token, changed)]
        nbytes = sum(c.nbytes for c in columns.values())
        if self.nbytes + nbytes > self._capacity:
            full = CapacityExceeded(
                f"this unit holds {self.nbytes} of {self._capacity} bytes and the put has {nbytes}; clear rows, or "
                "launch the plane with more units or a larger unit_capacity_bytes"
            )
            return [Answer(token, full)]
        block = StoredBlock.of(next(self._ids), len(keys), columns)
        self._add(block)
        fields = {name: FieldSchema(c.dtype, c.shape, c.lengths()) for name, c in columns.items()}
        row_tags = None if tags is None else tuple(tags)
        publication = Publication.of(batch_id, self._name, block.id, partition, tuple(keys), fields, row_tags)
        row_bytes = np.zeros(len(keys), np.int64)
        for column in columns.values():
            row_bytes += column.row_bytes()
        stored = Stored(block.id, publication.keys, row_bytes, checksum)
        self._puts[batch_id] = _Put(publication, stored, [token])
        self._unpublished.append(batch_id)
        return []

    def next_publish(self) -> list[Publication]:
        """What to publish now: everything that waits, or nothing while a publish is on its way."""
        if self._publishing:
            return []
        if self._alone:
            self._publishing, self._alone = self._alone[:1], self._alone[1:]
        else:
            self._publishing, self._unpublished = self._unpublished, []
        return [self._puts[batch_id].publication for batch_id in self._publishing]

    def published(self, outcomes: Sequence[RegraftError | None]) -> list[Answer]:
        """The controller answered the publish: None for each block that is visible now, else why it is not."""
        answers: list[Answer] = []
        batch_ids, self._publishing = self._publishing, []
        for batch_id, refusal in zip(batch_ids, outcomes, strict=True):
            put = self._puts.pop(batch_id)
            if refusal is None:
                self._acknowledged[batch_id] = put.stored
                if len(self._acknowledged) > REMEMBERED_BATCHES:
                    self._acknowledged.popitem(last=False)
            else:
                self._drop(put.publication.block)
            answers += [Answer(token, refusal or put.stored) for token in put.waiting]
        return answers

    def publish_failed(self, error: RegraftError) -> list[Answer]:
        """The controller answered that it cannot take the message: the fault of one of the puts in it."""
        if len(self._publishing) == 1:
            return self.published([error])
        self._alone, self._publishing = self._publishing, []
        return []

    def publish_unknown(self, error: RegraftError) -> list[Answer]:
        """No answer came. The writers are told so; the blocks stay and their publish is due again."""
        answers: list[Answer] = []
        for batch_id in self._publishing:
            put = self._puts[batch_id]
            told = Unreachable(f"the put is stored but the controller has not confirmed it: {error}")
            answers += [Answer(token, told) for token in put.waiting]
            put.waiting.clear()
        self._unpublished = self._publishing + self._unpublished
        self._publishing = []
        return answers

    def read(self, block_id: int, fields: Sequence[str], positions: NDArray[np.int64]) -> Part:
        """Rows of one block; freed rows and unknown fields get a verdict instead."""
        block = self.blocks.get(block_id)
        if block is None:
            return self._all_bad(positions, CLEARED, "the rows were cleared")
        unknown = [name for name in fields if name not in block.columns]
        if unknown:
            return self._all_bad(positions, MISSING, f"block {block_id} has no field {unknown[0]!r}")
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < block.rows:
            return self._all_bad(positions, MISSING, f"block {block_id} has {block.rows} rows")
        bad: list[tuple[int, str, str]] = []
        if block.dead is not None:
            dead = block.dead[positions]
            bad = [(i, CLEARED, "the row was cleared") for i in np.flatnonzero(dead).tolist()]
            positions = positions[~dead]
        return Part({name: block.columns[name].take(positions) for name in fields}, bad)

    @staticmethod
    def _all_bad(positions: NDArray[np.int64], verdict: str, cause: str) -> Part:
        return Part({}, [(i, verdict, cause) for i in range(len(positions))])

    def free(self, frees: Iterable[tuple[int, NDArray[np.int64]]]) -> None:
        """Forget rows. Rows and blocks that are already gone are no error; a held unit does it on release."""
        if self._holds:
            self._held_frees.extend(frees)
            return
        for block_id, positions in frees:
            block = self.blocks.get(block_id)
            if block is not None:
                block.free(positions)
                if block.live == 0:
                    self._drop(block_id)

    def hold(self, holder: str) -> None:
        """Keep every block and row until each holder's `release`."""
        self._holds.add(holder)

    def release(self, holder: str) -> None:
        """A holder is done; one that holds nothing (any more) is no error."""
        self._holds.discard(holder)
        if not self._holds:
            waiting, self._held_frees = self._held_frees, []
            self.free(waiting)

    def capture(self, holder: str, block_ids: Sequence[int]) -> list[StoredBlock]:
        """Blocks as they are now, whatever is freed later. `Refused` when they may have changed since the hold."""
        if holder not in self._holds:
            raise Refused(f"unit {self._name} is not held by {holder!r} any more; save again")
        missing = [block_id for block_id in block_ids if block_id not in self.blocks]
        if missing:
            raise Refused(f"unit {self._name} does not hold blocks {missing[:5]} that the controller lists on it")
        blocks = (self.blocks[block_id] for block_id in block_ids)
        return [replace(block, dead=None if block.dead is None else block.dead.copy()) for block in blocks]

    def load(self, restore: str, blocks: Sequence[StoredBlock]) -> None:
        """Take in blocks of a checkpoint under their own ids, all or none. `CapacityExceeded` when they do not fit."""
        coming = sum(block.nbytes for block in blocks)
        if self.nbytes + coming > self._capacity:
            raise CapacityExceeded(
                f"unit {self._name} holds {self.nbytes} of {self._capacity} bytes and the checkpoint brings {coming}; "
                "launch the plane with more units or a larger unit_capacity_bytes"
            )
        for block in blocks:
            self._drop(block.id)
            self._add(block)
        self._loaded.setdefault(restore, []).extend(block.id for block in blocks)

    def unload(self, restore: str) -> None:
        """Forget what was loaded for a restore: it has failed, and another may bring the same blocks otherwise."""
        for block_id in self._loaded.pop(restore, ()):
            self._drop(block_id)

    def _add(self, block: StoredBlock) -> None:
        self.blocks[block.id] = block
        self.nbytes += block.nbytes

    def _drop(self, block_id: int) -> None:
        block = self.blocks.pop(block_id, None)
        if block is not None:
            self.nbytes -= block.nbytes
