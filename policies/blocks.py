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

import numpy as np
from numpy.typing import NDArray

from policies.shapes import ShapeCounts, ShapeKeys, remove_rows

Frees = Mapping[str, list[tuple[int, NDArray[np.int64]]]]
"""What units are to be told to forget: unit → [(block, positions int64)]; a block may occur more than once."""


@dataclass(slots=True, eq=False)
class Field:
    """A column of a partition. ``bit`` is its place in readiness masks, a power of two. ``dtype`` is None until the
    first value comes; then it stays for the life of the partition."""

    name: str
    bit: int
    dtype: str | None
    declared: bool
    counts: ShapeCounts


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """The fields of a put, in its order, and their mask. Puts with the same fields share it."""

    fields: tuple[Field, ...]
    mask: int
    counts: tuple[ShapeCounts, ...]

    @classmethod
    def of(cls, fields: tuple[Field, ...]) -> Layout:
        return cls(fields, sum(field.bit for field in fields), tuple(field.counts for field in fields))


@dataclass(slots=True, eq=False)
class Block:
    """``shapes[i]``: the shape numbers of its rows in ``layout.fields[i]``. ``live``: positions not freed yet."""

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

    __slots__ = ("_groups",)

    def __init__(self) -> None:
        self._groups: dict[tuple[Block, int, bool], list[int]] = {}

    def drop(self, block: Block, position: int, mask: int, whole: bool) -> None:
        """The fields in ``mask`` of the row at ``position`` are not in use any more; ``whole``: nor are any others."""
        group = self._groups.get((block, mask, whole))
        if group is None:
            self._groups[block, mask, whole] = [position]
        else:
            group.append(position)

    def settle(self, table: BlockTable) -> Frees:
        """Update shape counts and the block table; what the units are to be told."""
        if not self._groups:
            return {}
        frees: defaultdict[str, list[tuple[int, NDArray[np.int64]]]] = defaultdict(list)
        for (block, mask, whole), listed in self._groups.items():
            positions = np.array(listed, np.int64)
            layout = block.layout
            if mask == layout.mask:
                remove_rows(layout.counts, block.shapes, positions)
            else:
                chosen = [i for i, field in enumerate(layout.fields) if field.bit & mask]
                remove_rows([layout.counts[i] for i in chosen], [block.shapes[i] for i in chosen], positions)
            if whole:
                table.free(block, len(listed))
                frees[block.unit].append((block.id, positions))
        return dict(frees)
