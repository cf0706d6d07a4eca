"""The catalog: everything the controller knows, and every operation on it.

It owns the partitions, the units, the block table, the batch ids that were applied and what is parked until when.
One thread calls it, one operation at a time, with ``now`` where time matters; what an operation starts, it finishes.

Rules:

1. A publish is checked whole, then applied whole. A refusal changes nothing (and creates nothing).
2. A batch id is applied once: the same id again gets the same outcome. If it comes with another block, that block is
   handed back in `Published.frees`, since the rows already lie elsewhere.
3. A row that is cleared is gone for every reader at once; only then is its unit told. Each position of a block is told
   free exactly once over the plane's life.
4. Keys and partitions that do not exist are no error to a clear; they are reported.
5. What ends a parked claim or wait is in the answer of the operation that did it (``woken``), in `expire`, or `cancel`;
   for those whose answer has no room for it, in `Catalog.woken`.

Costs are those of `policies.partition` and `policies.claims`; remembering a batch id is O(1). Measured on 2 busy cores
with 20,000 live rows of 16 fields: publish, lookup and tags of one new row together 10 µs when its shapes were seen
before and 20 µs when all are new, a publish of 256 rows 0.1 ms (0.6 ms when all their lengths differ), removal of 16
rows 3 to 6 µs per field.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from policies.answers import MISSING, Progress
from policies.blocks import Block, BlockTable, Frees, Releases
from policies.claims import ClaimAnswer, ClaimRequest, WaitRequest
from policies.deadlines import Deadlines
from policies.dtypes import storage_dtype
from policies.errors import KeyMissing, Refused, UnknownPartition, WireError
from policies.hints import hint
from policies.locations import Located, Publication, UnitLocation
from policies.partition import Partition
from policies.sampler_registry import SamplerRegistry
from policies.shapes import Shapes

REMEMBERED_BATCHES = 65_536
"""Outcomes kept for publishes that come again. As many as a unit keeps; a repeat comes within seconds."""

REMEMBERED_GRANTS = 4_096
"""Answers kept for claims that come again."""


class Published(NamedTuple):
    """``applied`` is False for a batch that had been applied before. ``woken``: parked requests that it completed."""

    applied: bool
    frees: Frees
    woken: tuple[ClaimAnswer, ...] = ()


class Cleared(NamedTuple):
    """``removed`` rows went; ``unknown`` keys were not there. ``woken``: requests parked in a dropped partition."""

    removed: int
    unknown: tuple[str, ...]
    frees: Frees
    woken: tuple[ClaimAnswer, ...] = ()


class Catalog:
    """``strict``: only partitions made by `create_partition` exist; else one begins with its first writer or reader.
    ``samplers``: those that claims may name."""

    def __init__(self, strict: bool, samplers: SamplerRegistry | None = None) -> None:
        self.strict = strict
        self.samplers = samplers or SamplerRegistry()
        self.partitions: dict[str, Partition] = {}
        self.blocks = BlockTable()
        self.shapes = Shapes()
        self.batches: OrderedDict[str, int | Refused] = OrderedDict()
        self.grants: OrderedDict[str, ClaimAnswer] = OrderedDict()
        self.repeated_batches = 0
        self._units: dict[str, UnitLocation] = {}
        self._deadlines = Deadlines()

    def register_unit(self, unit: str, location: UnitLocation) -> None:
        """A unit can be reached at ``location``; a unit that comes back replaces where it was."""
        self._units[unit] = location

    def units(self) -> Mapping[str, UnitLocation]:
        return dict(self._units)

    def create_partition(
        self, name: str, fields: Mapping[str, str] | None = None, expected_rows: int | None = None
    ) -> None:
        """Make a partition; with ``fields`` (name → dtype) it takes these only. Made again the same way is no error.

        Raises `Refused` for an unknown dtype, a negative count, or a partition that was declared otherwise.
        """
        for field, dtype in (fields or {}).items():
            try:
                storage_dtype(dtype)
            except WireError as error:
                raise Refused(f"partition {name!r}, field {field!r}: {error.message}", field=field) from None
        if expected_rows is not None and expected_rows < 0:
            raise Refused(f"partition {name!r}: {expected_rows} expected rows; give a count or None")
        partition = self.partitions.get(name)
        if partition is None:
            self.partitions[name] = Partition(name, self.shapes, fields, expected_rows)
            return
        declared = {f.name: f.dtype for f in partition.fields.values() if f.declared} if partition.strict else None
        if declared != (None if fields is None else dict(fields)):
            raise Refused(f"partition {name!r} exists with declared fields {declared}; {fields} came. Drop it first")
        if expected_rows is not None:
            partition.expected = expected_rows

    def publish(self, publication: Publication, now: float) -> Published:
        """Make a block's rows visible, all or none. ``now`` in seconds: what is due by then is left to `expire`.

        New fields begin, fields that a row had before are replaced and their old positions freed, tags are merged. A
        publication without fields sets tags only, and its block is freed at once. Raises `Refused` or one of its
        classes (`DtypeConflict`, `DuplicateKey`, `UnknownPartition`, `UnknownField`) saying key, field, what was there
        and what came; then nothing has changed.
        """
        outcome = self.batches.get(publication.batch_id)
        if outcome is not None:
            return self._repeated(publication, outcome)
        try:
            published = self._publish(publication, now)
        except Refused as refusal:
            self._remember(publication.batch_id, _again(refusal))
            raise
        self._remember(publication.batch_id, publication.block)
        return published

    def _repeated(self, publication: Publication, outcome: int | Refused) -> Published:
        self.repeated_batches += 1
        if isinstance(outcome, Refused):
            raise _again(outcome)
        if outcome == publication.block:
            return Published(False, {})
        return Published(False, _whole_block(publication))

    def _publish(self, publication: Publication, now: float) -> Published:
        partition = self._partition_for(publication.partition)
        if publication.unit not in self._units:
            raise Refused(f"unit {publication.unit!r} published block {publication.block} without being registered")
        if publication.block in self.blocks:
            raise Refused(
                f"block {publication.block} was published before under another batch id than {publication.batch_id!r}"
            )
        shapes = partition.admit(publication)
        self.partitions[partition.name] = partition
        rows = len(publication.keys)
        block = Block(publication.block, publication.unit, rows, partition.layout(publication.schema), shapes, rows)
        releases = Releases()
        partition.apply(publication, block, releases)
        if not block.layout.mask:
            return Published(True, _whole_block(publication), self._woken(partition, now))
        self.blocks.add(block)
        return Published(True, releases.settle(self.blocks), self._woken(partition, now))

    def _remember(self, batch_id: str, outcome: int | Refused) -> None:
        self.batches[batch_id] = outcome
        if len(self.batches) > REMEMBERED_BATCHES:
            self.batches.popitem(last=False)

    def _partition_for(self, name: str) -> Partition:
        """The partition; a new one, not yet of the catalog, where partitions begin on demand."""
        partition = self.partitions.get(name)
        if partition is None:
            if self.strict:
                raise self._unknown(name)
            partition = Partition(name, self.shapes, None, None)
        return partition

    def _known(self, name: str) -> Partition | None:
        """The partition, or None where one that does not exist is merely empty. `UnknownPartition` when strict."""
        partition = self.partitions.get(name)
        if partition is None and self.strict:
            raise self._unknown(name)
        return partition

    def _unknown(self, name: str) -> UnknownPartition:
        return UnknownPartition(
            f"there is no partition {name!r}, and this plane makes none on demand; there are "
            f"{', '.join(map(repr, self.partitions)) or 'none'}. Make it with create_partition",
            partition=name,
        )

    def locate(self, partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
        """Where rows are; see `Located`. A key may be asked more than once. ``fields`` None: all that the found rows
        have in common. Raises `UnknownPartition` when strict."""
        table = self._known(partition)
        if table is None:
            causes = dict.fromkeys(keys, f"there is no partition {partition!r}")
            return Located((MISSING,) * len(keys), causes, tuple(dict.fromkeys(fields or ())), ())
        return table.locate(keys, fields)

    def clear(self, partition: str, keys: Sequence[str]) -> Cleared:
        """Remove rows; what does not exist (key or partition) is reported, never an error. O(1) per row and field."""
        table = self.partitions.get(partition)
        if table is None:
            return Cleared(0, tuple(dict.fromkeys(keys)), {})
        releases = Releases()
        removed, unknown = table.clear(keys, releases)
        return Cleared(removed, unknown, releases.settle(self.blocks))

    def drop_partition(self, partition: str) -> Cleared:
        """Remove a partition with its rows, fields and tasks; one that does not exist is no error. O(rows).

        Requests parked in it are answered with `UnknownPartition`.
        """
        table = self.partitions.pop(partition, None)
        if table is None:
            return Cleared(0, (), {})
        releases = Releases()
        for row in table.rows.values():
            row.clear(releases)
        woken = table.consumers.close(UnknownPartition(f"partition {partition!r} was dropped", partition=partition))
        for answer in woken:
            self._deadlines.remove(answer.claim_id)
        for claim_id, answer in self.grants.items():
            if answer.grant is not None and answer.grant.watch.table is table:
                self.grants[claim_id] = replace(answer, grant=None)
        return Cleared(len(table.rows), (), releases.settle(self.blocks), tuple(woken))

    def tag(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        merge: bool = True,
        create: bool = False,
    ) -> None:
        """Set ``tags[i]`` on row ``keys[i]``: merged into its tags, or in their place. Fields and claims stay.

        With ``create`` a key that is not there becomes a row that has only tags; without, it is a `KeyMissing`. A
        refusal changes nothing.
        """
        if len(keys) != len(tags):
            raise Refused(f"{len(tags)} tags came for {len(keys)} keys of partition {partition!r}")
        table = self._partition_for(partition)
        if not create:
            self._require_keys(table, keys)
        elif keys:
            self.partitions[partition] = table
        table.tag(keys, tags, merge)

    def tags(self, partition: str, keys: Sequence[str]) -> list[dict[str, Any]]:
        """The tags of each key, empty for a row without any; `KeyMissing` names a key that is not there."""
        table = self._partition_for(partition)
        self._require_keys(table, keys)
        return [dict(table.rows[key].tags or {}) for key in keys]

    def _require_keys(self, table: Partition, keys: Sequence[str]) -> None:
        for key in keys:
            if key not in table.rows:
                lacking = [k for k in dict.fromkeys(keys) if k not in table.rows]
                raise KeyMissing(
                    f"partition {table.name!r} has no key {key!r} ({len(lacking)} of the keys asked for are not there)",
                    key=key,
                    verdict=MISSING,
                    keys=lacking,
                )

    def list_keys(self, partition: str, where: Mapping[str, Any] | None = None) -> list[tuple[str, dict[str, Any]]]:
        """(key, tags) of the rows whose tags match ``where`` (see `policies.where`), in order of arrival. O(rows)."""
        table = self._known(partition)
        return [] if table is None else table.list_keys(where)

    def claim(self, request: ClaimRequest, now: float) -> ClaimAnswer | None:
        """Claim rows; None when the claim is parked until a publish or its deadline answers it.

        A claim id that comes again gets the same answer, or stays parked. A deadline that has passed makes the claim
        an attempt. What else it completes is in `woken`. Raises `Refused`, `UnknownPartition` when strict,
        `UnknownField` of a declared partition.
        """
        granted = self.grants.get(request.claim_id)
        if granted is not None or self._deadlines.partition(request.claim_id) is not None:
            return granted
        if request.count < 1:
            raise Refused(f"task {request.task!r} asked for {request.count} rows; ask for at least 1")
        table, want = self._readable(request.partition, request.fields)
        answer = table.consumers.claim(request, want, table, self.samplers, now)
        self.partitions[table.name] = table
        return self._parked_or_answered(request.claim_id, request.deadline, table, request.fields, answer)

    def wait(self, request: WaitRequest, now: float) -> ClaimAnswer | None:
        """Answer when all keys have all fields; None when the request is parked. Errors as in `claim`."""
        if self._deadlines.partition(request.wait_id) is not None:
            return None
        table, want = self._readable(request.partition, request.fields)
        rows = table.rows
        ready = [key for key in request.keys if (row := rows.get(key)) is not None and row.mask & want == want]
        answer = table.consumers.wait(request, want, ready, now)
        self.partitions[table.name] = table
        return self._parked_or_answered(request.wait_id, request.deadline, table, request.fields, answer)

    def _parked_or_answered(
        self, request_id: str, deadline: float, table: Partition, fields: Sequence[str], answer: ClaimAnswer | None
    ) -> ClaimAnswer | None:
        if answer is None:
            self._deadlines.add(request_id, table.name, deadline)
        elif answer.timed_out:
            return self._timed_out(request_id, table, fields, answer.found)
        else:
            self._grant(answer)
        return answer

    def _readable(self, partition: str, fields: Sequence[str]) -> tuple[Partition, int]:
        """The partition, a new one when it may begin with this reader, and the mask of the fields."""
        if not fields:
            raise Refused(f"a reader of partition {partition!r} named no field; name those that its rows must have")
        table = self._partition_for(partition)
        return table, table.mask(fields)

    def _grant(self, answer: ClaimAnswer) -> None:
        if answer.grant is not None:
            self.grants[answer.claim_id] = answer
            if len(self.grants) > REMEMBERED_GRANTS:
                self.grants.popitem(last=False)

    def _timed_out(self, request_id: str, table: Partition, fields: Sequence[str], found: str) -> ClaimAnswer:
        found += hint(table, fields, self.partitions)
        return ClaimAnswer(request_id, timed_out=True, found=found)

    def woken(self, partition: str, now: float) -> tuple[ClaimAnswer, ...]:
        """The parked requests that a claim, a `tag` or a `clear` before has completed. O(1) when there are none."""
        table = self.partitions.get(partition)
        return () if table is None else self._woken(table, now)

    def _woken(self, partition: Partition, now: float) -> tuple[ClaimAnswer, ...]:
        if not partition.consumers.parked:
            return ()
        woken = partition.consumers.wake(now)
        for answer in woken:
            self._deadlines.remove(answer.claim_id)
            self._grant(answer)
        return tuple(woken)

    def cancel(self, claim_id: str) -> bool:
        """Forget a parked claim or wait, unanswered. False when none is parked under this id."""
        partition = self._deadlines.partition(claim_id)
        if partition is None:
            return False
        self._deadlines.remove(claim_id)
        self.partitions[partition].consumers.forget(claim_id)
        return True

    def give_back(self, request_id: str, now: float) -> tuple[ClaimAnswer, ...]:
        """The asker of a claim or wait has left: it is parked no more, and its sampler has what it was given to give
        again. The parked requests that this completes. O(rows given)."""
        if self.cancel(request_id):
            return ()
        answer = self.grants.pop(request_id, None)
        if answer is None or answer.grant is None:
            return ()
        table = self.partitions[answer.grant.watch.table.name]
        table.consumers.give_back(answer.grant)
        return self._woken(table, now)

    def expire(self, now: float) -> list[ClaimAnswer]:
        """The answers of the parked requests whose deadline is not after ``now``, earliest deadline first."""
        answers = []
        for request_id, partition in self._deadlines.due(now):
            table = self.partitions[partition]
            answers.append(self._timed_out(request_id, table, *table.consumers.give_up(request_id)))
        return answers

    def next_deadline(self) -> float | None:
        """When `expire` will have something to say; None when nothing is parked."""
        return self._deadlines.next()

    def reset_task(self, partition: str, task: str, now: float) -> list[ClaimAnswer]:
        """Let the task claim all rows afresh; the parked requests that this completes. O(rows)."""
        table = self._known(partition)
        if table is None:
            return []
        table.consumers.reset(task, table.rows.values())
        return list(self._woken(table, now))

    def consumed(self, partition: str, task: str) -> Progress:
        """Rows the task has claimed since its last reset (cleared ones included), of those expected."""
        table = self._known(partition)
        if table is None:
            return Progress(0, None)
        known = table.consumers.tasks.get(task)
        return Progress(0 if known is None else known.claimed, table.expected)

    def produced(self, partition: str) -> Progress:
        """Rows that have come with a value over the partition's life (cleared ones included), of those expected."""
        table = self._known(partition)
        return Progress(0, None) if table is None else Progress(table.produced, table.expected)

    def describe(self) -> dict[str, Any]:
        """Plain: see `Partition.describe`; blocks and live rows per unit; batches that came more than once."""
        return {
            "partitions": {name: partition.describe() for name, partition in self.partitions.items()},
            "units": {name: location.endpoint for name, location in self._units.items()},
            "blocks": self.blocks.per_unit(),
            "repeated_batches": self.repeated_batches,
        }


def _again(refusal: Refused) -> Refused:
    """The same refusal without the frames it was raised through."""
    return type(refusal)(refusal.message, **refusal.details)


def _whole_block(publication: Publication) -> Frees:
    return {publication.unit: [(publication.block, list(range(len(publication.keys))))]}
