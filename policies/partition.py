"""One partition's table: its rows, their fields, tags and readers.

Layout, and why. What a controller does most is one row at a time, and there an element of a numpy array costs 60 ns
where a slot of an object costs 10; and all fields of a put lie at one position of one block. So the table is a dict
from key to `Row`, a row points at the block of its put (not at 16 entries, one per field), and readiness is an integer
with one bit per field: "has all of these" is one ``&``. Puts of one kind share a `Layout`, which was checked when the
first of them came and counts their rows' fixed shapes as one. There are no row numbers, so there is nothing to reuse
wrongly: a cleared row's object is dead, and its key's next row is another one.

Rules:

1. `admit` checks a publication and changes nothing; `apply` cannot fail. So a publish is all or nothing.
2. Fields come and rows go only through `apply` and `clear`, which tell the partition's readers (`policies.claims`).
3. A field has one dtype from its first value until the partition goes. A declared partition has no other fields.

Costs: lookup and tag O(1) per row; publish and clear O(1) per row and O(1) per row of each jagged field; O(fields) in
all when a kind of put comes for the first time, its last row goes, or a row loses some of its fields to another put.
None depends on the number of rows that live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import and_
from typing import Any

from policies.answers import MISSING, OK
from policies.blocks import Block, Field, Layout, Releases
from policies.claims import Consumers
from policies.columns import JAGGED
from policies.dtypes import storage_dtype
from policies.errors import DtypeConflict, DuplicateKey, Refused, UnknownField, WireError
from policies.locations import BlockSchema, Located, Publication, Read
from policies.rows import Row
from policies.shapes import JaggedShape, ShapeKeys, Shapes, uniform
from policies.where import predicate

REMEMBERED_LOOKUPS = 1_024
"""Lists of fields whose mask is kept at hand."""

REMEMBERED_LAYOUTS = 1_024
"""Kinds of put that are kept at hand, at least; those with live rows always are."""


class Partition:
    """``declared``: field → dtype of a partition that has these fields only, None for one that takes any.
    ``expected``: how many rows its producers will bring in all, if that is known."""

    def __init__(self, name: str, shapes: Shapes, declared: Mapping[str, str] | None, expected: int | None) -> None:
        self.name = name
        self.strict = declared is not None
        self.expected = expected
        self.rows: dict[str, Row] = {}
        self.fields: dict[str, Field] = {}
        self.consumers = Consumers()
        self.arrivals = 0
        self.produced = 0
        self._shapes = shapes
        self._layouts: dict[BlockSchema, Layout] = {}
        self._layouts_kept = REMEMBERED_LAYOUTS
        self._masks: dict[int, int] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._lookups: dict[tuple[str, ...], tuple[tuple[str, ...], int]] = {}
        for field, dtype in (declared or {}).items():
            self.add_field(field, dtype, declared=True)

    def add_field(self, name: str, dtype: str | None, declared: bool = False) -> Field:
        field = self.fields[name] = Field(name, 1 << len(self.fields), dtype, declared, {})
        return field

    def admit(self, publication: Publication) -> Sequence[ShapeKeys]:
        """The shape numbers of the publication's jagged fields. Raises a `Refused` that says what is wrong with it.

        A schema that was admitted before is not looked through again: fields keep their dtype.
        """
        rows, schema = len(publication.keys), publication.schema
        if rows != 1:
            self._check_keys(publication.keys)
        if publication.tags is not None and len(publication.tags) != rows:
            raise Refused(f"{len(publication.tags)} tags came for {rows} keys of partition {self.name!r}")
        if len(publication.lengths) != schema.jagged:
            raise Refused(
                f"{len(publication.lengths)} lengths came for {schema.jagged} jagged fields of partition {self.name!r}"
            )
        known = self._layouts.get(schema)
        if known is not None and not schema.jagged:
            return ()
        return self._number(publication, self._look_through(publication) if known is None else known.shapes)

    def _look_through(self, publication: Publication) -> list[JaggedShape]:
        """The jagged shapes of a schema that has not been admitted before; raises what is wrong with any field."""
        jagged = []
        for name, dtype, shape in publication.schema.fields:
            try:
                self._check_dtype(name, dtype)
                if JAGGED in shape:
                    jagged.append(self._shapes.jagged(shape))
                else:
                    self._shapes.number(shape)
            except Refused as error:
                raise self._refused(publication, name, error) from None
        return jagged

    def _number(self, publication: Publication, jagged: Sequence[JaggedShape]) -> list[ShapeKeys]:
        rows, lengths, numbers = len(publication.keys), publication.lengths, self._shapes.numbers
        numbered: list[ShapeKeys] = []
        try:
            for shape, length in zip(jagged, lengths, strict=True):
                numbered.append(numbers(shape, length, rows))
        except Refused as error:
            names = [name for name, _, shape in publication.schema.fields if JAGGED in shape]
            raise self._refused(publication, names[len(numbered)], error) from None
        return numbered

    def _refused(self, publication: Publication, name: str, error: Refused) -> Refused:
        """The same refusal, saying where."""
        key, others = publication.keys[0], len(publication.keys) - 1
        rows = f"key {key!r} and {others} more rows" if others else f"key {key!r}"
        where = f"partition {self.name!r}, field {name!r}, {rows}"
        return type(error)(f"{where}: {error.message}", **{**error.details, "field": name, "key": key})

    def _check_keys(self, keys: Sequence[str]) -> None:
        if not keys:
            raise Refused(f"a batch without keys for partition {self.name!r}")
        seen: set[str] = set()
        for key in keys if len(set(keys)) != len(keys) else ():
            if key in seen:
                raise DuplicateKey(
                    f"one batch for partition {self.name!r} names key {key!r} more than once; it must name each of its "
                    f"{len(keys)} keys once",
                    key=key,
                )
            seen.add(key)

    def _check_dtype(self, name: str, dtype: str) -> None:
        field = self.fields.get(name)
        if field is not None and field.dtype == dtype:
            return
        if field is not None and field.dtype is not None:
            raise DtypeConflict(
                f"the field holds {field.dtype} and {dtype} came; convert the rows, or use another field",
                found=field.dtype,
                came=dtype,
            )
        self.require_declared([name])
        try:
            storage_dtype(dtype)
        except WireError as error:
            raise Refused(error.message) from None

    def require_declared(self, names: Sequence[str]) -> None:
        """`UnknownField` when this partition declares its fields and one of ``names`` is none of them."""
        for name in names if self.strict else ():
            if name not in self.fields:
                raise UnknownField(
                    f"partition {self.name!r} has no field {name!r}; it was created with "
                    f"{', '.join(map(repr, self.fields)) or 'no fields'}",
                    field=name,
                )

    def layout(self, schema: BlockSchema) -> Layout:
        """The layout of an admitted schema; fields that are new begin here."""
        return self._layouts.get(schema) or self._new_layout(schema)

    def _new_layout(self, schema: BlockSchema) -> Layout:
        fields, fixed, jagged, shapes = [], [], [], []
        for name, dtype, shape in schema.fields:
            field = self.fields.get(name) or self.add_field(name, dtype)
            field.dtype = dtype
            fields.append(field)
            if JAGGED in shape:
                jagged.append(field)
                shapes.append(self._shapes.jagged(shape))
            else:
                fixed.append((field, self._shapes.number(shape)))
        layout = self._layouts[schema] = Layout(schema, tuple(fields), tuple(fixed), tuple(jagged), tuple(shapes))
        if len(self._layouts) > self._layouts_kept:
            self._layouts = {schema: kept for schema, kept in self._layouts.items() if kept.rows or kept is layout}
            self._layouts_kept = max(REMEMBERED_LAYOUTS, 2 * len(self._layouts))
        return layout

    def apply(self, publication: Publication, block: Block, releases: Releases) -> None:
        """Make an admitted publication visible: ``block`` serves its fields from now on (unless it has none)."""
        keys, mask = publication.keys, block.layout.mask
        if mask:
            block.layout.came(block.rows, block.shapes)
        rows, arrivals = self.rows, self.arrivals
        new: list[Row] = []
        for position, key in enumerate(keys):
            row = rows.get(key)
            if row is None:
                row = rows[key] = Row(key, arrivals, mask, block if mask else None, position)
                arrivals += 1
                new.append(row)
            elif mask:
                self._put_again(row, block, position, releases)
        self.arrivals = arrivals
        if new:
            self._count(mask, len(new))
            self.produced += len(new) if mask else 0
        if publication.tags is not None:
            self._merge_tags(keys, publication.tags)
        if not self.consumers.idle:
            self.consumers.came(new)

    def _put_again(self, row: Row, block: Block, position: int, releases: Releases) -> None:
        before = row.mask
        row.put(block, position, releases)
        if row.mask != before:
            self._count(before, -1)
            self._count(row.mask, 1)
            self.produced += not before
            if not self.consumers.idle:
                self.consumers.grew(row, before)

    def _count(self, mask: int, rows: int) -> None:
        left = self._masks.get(mask, 0) + rows
        if left:
            self._masks[mask] = left
        else:
            del self._masks[mask]

    def _merge_tags(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any] | None]) -> None:
        for key, given in zip(keys, tags, strict=True):
            if given:
                row = self.rows[key]
                row.tags = {**row.tags, **given} if row.tags else dict(given)
                if not self.consumers.idle:
                    self.consumers.retagged(row)

    def locate(self, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
        """Where the rows are. ``fields`` None: those that all found rows have. O(keys), whatever the fields."""
        rows = self.rows
        names, want = self._common(keys) if fields is None else self._asked(tuple(fields))
        causes: dict[str, str] = {}
        groups: dict[tuple[Block, int], tuple[list[int], list[int]]] = {}
        for index, key in enumerate(keys):
            row = rows.get(key)
            if row is None or row.mask & want != want:
                causes[key] = self._cause(row, names)
            elif row.more is not None:
                for block, position, mask in row.places():
                    if mask & want:
                        _gather(groups, (block, mask & want), position, index)
            elif want and row.block is not None:
                _gather(groups, (row.block, want), row.position, index)
        reads = [
            Read(block.unit, block.id, names if mask == want else self.names(mask), positions, indices)
            for (block, mask), (positions, indices) in groups.items()
        ]
        verdicts = tuple([MISSING if key in causes else OK for key in keys]) if causes else (OK,) * len(keys)
        return Located(verdicts, causes, names, tuple(reads))

    def _common(self, keys: Sequence[str]) -> tuple[tuple[str, ...], int]:
        """The fields that all rows found under ``keys`` have, and their mask."""
        masks = [row.mask for row in map(self.rows.get, keys) if row is not None]
        want = reduce(and_, masks) if masks else 0
        return self.names(want), want

    def names(self, mask: int) -> tuple[str, ...]:
        """The fields of a mask, oldest first."""
        names = self._names.get(mask)
        if names is None:
            names = self._names[mask] = tuple(name for name, field in self.fields.items() if field.bit & mask)
        return names

    def mask(self, names: Sequence[str]) -> int:
        """The mask of fields that a reader names, including such as have no value yet. Raises `UnknownField`."""
        self.require_declared(names)
        return sum((self.fields.get(name) or self.add_field(name, None)).bit for name in dict.fromkeys(names))

    def _asked(self, fields: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
        """The fields of a lookup, each once, and their mask; an unknown field is a bit that no row has."""
        asked = self._lookups.get(fields)
        if asked is None:
            names = tuple(dict.fromkeys(fields))
            known = [self.fields[name].bit for name in names if name in self.fields]
            if len(known) < len(names):
                return names, sum(known) | 1 << len(self.fields)
            if len(self._lookups) >= REMEMBERED_LOOKUPS:
                self._lookups.clear()
            asked = self._lookups[fields] = (names, sum(known))
        return asked

    def _cause(self, row: Row | None, names: Sequence[str]) -> str:
        if row is None:
            return f"partition {self.name!r} has no such key"
        lacking = [name for name in names if name not in self.fields or not row.mask & self.fields[name].bit]
        return f"the row has no value in field {', '.join(map(repr, lacking))}"

    def clear(self, keys: Sequence[str], releases: Releases) -> tuple[int, tuple[str, ...]]:
        """Remove rows: how many went, and the keys that were not there. O(1) per row and field."""
        unknown: list[str] = []
        masks: dict[int, int] = {}
        pop, consumers = self.rows.pop, self.consumers
        for key in dict.fromkeys(keys):
            row = pop(key, None)
            if row is None:
                unknown.append(key)
                continue
            mask = row.mask
            masks[mask] = masks.get(mask, 0) + 1
            row.clear(releases)
            if not consumers.idle:
                consumers.went(row)
        for mask, rows in masks.items():
            self._count(mask, -rows)
        return sum(masks.values()), tuple(unknown)

    def tag(self, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], merge: bool) -> None:
        """Set or merge tags; a key that is not there becomes a row that has only tags."""
        new: list[Row] = []
        for key, given in zip(keys, tags, strict=True):
            row = self.rows.get(key)
            if row is None:
                row = self.rows[key] = Row(key, self.arrivals)
                self.arrivals += 1
                new.append(row)
            row.tags = {**row.tags, **given} if merge and row.tags else dict(given)
            if not self.consumers.idle:
                self.consumers.retagged(row)
        if new:
            self._count(0, len(new))

    def list_keys(self, where: Mapping[str, Any] | None) -> list[tuple[str, dict[str, Any]]]:
        """(key, tags) of the rows that match ``where``, in order of arrival. O(rows)."""
        matches = predicate(where)
        return [(row.key, dict(row.tags or {})) for row in self.rows.values() if matches(row.tags or {})]

    def ready(self, want: int) -> int:
        """How many rows have all fields of ``want``. O(different sets of fields that rows have)."""
        return sum(rows for mask, rows in self._masks.items() if mask & want == want)

    def restore_row(self, row: Row) -> None:
        """Take in a row of a snapshot; its block's shapes are counted for the fields it serves."""
        self.rows[row.key] = row
        self._count(row.mask, 1)
        for block, position, mask in row.places():
            block.layout.restored(block, position, mask)

    def describe(self) -> dict[str, Any]:
        """Plain: fields with dtype, rows and row shape (None: rows differ, or there are none); counts; tasks, and for
        each list of fields and sampler that a task claims with, the rows that it could give."""
        fields = {}
        for field in self.fields.values():
            shape = uniform(field.counts)
            fields[field.name] = {
                "dtype": field.dtype,
                "shape": None if shape is None else list(self._shapes.shape(shape)),
                "rows": self.ready(field.bit),
                "declared": field.declared,
            }
        tasks = {
            task.name: {
                "claimed": task.claimed,
                "watches": [
                    {"fields": list(self.names(w.want)), "sampler": w.spec.to_plain(), "available": w.available}
                    for w in task.watches.values()
                ],
            }
            for task in self.consumers.tasks.values()
        }
        return {
            "fields": {name: field for name, field in fields.items() if field["dtype"] is not None},
            "rows": len(self.rows),
            "produced": self.produced,
            "expected": self.expected,
            "parked": self.consumers.parked,
            "tasks": tasks,
        }


def _gather(
    groups: dict[tuple[Block, int], tuple[list[int], list[int]]], key: tuple[Block, int], position: int, index: int
) -> None:
    group = groups.get(key)
    if group is None:
        groups[key] = ([position], [index])
    else:
        group[0].append(position)
        group[1].append(index)
