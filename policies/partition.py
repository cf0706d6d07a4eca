"""One partition's table: its rows, their fields, tags and readers.

Layout, and why. What a controller does most is one row at a time, and there an element of a numpy array costs 60 ns
where a slot of an object costs 10; and all fields of a put lie at one position of one block. So the table is a dict
from key to `Row`, a row points at the block of its put (not at 16 entries, one per field), and readiness is an integer
with one bit per field: "has all of these" is one ``&``. The shapes of a batch are numbered by one addition per field.
There are no row numbers, so there is nothing to reuse wrongly: a cleared row's object is dead, and its key's next row
is another one.

Rules:

1. `admit` checks a publication and changes nothing; `apply` cannot fail. So a publish is all or nothing.
2. Fields come and rows go only through `apply` and `clear`, which tell the partition's readers (`policies.claims`).
3. A field has one dtype from its first value until the partition goes. A declared partition has no other fields.

Costs: lookup, clear and tag O(1) per row (and per field of a cleared row); publish O(fields) per batch, O(1) per row,
and O(1) per row of each field whose rows differ in shape. None depends on the number of rows that live.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from policies.answers import MISSING, OK
from policies.blocks import Block, Field, Layout, Releases
from policies.claims import Consumers
from policies.dtypes import storage_dtype
from policies.errors import DtypeConflict, DuplicateKey, Refused, UnknownField, WireError
from policies.locations import FieldSchema, Located, Publication, Read
from policies.rows import Row
from policies.shapes import ShapeKeys, Shapes, add_rows, uniform
from policies.where import predicate

REMEMBERED_LOOKUPS = 1_024
"""Lists of fields whose mask is kept at hand."""

REMEMBERED_SCHEMAS = 1_024
"""Fields without lengths that were looked through and are kept at hand."""


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
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._masks: dict[int, int] = {}
        self._names: dict[int, tuple[str, ...]] = {}
        self._admitted: dict[tuple[FieldSchema, ...], tuple[tuple[str, ...], Sequence[ShapeKeys]]] = {}
        self._lookups: dict[tuple[str, ...], tuple[tuple[str, ...], int]] = {}
        for field, dtype in (declared or {}).items():
            self.add_field(field, dtype, declared=True)

    def add_field(self, name: str, dtype: str | None, declared: bool = False) -> Field:
        field = self.fields[name] = Field(name, 1 << len(self.fields), dtype, declared, {})
        return field

    def admit(self, publication: Publication) -> Sequence[ShapeKeys]:
        """The shape numbers of every field of the publication. Raises a `Refused` that says what is wrong with it.

        A publication made of the same schema objects as one before it (`publication_from_plain` shares them) is not
        looked through again. What is admitted must be applied before anything else is.
        """
        keys, rows = publication.keys, len(publication.keys)
        if rows != 1:
            self._check_keys(keys)
        if publication.tags is not None and len(publication.tags) != rows:
            raise Refused(f"{len(publication.tags)} tags came for {rows} keys of partition {self.name!r}")
        fields = publication.fields
        schemas = tuple(fields.values())
        admitted = self._admitted.get(schemas)
        if admitted is not None and admitted[0] == tuple(fields):
            return admitted[1]
        shapes: list[ShapeKeys] = []
        known, number, name, dense = self.fields, self._shapes.keys, "", True
        try:
            for name, schema in fields.items():
                field = known.get(name)
                if field is None or field.dtype != schema.dtype:
                    self._check_dtype(name, field, schema)
                dense = dense and schema.lengths is None
                shapes.append(number(schema.shape, schema.lengths, rows))
        except Refused as error:
            where = f"partition {self.name!r}, field {name!r}, rows of key {keys[0]!r} and {rows - 1} more"
            details = {**error.details, "field": name, "key": keys[0]}
            raise type(error)(f"{where}: {error.message}", **details) from None
        if dense:
            if len(self._admitted) >= REMEMBERED_SCHEMAS:
                self._admitted.clear()
            self._admitted[schemas] = (tuple(fields), shapes)
        return shapes

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

    def _check_dtype(self, name: str, field: Field | None, schema: FieldSchema) -> None:
        if field is not None and field.dtype is not None:
            raise DtypeConflict(
                f"the field holds {field.dtype} and {schema.dtype} came; convert the rows, or use another field",
                found=field.dtype,
                came=schema.dtype,
            )
        self.require_declared([name])
        try:
            storage_dtype(schema.dtype)
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

    def layout(self, fields: Mapping[str, FieldSchema]) -> Layout:
        """The layout of an admitted publication; fields that are new begin here."""
        names = tuple(fields)
        layout = self._layouts.get(names)
        if layout is None:
            for name, schema in fields.items():
                field = self.fields.get(name) or self.add_field(name, schema.dtype)
                field.dtype = schema.dtype
            layout = self._layouts[names] = Layout.of(tuple(self.fields[name] for name in names))
        return layout

    def apply(self, publication: Publication, block: Block, releases: Releases) -> None:
        """Make an admitted publication visible: ``block`` serves its fields from now on (unless it has none)."""
        keys, mask = publication.keys, block.layout.mask
        add_rows(block.layout.counts, block.shapes, block.rows)
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

    def locate(self, keys: Sequence[str], fields: Sequence[str] | None) -> Located:
        """Where the rows are. ``fields`` None: those that all found rows have. O(keys), whatever the fields."""
        rows = self.rows
        found = [rows.get(key) for key in keys]
        if fields is None:
            masks = [row.mask for row in found if row is not None]
            want = masks[0] if masks else 0
            for mask in masks:
                want &= mask
            names = self.names(want)
        else:
            names, want = self._asked(tuple(fields))
        causes: dict[str, str] = {}
        verdicts: list[str] = []
        groups: dict[tuple[Block, int], tuple[list[int], list[int]]] = {}
        for index, row in enumerate(found):
            if row is None or row.mask & want != want:
                verdicts.append(MISSING)
                causes[keys[index]] = self._cause(row, names)
                continue
            verdicts.append(OK)
            if row.more is None:
                parts = [(row.block, row.position, want)] if row.block is not None and want else ()
            else:
                parts = [(p.block, p.position, p.mask & want) for p in row.places() if p.mask & want]
            for block, position, mask in parts:
                group = groups.get((block, mask))
                if group is None:
                    group = groups[block, mask] = ([], [])
                group[0].append(position)
                group[1].append(index)
        reads = [
            Read(block.unit, block.id, self.names(mask), np.array(positions, np.int64), np.array(indices, np.int64))
            for (block, mask), (positions, indices) in groups.items()
        ]
        return Located(tuple(verdicts), causes, names, tuple(reads))

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
        removed, rows, consumers = 0, self.rows, self.consumers
        for key in dict.fromkeys(keys):
            row = rows.pop(key, None)
            if row is None:
                unknown.append(key)
                continue
            removed += 1
            row.clear(releases)
            self._count(row.mask, -1)
            if not consumers.idle:
                consumers.went(row)
        return removed, tuple(unknown)

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
            for field, numbers in zip(block.layout.fields, block.shapes, strict=True):
                if mask & field.bit:
                    add_rows([field.counts], [numbers if isinstance(numbers, int) else int(numbers[position])], 1)

    def describe(self) -> dict[str, Any]:
        """Plain: fields with dtype, rows and row shape (None: rows differ, or there are none); tasks; counts."""
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
                "available": [[list(self.names(w.want)), w.available] for w in task.watches.values()],
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
