"""A storage unit's blocks and the rules by which puts become visible.

Rules, all in this file:

1. A put becomes a block, is published to the controller, and only then acknowledged. Publishes that arrive while one is
   on its way leave together with the next.
2. A batch id is stored once. A repeated put waits for the same outcome, or gets the same acknowledgement again.
3. A refused publish drops its block. A publish whose outcome is unknown is sent again until the controller answers.
   When the controller cannot take a message of several, each is published alone, so that one put fails for itself.
4. A block goes when its last row is freed, and is compacted before that (`policies.stored_block`). While anybody
   *holds* the unit (a checkpoint is about to capture its blocks) frees wait.

Costs: a put is one dict insert per batch; those of reads and frees are a block's own.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED
from policies.checksums import block_checksum
from policies.columns import Column
from policies.config import TransportConfig
from policies.errors import CapacityExceeded, Refused, RegraftError, Unreachable, WireError
from policies.locations import FieldSchema, Publication
from policies.stored_block import MOST_ROWS, Part, StoredBlock, all_bad
from policies.transport import lend

REMEMBERED_BATCHES = 65_536
"""Acknowledgements kept for repeated puts. A writer repeats a put within seconds, so this is minutes of writing."""


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


class UnitState:
    """``name`` is the unit's name in the plane; ``incarnation`` (0 ≤ n < 2³¹) makes its block ids unique over the
    plane's life."""

    def __init__(self, name: str, incarnation: int, capacity_bytes: int, capacity_rows: int) -> None:
        self._name = name
        self._ids = itertools.count(incarnation << 32)
        self._capacity_bytes, self._capacity_rows = capacity_bytes, capacity_rows
        self.blocks: dict[int, StoredBlock] = {}
        self.nbytes = 0
        self.rows = 0
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
        backing: Any = None,
    ) -> list[Answer]:
        """Take a put in. Its answer may come at once (a repeat) or after its publish. ``checksum`` is the
        `block_checksum` of the columns when the writer gave them; ``backing`` see `StoredBlock`."""
        if batch_id in self._acknowledged:
            return [Answer(token, self._acknowledged[batch_id])]
        if batch_id in self._puts:
            self._puts[batch_id].waiting.append(token)
            return []
        found = block_checksum(columns)
        if found != checksum:
            changed = WireError(f"checksum {checksum} was sent, the put has {found}: its arrays changed on their way")
            return [Answer(token, changed)]
        if len(keys) > MOST_ROWS:
            return [Answer(token, Refused(f"a put of {len(keys)} rows; split it into puts of at most {MOST_ROWS}"))]
        block = StoredBlock.of(next(self._ids), len(keys), columns, backing)
        full = self._over_capacity(block.nbytes, block.rows, "the put has")
        if full is not None:
            return [Answer(token, full)]
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
        """Rows of one block; what is not there gets a verdict instead."""
        block = self.blocks.get(block_id)
        return all_bad(positions, CLEARED, "the rows were cleared") if block is None else block.read(fields, positions)

    def whole(self, block_id: int) -> StoredBlock | None:
        """The block if all its rows live."""
        block = self.blocks.get(block_id)
        return block if block is not None and block.where is None else None

    def lends(self, block_id: int, fields: Sequence[str], rows: int, room: int, config: TransportConfig) -> bool:
        """Whether the reader of ``rows`` rows should borrow the block; ``room``: bytes free in the object store."""
        block = self.whole(block_id)
        if block is None or not all(name in block.columns for name in fields):
            return False
        wanted = sum(block.columns[name].nbytes for name in fields) * rows // block.rows
        return (block.backing is not None or block.nbytes <= room) and lend(config, wanted, block.nbytes)

    def adopt(self, block_id: int, backing: Any, columns: Mapping[str, Column]) -> None:
        """``columns`` are those of the block, in memory that can be lent as ``backing``."""
        block = self.whole(block_id)
        if block is not None:
            block.columns, block.backing = dict(columns), backing

    def disown(self, block_id: int) -> None:
        """A reader could not use what the block was lent as: its owner has died. The memory itself stays."""
        if block_id in self.blocks:
            self.blocks[block_id].backing = None

    def free(self, frees: Iterable[tuple[int, NDArray[np.int64]]]) -> None:
        """Forget rows. Rows and blocks that are already gone are no error; a held unit does it on release."""
        if self._holds:
            self._held_frees.extend(frees)
            return
        for block_id, positions in frees:
            block = self.blocks.get(block_id)
            if block is not None:
                nbytes, live = block.nbytes, block.live
                block.free(positions)
                self.nbytes += block.nbytes - nbytes
                self.rows += block.live - live
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
        return [self.blocks[block_id].snapshot() for block_id in block_ids]

    def load(self, restore: str, blocks: Sequence[StoredBlock]) -> None:
        """Take in blocks of a checkpoint under their own ids, all or none. `CapacityExceeded` when they do not fit."""
        full = self._over_capacity(sum(b.nbytes for b in blocks), sum(b.live for b in blocks), "the checkpoint brings")
        if full is not None:
            raise full
        for block in blocks:
            self._drop(block.id)
            self._add(block)
        self._loaded.setdefault(restore, []).extend(block.id for block in blocks)

    def unload(self, restore: str) -> None:
        """Forget what was loaded for a restore: it has failed, and another may bring the same blocks otherwise."""
        for block_id in self._loaded.pop(restore, ()):
            self._drop(block_id)

    def _over_capacity(self, nbytes: int, rows: int, coming: str) -> CapacityExceeded | None:
        for kind, held, more, capacity in (
            ("bytes", self.nbytes, nbytes, self._capacity_bytes),
            ("rows", self.rows, rows, self._capacity_rows),
        ):
            if held + more > capacity:
                return CapacityExceeded(
                    f"unit {self._name} holds {held} of {capacity} {kind} and {coming} {more}; clear rows, or launch "
                    f"the plane with more units or a larger unit_capacity_{kind}",
                    full=kind,
                )
        return None

    def _add(self, block: StoredBlock) -> None:
        self.blocks[block.id] = block
        self.nbytes += block.nbytes
        self.rows += block.live

    def _drop(self, block_id: int) -> None:
        block = self.blocks.pop(block_id, None)
        if block is not None:
            self.nbytes -= block.nbytes
            self.rows -= block.live
