"""The controller's block table: which unit holds a block, and which of its rows live.

A block is the rows of one put. All its fields live at one position of one block, so what the controller must remember
of a put is one small record, shared by all its rows and fields. A block leaves the table when its last row goes.

`Releases` gathers what one operation lets go of and settles it by block: shape counts go down, and the units' share of
the work comes out as `Frees`. A position is freed when the last of its fields is let go, exactly once.

Costs: O(1) per row and field let go, whatever the number of rows or blocks that live.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from policies.locations import BlockSchema
from policies.shapes import JaggedShape, ShapeCounts, ShapeKeys, count, count_rows, discount_rows

Frees = Mapping[str, list[tuple[int, list[int]]]]
"""What units are to be told to forget: unit → [(block, positions)]; a block may occur more than once."""

NOTHING: Frees = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Field:
    """A column of a partition. ``bit`` is its place in readiness masks, a power of two. ``dtype`` is None until the
    first value comes; then it stays for the life of the partition."""

    name: str
    bit: int
    dtype: str | None
    declared: bool
    counts: ShapeCounts


class Layout:
    """One kind of put in a partition: its fields, and the shapes that all its rows have.

    A row that still has *all* fields of its put is whole, and whole rows are only counted together, in ``rows``: as
    long as there are any, the layout holds each fixed shape once in its field's counts. So a row of 16 fields of fixed
    shape comes and goes at the cost of one. A row that lost some of its fields to another put is counted field by field
    from then on. Shapes of jagged fields, which rows need not share, are counted row by row from the start.
    """

    __slots__ = ("fields", "fixed", "jagged", "mask", "rows", "schema", "shapes")

    def __init__(
        self,
        schema: BlockSchema,
        fields: tuple[Field, ...],
        fixed: tuple[tuple[Field, int], ...],
        jagged: tuple[Field, ...],
        shapes: tuple[JaggedShape, ...],
    ) -> None:
        """``fixed``: the fields whose rows all have one shape, and its number. ``jagged``: all others, which have
        ``shapes``."""
        self.schema, self.fields, self.fixed, self.jagged, self.shapes = schema, fields, fixed, jagged, shapes
        self.mask = sum(field.bit for field in fields)
        self.rows = 0

    def came(self, rows: int, numbers: Sequence[ShapeKeys]) -> None:
        """A block of ``rows`` whole rows came; ``numbers[i]`` are its shapes in jagged field i."""
        self._count_whole(rows)
        for field, keys in zip(self.jagged, numbers, strict=True):
            count_rows(field.counts, keys, rows)

    def went(self, block: Block, positions: Sequence[int], had: int, lost: int) -> None:
        """Rows of ``block`` that had the fields ``had`` of this layout lost those in ``lost``."""
        rows = len(positions)
        if had == self.mask:
            self._count_whole(-rows)
            change, by = had & ~lost, rows
        else:
            change, by = lost, -rows
        if change:
            for field, number in self.fixed:
                if field.bit & change:
                    count(field.counts, number, by)
        for field, keys in zip(self.jagged, block.shapes, strict=True):
            if field.bit & lost:
                discount_rows(field.counts, keys, positions)

    def restored(self, block: Block, position: int, mask: int) -> None:
        """A row of a snapshot has the fields ``mask`` at ``position`` of ``block``."""
        if mask == self.mask:
            self._count_whole(1)
        else:
            for field, number in self.fixed:
                if field.bit & mask:
                    count(field.counts, number, 1)
        for field, keys in zip(self.jagged, block.shapes, strict=True):
            if field.bit & mask:
                count(field.counts, keys if isinstance(keys, int) else keys[position], 1)

    def _count_whole(self, rows: int) -> None:
        before, self.rows = self.rows, self.rows + rows
        if not before or not self.rows:
            for field, number in self.fixed:
                count(field.counts, number, 1 if self.rows else -1)


@dataclass(slots=True, eq=False)
class Block:
    """``shapes[i]``: the shape numbers of its rows in ``layout.jagged[i]``. ``live``: positions not freed yet."""

    id: int
    unit: str
    rows: int
    layout: Layout
    shapes: Sequence[ShapeKeys]
    live: int


class BlockTable:
    """Block id → block, and the number of blocks and live rows of each unit."""

    def __init__(self) -> None:
        self._blocks: dict[int, Block] = {}
        self._units: dict[str, list[int]] = {}

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self) -> list[Block]:
        return list(self._blocks.values())

    def add(self, block: Block) -> None:
        self._blocks[block.id] = block
        held = self._units.setdefault(block.unit, [0, 0])
        held[0] += 1
        held[1] += block.live

    def free(self, block: Block, rows: int) -> None:
        """``rows`` positions of ``block`` are free now; a block without live rows is forgotten."""
        block.live -= rows
        held = self._units[block.unit]
        held[1] -= rows
        if not block.live:
            del self._blocks[block.id]
            held[0] -= 1

    def per_unit(self) -> dict[str, dict[str, int]]:
        return {unit: {"blocks": blocks, "rows": rows} for unit, (blocks, rows) in self._units.items()}


class Releases:
    """What one operation lets go of. Nothing changes before `settle`."""

    __slots__ = ("_parts", "_whole")

    def __init__(self) -> None:
        self._whole: dict[Block, list[int]] = {}
        self._parts: dict[tuple[Block, int, int], list[int]] = {}

    def drop_whole(self, block: Block, position: int) -> None:
        """The row at ``position``, which had all fields of its put, is not used any more."""
        positions = self._whole.get(block)
        if positions is None:
            self._whole[block] = [position]
        else:
            positions.append(position)

    def drop(self, block: Block, position: int, had: int, lost: int) -> None:
        """The row at ``position``, of which the fields ``had`` were in use, is not used for those in ``lost`` any more.
        When none is left the position is free."""
        self._parts.setdefault((block, had, lost), []).append(position)

    def settle(self, table: BlockTable) -> Frees:
        """Update shape counts and the block table; what the units are to be told."""
        if not self._whole and not self._parts:
            return NOTHING
        frees: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        for block, positions in self._whole.items():
            layout = block.layout
            layout.went(block, positions, layout.mask, layout.mask)
            table.free(block, len(positions))
            frees[block.unit].append((block.id, positions))
        for (block, had, lost), positions in self._parts.items():
            block.layout.went(block, positions, had, lost)
            if had == lost:
                table.free(block, len(positions))
                frees[block.unit].append((block.id, positions))
        return dict(frees)
