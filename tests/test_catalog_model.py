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

from policies.answers import Progress
from policies.blocks import Frees
from policies.catalog import Catalog
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest, WaitRequest
from policies.errors import DtypeConflict, DuplicateKey, KeyMissing, Refused, UnknownField, UnknownPartition
from policies.locations import FieldSchema, Located, Publication, UnitLocation
from policies.sampling import SEQUENTIAL, SamplerSpec, balanced, groups, ranks, staleness
from tests.naive_samplers import Given, NotThis, naive

UNITS = ("u0", "u1")
DECLARED = {"ids": "int64", "score": "float32"}
DTYPES = {"ids": "int64", "lp": "float32", "score": "float32"}

partitions = st.sampled_from(["train"] * 6 + ["staging", "declared"])
key = st.sampled_from([f"g{g}_s{s}" for g in range(2) for s in range(3)])
keys = st.lists(key, min_size=1, max_size=6)
distinct_keys = st.lists(key, min_size=1, max_size=6, unique=True)
field_names = st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=2, unique=True)
tag_values = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["a", "b"]),
        "version": st.integers(0, 3),
        "group": st.sampled_from(["g0", "g1", 2]),
    },
)
SAMPLERS = [
    groups(2),
    groups(3),
    balanced(2, "ids"),
    staleness(),
    staleness(of=groups(2)),
    staleness(of=groups(3)),
    ranks(2),
    ranks(2, "same"),
    ranks(2, of=staleness(of=groups(2))),
    ranks(2, balance="ids", of=groups(2)),
    balanced(2, "ids", of=ranks(2, "same")),
]
tasks = st.sampled_from(["actor", "critic"])
shape = st.sampled_from([(), (3,), (-1,), (-1, 2), (2, -1), (2, 3)])


ROW_NAMES = [f"r{i}" for i in range(7)]
row_tags = st.fixed_dictionaries(
    {"group": st.sampled_from(["g0", "g1", "g0", "g1", None]), "version": st.sampled_from([0, 1, 1, 1, 2, None])}
)


@dataclass(eq=False)
class ModelRow:
    key: str
    arrival: int
    gone: bool = False
    fields: dict[str, tuple[int, int, tuple[int, ...]]] = field(default_factory=dict)
    tags: dict[str, Any] = field(default_factory=dict)
    claimed: set[str] = field(default_factory=set)

    def length(self, name: str) -> int:
        shape = self.fields[name][2]
        return shape[0] if shape else 1


Watch = tuple[str, frozenset[str], SamplerSpec]


@dataclass
class ModelPartition:
    declared: dict[str, str] | None = None
    expected: int | None = None
    dtypes: dict[str, str] = field(default_factory=dict)
    rows: dict[str, ModelRow] = field(default_factory=dict)
    produced: int = 0
    claimed: dict[str, int] = field(default_factory=dict)
    arrivals: int = 0
    watches: dict[Watch, Any] = field(default_factory=dict)

    def row(self, key: str) -> ModelRow:
        """The row of this key, a new one if there is none."""
        if key not in self.rows:
            self.rows[key] = ModelRow(key, self.arrivals)
            self.arrivals += 1
        return self.rows[key]

    def ready(self, row: ModelRow, watch: Watch) -> bool:
        task, fields, _ = watch
        return not row.gone and fields <= set(row.fields) and task not in row.claimed

    def sync(self, row: ModelRow, task: str | None = None) -> None:
        """Something happened to the row: every sampler (of the task) looks at it."""
        for watch, sampler in self.watches.items():
            if task in (None, watch[0]):
                sampler.sync(row, self.ready(row, watch))

    def watch(self, watch: Watch) -> Any:
        if watch not in self.watches:
            self.watches[watch] = naive(watch[2])
            for row in self.rows.values():
                self.watches[watch].sync(row, self.ready(row, watch))
        return self.watches[watch]


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
        self.given: dict[str, tuple[ModelPartition, Any, Given]] = {}
        self.repeated = 0
        self.now = 0.0
        self.numbers = itertools.count()

    @initialize(strict=st.booleans())
    def start(self, strict: bool) -> None:
        self.strict = strict
        self.catalog = Catalog(strict)
        for unit in UNITS:
            self.catalog.register_unit(unit, UnitLocation(f"tcp://{unit}"))
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
        watch = watch_of(request)
        sampler = partition.watch(watch)
        try:
            given = sampler.draw([r for r in partition.rows.values() if partition.ready(r, watch)], request.demand)
        except NotThis:
            return ClaimAnswer(request.claim_id, error=Refused("as it was asked"))
        if given is None:
            return None
        for row in given.taken:
            row.claimed.add(request.task)
        for row in given.taken:
            for other, theirs in partition.watches.items():
                if other[0] == request.task and theirs is not sampler:
                    theirs.sync(row, False)
        partition.claimed[request.task] += len(given.taken)
        answer = ClaimAnswer(
            request.claim_id,
            tuple(row.key for row in given.rows),
            tuple((row.key, "") for row in [*given.skipped, *given.lost]),
            tuple(map(tuple, given.parts)),
        )
        self.grants[request.claim_id] = (request, answer)
        self.given[request.claim_id] = (partition, sampler, given)
        return answer

    def wake(self, name: str) -> list[ClaimAnswer]:
        """The first parked request that can be answered is, again and again until none can be."""
        woken: dict[str, ClaimAnswer] = {}
        order = [identity(request) for request in self.parked]
        while True:
            for request in self.parked:
                if request.partition == name and request.deadline > self.now:
                    answer = self.attempt(request)
                    if answer is not None:
                        woken[identity(request)] = answer
                        self.parked.remove(request)
                        break
            else:
                return [woken[request] for request in order if request in woken]

    def check_frees(self, frees: Frees, before: set[tuple[int, int]]) -> None:
        """Exactly the positions that were in use before and are not now are told free, to the unit that has them."""
        told = [
            (unit, block, position)
            for unit, entries in frees.items()
            for block, positions in entries
            for position in positions
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
        self.carry_out(Publication.of(f"b{number}", unit, number, name, tuple(batch), fields, tags))

    def carry_out(self, publication: Publication) -> None:
        number, name = publication.block, publication.partition
        refusal = self.refusal(publication)
        self.batches[publication.batch_id] = (publication, refusal)
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.publish(publication, self.now)
            return
        before = set(self.places()) | {(number, i) for i in range(len(publication.keys))}
        self.block_units[number] = publication.unit
        published = self.catalog.publish(publication, self.now)
        assert published.applied
        self.apply(publication)
        self.check_frees(published.frees, before)
        assert_same(published.woken, self.wake(name))

    def apply(self, p: Publication) -> None:
        partition = self.partitions.setdefault(p.partition, ModelPartition())
        for name, schema in fields_of(p).items():
            partition.dtypes.setdefault(name, schema.dtype)
        there = [k for k in p.keys if k in partition.rows]
        for i, k in enumerate(p.keys):
            row = partition.row(k)
            partition.produced += bool(p.schema.fields) and not row.fields
            for name, schema in fields_of(p).items():
                length = 0 if schema.lengths is None else int(schema.lengths[i])
                row.fields[name] = (p.block, i, tuple(length if n == -1 else n for n in schema.shape))
            if k in there:
                partition.sync(row)
        for k, tags in zip(p.keys, p.tags or (), strict=p.tags is not None):
            partition.rows[k].tags |= tags or {}
            if k in there:
                partition.sync(partition.rows[k])
        for k in p.keys:
            partition.sync(partition.rows[k])

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
        told = {(b, p) for entries in published.frees.values() for b, ps in entries for p in ps}
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
        partition = self.partitions.setdefault(name, ModelPartition())
        for k, tag in zip(asked, given, strict=True):
            row = partition.row(k)
            row.tags = row.tags | tag if merge else dict(tag)
            partition.sync(row)
        assert_same(self.catalog.woken(name, self.now), self.wake(name))

    @rule(name=partitions, asked=keys)
    def clear(self, name: str, asked: list[str]) -> None:
        before = set(self.places())
        cleared = self.catalog.clear(name, asked)
        rows = self.partitions[name].rows if name in self.partitions else {}
        gone = [k for k in dict.fromkeys(asked) if k in rows]
        for k in gone:
            row = rows.pop(k)
            row.gone = True
            self.partitions[name].sync(row)
        assert cleared.removed == len(gone)
        assert cleared.unknown == tuple(k for k in dict.fromkeys(asked) if k not in gone)
        self.check_frees(cleared.frees, before)
        assert_same(self.catalog.woken(name, self.now), self.wake(name))

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

    @rule(
        name=partitions,
        task=tasks,
        fields=field_names,
        count=st.integers(1, 5),
        patience=st.integers(0, 6),
        sampler=st.one_of(st.just(SEQUENTIAL), st.sampled_from(SAMPLERS)),
        right=st.integers(0, 9),
        rank=st.integers(0, 1),
        oldest=st.integers(0, 3),
    )
    def claim(
        self,
        name: str,
        task: str,
        fields: list[str],
        count: int,
        patience: int,
        sampler: SamplerSpec,
        right: int,
        rank: int,
        oldest: int,
    ) -> None:
        """``right`` 0: as it comes; else the demand is made to fit the sampler."""
        fitting, names = naive(sampler), str(sampler)
        if right:
            fields = list(dict.fromkeys([*fields, *fitting.fields]))
            count = fitting.run * (1 + count % 2) if fitting.run > 1 or "balanced" in names else count
        request = ClaimRequest(
            f"c{next(self.numbers)}",
            name,
            task,
            tuple(fields),
            count,
            self.now + patience,
            sampler,
            rank if not right or "ranks" in names else None,
            oldest if not right or "staleness" in names else None,
        )
        self.carry_out_claim(request)

    def carry_out_claim(self, request: ClaimRequest) -> None:
        name, task, fields, fitting = request.partition, request.task, request.fields, naive(request.sampler)
        refusal = self.reader_refusal(name, fields)
        try:
            fitting.check(request.demand)
        except NotThis:
            refusal = refusal or Refused
        if not fitting.fields <= set(fields):
            refusal = refusal or Refused
        if refusal is not None:
            with pytest.raises(refusal):
                self.catalog.claim(request, self.now)
            return
        partition = self.partitions.setdefault(name, ModelPartition())
        partition.claimed.setdefault(task, 0)
        expected = self.ask(request)
        if expected is not None and expected.error is not None:
            with pytest.raises(Refused, match="all ranks must ask"):
                self.catalog.claim(request, self.now)
        else:
            assert_same([self.catalog.claim(request, self.now)], [expected])
        assert_same(self.catalog.woken(name, self.now), self.wake(name))

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        claim_id = data.draw(st.sampled_from(sorted(self.given)))
        request, _ = self.grants.pop(claim_id)
        partition, sampler, given = self.given.pop(claim_id)
        woken = self.catalog.give_back(claim_id, self.now)
        if self.partitions.get(request.partition) is not partition:
            assert woken == ()
            return
        if partition.watches[watch_of(request)] is sampler:
            back = [row for row in sampler.give_back(request.demand, given) if not row.gone]
            for row in back:
                row.claimed.remove(request.task)
            partition.claimed[request.task] -= len(back)
            for row in back:
                partition.sync(row, request.task)
        assert_same(woken, self.wake(request.partition))

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

    def reader_refusal(self, name: str, fields: Iterable[str]) -> type[Refused] | None:
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
            assert_same([self.catalog.claim(request, self.now)], [granted[1] if granted else None])

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
            for watch in [watch for watch in self.partitions[name].watches if watch[0] == task]:
                self.partitions[name].watches[watch] = naive(watch[2])
            for row in self.partitions[name].rows.values():
                self.partitions[name].sync(row, task)
        assert_same(woken, self.wake(name) if name in self.partitions else [])

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
            self.catalog.register_unit(unit, UnitLocation(f"tcp://{unit}"))
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
        watched = {
            (task, frozenset(watch["fields"]), SamplerSpec.from_plain(watch["sampler"]), watch["available"])
            for task, described_task in described["tasks"].items()
            for watch in described_task["watches"]
        }
        assert watched == {(t, f, spec, len(self.available(partition, t, f))) for t, f, spec in partition.watches}

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


def watch_of(request: ClaimRequest) -> Watch:
    return request.task, frozenset(request.fields), request.sampler


def assert_same(found: Iterable[ClaimAnswer | None], expected: Iterable[ClaimAnswer | None]) -> None:
    """Equal but for the wording of reasons and errors."""
    assert [_outline(answer) for answer in found] == [_outline(answer) for answer in expected]


def _outline(answer: ClaimAnswer | None) -> Any:
    if answer is None:
        return None
    skipped = [key for key, _ in answer.skipped]
    return answer.claim_id, answer.keys, skipped, answer.parts, answer.timed_out, type(answer.error)


class SamplerMachine(CatalogMachine):
    """The same model, with one sampler in each run and little else: groups fill up, ranks ask in any order, rows are
    retagged, cleared and taken away through another watch of the task."""

    publish = publish_again = tag = clear = drop = create_partition = locate = tags = list_keys = None  # type: ignore
    claim = wait = claim_again = cancel = None  # type: ignore

    @initialize(strict=st.just(False), spec=st.sampled_from(SAMPLERS))
    def start(self, strict: bool, spec: SamplerSpec) -> None:
        self.spec = spec
        self.strict = strict
        self.catalog = Catalog(strict)
        self.catalog.register_unit("u0", UnitLocation("tcp://u0"))
        self.create("train", None, None)

    @rule(batch=st.lists(st.sampled_from(ROW_NAMES), min_size=1, max_size=3, unique=True), data=st.data())
    def put(self, batch: list[str], data: st.DataObject) -> None:
        """Most rows of a kind arrive as they should be, so that there is something to claim."""
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=len(batch), max_size=len(batch)))
        tags = data.draw(st.tuples(*(row_tags for _ in batch)))
        number = next(self.numbers)
        fields = {"ids": FieldSchema("int64", (-1,), np.array(lengths, np.int64))}
        self.carry_out(Publication.of(f"b{number}", "u0", number, "train", tuple(batch), fields, tags))

    @rule(key=st.sampled_from(ROW_NAMES), tags=row_tags)
    def retag(self, key: str, tags: dict[str, Any]) -> None:
        CatalogMachine.tag(self, "train", [key], [tags], False, True)

    @rule(key=st.sampled_from(ROW_NAMES))
    def clear_row(self, key: str) -> None:
        CatalogMachine.clear(self, "train", [key])

    @rule(
        steps=st.integers(1, 2), rank=st.integers(0, 1), oldest=st.integers(0, 2), patience=st.sampled_from([0, 0, 9])
    )
    def claim_rows(self, steps: int, rank: int, oldest: int, patience: int) -> None:
        names, run = str(self.spec), naive(self.spec).run
        least = 2 if "balanced" in names else 1
        self.carry_out_claim(
            ClaimRequest(
                f"c{next(self.numbers)}",
                "train",
                "actor",
                ("ids",),
                run * max(steps, least),
                self.now + patience,
                self.spec,
                rank if "ranks" in names else None,
                oldest if "staleness" in names else None,
            )
        )

    @rule()
    def claim_elsewhere(self) -> None:
        """Another watch of the task takes the oldest row."""
        number = next(self.numbers)
        self.carry_out_claim(ClaimRequest(f"c{number}", "train", "actor", ("ids",), 1, self.now))

    @rule(sure=st.integers(0, 3))
    def reset_actor(self, sure: int) -> None:
        if not sure:
            CatalogMachine.reset_task(self, "train", "actor")

    reset_task = None  # type: ignore


TestCatalogAgainstModel = CatalogMachine.TestCase
TestCatalogAgainstModel.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

TestSamplersAgainstModel = SamplerMachine.TestCase
TestSamplersAgainstModel.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
