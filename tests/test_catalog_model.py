"""The catalog against a model made of plain dicts and loops: every answer of every operation is equal.

The model knows nothing of masks, heaps, counts or interned shapes. It keeps each row's fields with where they are and
what shape they have, and answers every question by looking at all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.blocks import Frees
from policies.catalog import Catalog
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest, Progress, WaitRequest
from policies.errors import DtypeConflict, DuplicateKey, KeyMissing, Refused, UnknownField, UnknownPartition
from policies.locations import FieldSchema, Located, Publication

UNITS = ("u0", "u1")
DECLARED = {"ids": "int64", "score": "float32"}
DTYPES = {"ids": "int64", "lp": "float32", "score": "float32"}

partitions = st.sampled_from(["train"] * 6 + ["staging", "declared"])
key = st.sampled_from([f"g{g}_s{s}" for g in range(2) for s in range(3)])
keys = st.lists(key, min_size=1, max_size=6)
distinct_keys = st.lists(key, min_size=1, max_size=6, unique=True)
field_names = st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=2, unique=True)
tag_values = st.fixed_dictionaries({}, optional={"status": st.sampled_from(["a", "b"]), "version": st.integers(0, 3)})
tasks = st.sampled_from(["actor", "critic"])
shape = st.sampled_from([(), (3,), (-1,), (-1, 2), (2, -1), (2, 3)])


@dataclass
class ModelRow:
    fields: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)


@dataclass
class ModelPartition:
    declared: dict[str, str] | None = None
    expected: int | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    rows: dict[str, ModelRow] = field(default_factory=dict)
    produced: int = 0
    claimed: dict[str, int] = field(default_factory=dict)
    watched: set[tuple[str, frozenset[str]]] = field(default_factory=set)


def fields_of(p: Publication) -> dict[str, FieldSchema]:
    lengths = iter(p.lengths)
    return {
        name: FieldSchema(dtype, shape, np.broadcast_to(next(lengths), len(p.keys)) if -1 in shape else None)
        for name, dtype, shape in p.schema.fields
    }


class CatalogMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.partitions: dict[str, ModelPartition] = {}
        self.block_units: dict[int, str] = {}
        self.freed: set[tuple[int, int]] = set()
        self.batches: dict[str, tuple[Publication, type[Refused] | None]] = {}
        self.parked: list[ClaimRequest | WaitRequest] = []
        self.grants: dict[str, tuple[ClaimRequest, ClaimAnswer]] = {}
        self.repeated = 0
        self.now = 0.0
        self.numbers = itertools.count()

    @initialize(strict=st.booleans())
    def start(self, strict: bool) -> None:
        self.strict = strict
        self.catalog = Catalog(strict)
        for unit in UNITS:
            self.catalog.register_unit(unit, f"tcp://{unit}")
        self.create("train", None, None)
        if not strict:
            self.create("declared", DECLARED, 5)

    def create(self, name: str, declared: dict[str, str] | None, expected: int | None) -> None:
        self.catalog.create_partition(name, declared, expected)
        model = self.partitions.setdefault(name, ModelPartition(declared, None, dict(declared or {})))
        model.expected = expected if expected is not None else model.expected

    # What the model answers.

    def refusal(self, p: Publication) -> type[Refused] | None:
        partition = self.partitions.get(p.partition)
        if partition is None and self.strict:
            return UnknownPartition
        partition = partition or ModelPartition()
        if len(set(p.keys)) != len(p.keys):
            return DuplicateKey
        for name, schema in fields_of(p).items():
            if name not in partition.dtypes:
                if partition.declared is not None:
                    return UnknownField
            elif partition.dtypes[name] != schema.dtype:
                return DtypeConflict
        return None

    def places(self) -> dict[tuple[int, int], int]:
        """(block, position) → number of fields that are read from there."""
        used: dict[tuple[int, int], int] = {}
        for partition in self.partitions.values():
            for row in partition.rows.values():
                for block, position, _ in row.fields.values():
                    used[block, position] = used.get((block, position), 0) + 1
        return used

    def available(self, partition: ModelPartition, task: str, fields: Iterable[str]) -> list[str]:
        wanted = set(fields)
        return [k for k, r in partition.rows.items() if wanted <= set(r.fields) and task not in r.claimed]

    def attempt(self, request: ClaimRequest | WaitRequest) -> ClaimAnswer | None:
        partition = self.partitions[request.partition]
        if isinstance(request, WaitRequest):
            wanted = set(request.fields)
            met = all(k in partition.rows and wanted <= set(partition.rows[k].fields) for k in request.keys)
            return ClaimAnswer(request.wait_id, request.keys) if met else None
        found = self.available(partition, request.task, request.fields)[: request.count]
        if len(found) < request.count:
            return None
        for k in found:
            partition.rows[k].claimed.add(request.task)
        partition.claimed[request.task] += len(found)
        answer = ClaimAnswer(request.claim_id, tuple(found))
        self.grants[request.claim_id] = (request, answer)
        return answer

    def wake(self, name: str) -> list[ClaimAnswer]:
        woken = []
        for request in list(self.parked):
            if request.partition == name and request.deadline > self.now:
                answer = self.attempt(request)
                if answer is not None:
                    woken.append(answer)
                    self.parked.remove(request)
        return woken

    def check_frees(self, frees: Frees, before: set[tuple[int, int]]) -> None:
        """Exactly the positions that were in use before and are not now are told free, to the unit that has them."""
        told = [
            (unit, block, position)
            for unit, entries in frees.items()
            for block, positions in entries
            for position in positions.tolist()
        ]
        expected = {(self.block_units[b], b, p) for b, p in before - set(self.places())}
        assert len(told) == len(set(told))
        assert set(told) == expected
        assert not {(b, p) for _, b, p in told} & self.freed
        self.freed |= {(b, p) for _, b, p in told}

    # Writers.

    @rule(
        name=partitions,
        batch=st.one_of(distinct_keys, distinct_keys, keys),
        schema=st.dictionaries(st.sampled_from(sorted(DTYPES)), shape, max_size=4),
        wrong=st.sampled_from([None] * 9 + ["int32"]),
        unit=st.sampled_from(UNITS),
        data=st.data(),
    )
    def publish(
        self, name: str, batch: list[str], schema: dict[str, Any], wrong: str | None, unit: str, data: st.DataObject
    ) -> None:
        fields = {}
        for f, s in schema.items():
            lengths = None
            if -1 in s:
                drawn = data.draw(st.lists(st.integers(0, 3), min_size=len(batch), max_size=len(batch)))
                lengths = np.array(drawn, np.int64)
            fields[f] = FieldSchema(wrong or DTYPES[f], s, lengths)
        tags = data.draw(
            st.none() | st.tuples(*(st.none() | tag_values for _ in batch)),
        )
        number = next(self.numbers)
        publication = Publication.of(f"b{number}", unit, number, name, tuple(batch), fields, tags)
        refusal = self.refusal(publication)
        self.batches[publication.batch_id] = (publication, refusal)
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.publish(publication, self.now)
            return
        before = set(self.places()) | {(number, i) for i in range(len(batch))}
        self.block_units[number] = unit
        published = self.catalog.publish(publication, self.now)
        assert published.applied
        self.apply(publication)
        self.check_frees(published.frees, before)
        assert list(published.woken) == self.wake(name)

    def apply(self, p: Publication) -> None:
        partition = self.partitions.setdefault(p.partition, ModelPartition())
        for name, schema in fields_of(p).items():
            partition.dtypes.setdefault(name, schema.dtype)
        for i, k in enumerate(p.keys):
            row = partition.rows.setdefault(k, ModelRow())
            partition.produced += bool(p.schema.fields) and not row.fields
            for name, schema in fields_of(p).items():
                length = 0 if schema.lengths is None else int(schema.lengths[i])
                row.fields[name] = (p.block, i, tuple(length if n == -1 else n for n in schema.shape))
            row.tags |= (p.tags[i] or {}) if p.tags else {}

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), new_block=st.booleans())
    def publish_again(self, data: st.DataObject, new_block: bool) -> None:
        first, refusal = self.batches[data.draw(st.sampled_from(sorted(self.batches)))]
        block = next(self.numbers) if new_block else first.block
        again = first._replace(block=block)
        self.repeated += 1
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.publish(again, self.now)
            return
        published = self.catalog.publish(again, self.now)
        assert (published.applied, published.woken) == (False, ())
        told = {(b, p) for entries in published.frees.values() for b, ps in entries for p in ps.tolist()}
        assert told == ({(block, i) for i in range(len(first.keys))} if new_block else set())

    @rule(name=partitions, asked=keys, tags=st.lists(tag_values, min_size=6, max_size=6), merge=st.booleans(),
          create=st.booleans())  # fmt: skip
    def tag(self, name: str, asked: list[str], tags: list[dict[str, Any]], merge: bool, create: bool) -> None:
        given = tags[: len(asked)]
        rows = self.partitions[name].rows if name in self.partitions else {}
        if name not in self.partitions and self.strict:
            with pytest.raises(UnknownPartition):
                self.catalog.tag(name, asked, given, merge, create)
            return
        if not create and not set(asked) <= set(rows):
            with pytest.raises(KeyMissing) as raised:
                self.catalog.tag(name, asked, given, merge, create)
            assert raised.value.details["keys"] == [k for k in dict.fromkeys(asked) if k not in rows]
            return
        self.catalog.tag(name, asked, given, merge, create)
        rows = self.partitions.setdefault(name, ModelPartition()).rows
        for k, tag in zip(asked, given, strict=True):
            row = rows.setdefault(k, ModelRow())
            row.tags = row.tags | tag if merge else dict(tag)

    @rule(name=partitions, asked=keys)
    def clear(self, name: str, asked: list[str]) -> None:
        before = set(self.places())
        cleared = self.catalog.clear(name, asked)
        rows = self.partitions[name].rows if name in self.partitions else {}
        gone = [k for k in dict.fromkeys(asked) if rows.pop(k, None) is not None]
        assert cleared.removed == len(gone)
        assert cleared.unknown == tuple(k for k in dict.fromkeys(asked) if k not in gone)
        self.check_frees(cleared.frees, before)

    @rule(name=partitions, sure=st.integers(0, 4))
    def drop(self, name: str, sure: int) -> None:
        if sure:
            return
        before = set(self.places())
        cleared = self.catalog.drop_partition(name)
        partition = self.partitions.pop(name, None)
        assert cleared.removed == (len(partition.rows) if partition else 0)
        ended = [r for r in self.parked if r.partition == name]
        self.parked = [r for r in self.parked if r.partition != name]
        assert [a.claim_id for a in cleared.woken] == [identity(r) for r in ended]
        assert all(isinstance(a.error, UnknownPartition) and not a.timed_out for a in cleared.woken)
        self.check_frees(cleared.frees, before)

    @rule(name=partitions, expected=st.none() | st.integers(0, 9))
    def create_partition(self, name: str, expected: int | None) -> None:
        declared = DECLARED if name == "declared" else None
        if name in self.partitions and self.partitions[name].declared != declared:
            with pytest.raises(Refused):
                self.catalog.create_partition(name, declared, expected)
            return
        self.create(name, declared, expected)

    # Readers.

    @rule(name=partitions, asked=keys, fields=st.none() | field_names)
    def locate(self, name: str, asked: list[str], fields: list[str] | None) -> None:
        if name not in self.partitions and self.strict:
            with pytest.raises(UnknownPartition):
                self.catalog.locate(name, asked, fields)
            return
        located = self.catalog.locate(name, asked, fields)
        rows = self.partitions[name].rows if name in self.partitions else {}
        found = [rows[k] for k in asked if k in rows]
        wanted = set(fields) if fields is not None else set.intersection(*[set(r.fields) for r in found] or [set()])
        assert (set(located.fields), fields is None or located.fields == tuple(fields)) == (wanted, True)
        ok = [k in rows and wanted <= set(rows[k].fields) for k in asked]
        assert located.verdicts == tuple("ok" if good else "missing" for good in ok)
        assert set(located.causes) == {k for k, good in zip(asked, ok, strict=True) if not good}
        self.check_reads(located, {
            (i, f): (self.block_units[rows[k].fields[f][0]], *rows[k].fields[f][:2])
            for i, k in enumerate(asked) if ok[i] for f in wanted
        })  # fmt: skip

    def check_reads(self, located: Located, expected: dict[tuple[int, str], tuple[str, int, int]]) -> None:
        seen = [
            ((int(row), f), (read.unit, read.block, int(position)))
            for read in located.reads
            for row, position in zip(read.rows, read.positions, strict=True)
            for f in read.fields
        ]
        assert len(seen) == len(dict(seen))
        assert dict(seen) == expected
        covers = [(read.block, tuple(read.rows)) for read in located.reads]
        assert len(covers) == len(set(covers))

    @rule(name=partitions, asked=keys)
    def tags(self, name: str, asked: list[str]) -> None:
        if name not in self.partitions and self.strict:
            with pytest.raises(UnknownPartition):
                self.catalog.tags(name, asked)
            return
        rows = self.partitions[name].rows if name in self.partitions else {}
        if set(asked) <= set(rows):
            assert self.catalog.tags(name, asked) == [rows[k].tags for k in asked]
        else:
            with pytest.raises(KeyMissing):
                self.catalog.tags(name, asked)

    @rule(name=partitions, status=st.sampled_from([None, "a", "b"]), least=st.none() | st.integers(0, 3))
    def list_keys(self, name: str, status: str | None, least: int | None) -> None:
        where: dict[str, Any] = {}
        if status is not None:
            where["status"] = status
        if least is not None:
            where["version"] = {"op": ">=", "value": least}
        if name not in self.partitions and self.strict:
            with pytest.raises(UnknownPartition):
                self.catalog.list_keys(name, where)
            return
        rows = self.partitions[name].rows if name in self.partitions else {}
        assert self.catalog.list_keys(name, where) == [
            (k, r.tags)
            for k, r in rows.items()
            if (status is None or r.tags.get("status") == status)
            and (least is None or r.tags.get("version", -1) >= least)
        ]

    # Consumers.

    @rule(name=partitions, task=tasks, fields=field_names, count=st.integers(1, 5), patience=st.integers(0, 6))
    def claim(self, name: str, task: str, fields: list[str], count: int, patience: int) -> None:
        request = ClaimRequest(f"c{next(self.numbers)}", name, task, tuple(fields), count, self.now + patience)
        refusal = self.reader_refusal(name, fields)
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.claim(request, self.now)
            return
        partition = self.partitions.setdefault(name, ModelPartition())
        partition.claimed.setdefault(task, 0)
        partition.watched.add((task, frozenset(fields)))
        assert self.catalog.claim(request, self.now) == self.ask(request)

    @rule(name=partitions, asked=keys, fields=field_names, patience=st.integers(0, 6))
    def wait(self, name: str, asked: list[str], fields: list[str], patience: int) -> None:
        request = WaitRequest(f"w{next(self.numbers)}", name, tuple(asked), tuple(fields), self.now + patience)
        refusal = self.reader_refusal(name, fields)
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.wait(request, self.now)
            return
        self.partitions.setdefault(name, ModelPartition())
        assert self.catalog.wait(request, self.now) == self.ask(request)

    def reader_refusal(self, name: str, fields: list[str]) -> type[Refused] | None:
        partition = self.partitions.get(name)
        if partition is None:
            return UnknownPartition if self.strict else None
        return UnknownField if partition.declared is not None and not set(fields) <= set(DECLARED) else None

    def ask(self, request: ClaimRequest | WaitRequest) -> ClaimAnswer | None:
        answer = self.attempt(request)
        if answer is None and request.deadline <= self.now:
            return ClaimAnswer(identity(request), timed_out=True)
        if answer is None:
            self.parked.append(request)
        return answer

    @precondition(lambda self: self.grants or self.parked)
    @rule(data=st.data())
    def claim_again(self, data: st.DataObject) -> None:
        claims = [*[g[0] for g in self.grants.values()], *[r for r in self.parked if isinstance(r, ClaimRequest)]]
        if claims:
            request = data.draw(st.sampled_from(claims))
            granted = self.grants.get(request.claim_id)
            assert self.catalog.claim(request, self.now) == (granted[1] if granted else None)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        assert not self.catalog.cancel("nobody")
        if self.parked:
            request = data.draw(st.sampled_from(self.parked))
            assert self.catalog.cancel(identity(request))
            self.parked.remove(request)

    @rule(seconds=st.integers(0, 4))
    def advance(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        due = sorted((r for r in self.parked if r.deadline <= self.now), key=lambda r: r.deadline)
        self.parked = [r for r in self.parked if r.deadline > self.now]
        assert self.catalog.expire(self.now) == [ClaimAnswer(identity(r), timed_out=True) for r in due]

    @rule(name=partitions, task=tasks)
    def reset_task(self, name: str, task: str) -> None:
        if name not in self.partitions and self.strict:
            with pytest.raises(UnknownPartition):
                self.catalog.reset_task(name, task, self.now)
            return
        woken = self.catalog.reset_task(name, task, self.now)
        if name in self.partitions:
            for row in self.partitions[name].rows.values():
                row.claimed.discard(task)
            if task in self.partitions[name].claimed:
                self.partitions[name].claimed[task] = 0
        assert woken == (self.wake(name) if name in self.partitions else [])

    # A restart.

    @rule(moved=st.booleans())
    def restart(self, moved: bool) -> None:
        """Everything but the parked requests survives, whichever units hold the blocks now."""
        plain = take_snapshot(self.catalog)
        packed = msgpack.unpackb(msgpack.packb(plain), strict_map_key=False)
        if moved:
            self.block_units = {b: UNITS[b % 2] for b in self.block_units}
        restored = restore_snapshot(packed, self.block_units, self.catalog.strict)
        assert take_snapshot(restored) == plain
        self.catalog = restored
        for unit in UNITS:
            self.catalog.register_unit(unit, f"tcp://{unit}")
        self.parked = []

    # What holds at every moment.

    @invariant()
    def describes_what_the_model_holds(self) -> None:
        if not hasattr(self, "catalog"):
            return
        described = self.catalog.describe()
        assert described["repeated_batches"] == self.repeated
        assert set(described["partitions"]) == set(self.partitions)
        for name, partition in self.partitions.items():
            self.check_description(described["partitions"][name], name, partition)

    def check_description(self, described: dict[str, Any], name: str, partition: ModelPartition) -> None:
        assert described["rows"] == len(partition.rows)
        assert described["parked"] == sum(r.partition == name for r in self.parked)
        assert {f: d["dtype"] for f, d in described["fields"].items()} == partition.dtypes
        for f, d in described["fields"].items():
            shapes = [r.fields[f][2] for r in partition.rows.values() if f in r.fields]
            assert d["rows"] == len(shapes)
            assert d["shape"] == (list(shapes[0]) if len(set(shapes)) == 1 else None)
        assert {t: d["claimed"] for t, d in described["tasks"].items()} == partition.claimed
        assert self.catalog.produced(name) == Progress(partition.produced, partition.expected)
        for task, claimed in partition.claimed.items():
            assert self.catalog.consumed(name, task) == Progress(claimed, partition.expected)
        watched = {(t, frozenset(f)): n for t, d in described["tasks"].items() for f, n in d["available"]}
        assert watched == {(t, f): len(self.available(partition, t, f)) for t, f in partition.watched}

    @invariant()
    def knows_which_blocks_live(self) -> None:
        if not hasattr(self, "catalog"):
            return
        expected = {unit: {"blocks": 0, "rows": 0} for unit in UNITS}
        used = set(self.places())
        for block in {b for b, _ in used}:
            expected[self.block_units[block]]["blocks"] += 1
        for block, _ in used:
            expected[self.block_units[block]]["rows"] += 1
        found = {unit: {"blocks": 0, "rows": 0} for unit in UNITS} | self.catalog.describe()["blocks"]
        assert found == expected

    @invariant()
    def knows_the_next_deadline(self) -> None:
        if hasattr(self, "catalog"):
            assert self.catalog.next_deadline() == min((r.deadline for r in self.parked), default=None)


def identity(request: ClaimRequest | WaitRequest) -> str:
    return request.claim_id if isinstance(request, ClaimRequest) else request.wait_id


TestCatalogAgainstModel = CatalogMachine.TestCase
TestCatalogAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
