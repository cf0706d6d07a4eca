"""One row: its key, which of its fields are ready, and where they are.

A row's fields usually came in one put, so a row points at one *place* (a block and a position in it) that serves all of
them; fields that were put later, or put again, add places. Readiness is not a second record: a field is ready exactly
when some place serves it.

A row that is cleared is forgotten as an object, and its key's next row is another object. ``arrival`` numbers rows over
the partition's life and turns negative on clearing, so a reference that outlived its row is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.blocks import Block, Releases

CLEARED_ARRIVAL = -1


class Place(NamedTuple):
    """The fields in ``mask`` are at ``position`` of ``block``."""

    block: Block
    position: int
    mask: int


@dataclass(slots=True, eq=False)
class Row:
    """``mask``: bits of the fields that are ready. ``claimed``: bits of the tasks that have claimed the row.

    ``block`` and ``position`` serve every ready field that no place in ``more`` serves; ``block`` is None for a row
    that has only tags.
    """

    key: str
    arrival: int
    mask: int = 0
    block: Block | None = None
    position: int = 0
    more: list[Place] | None = None
    tags: dict[str, Any] | None = None
    claimed: int = 0

    def places(self) -> list[Place]:
        """All places of the row; their masks are disjoint and add up to ``mask``."""
        if self.block is None:
            return []
        if self.more is None:
            return [Place(self.block, self.position, self.mask)]
        elsewhere = sum(place.mask for place in self.more)
        return [Place(self.block, self.position, self.mask - elsewhere), *self.more]

    def put(self, block: Block, position: int, releases: Releases) -> None:
        """Take the fields of ``block`` from there from now on; what they were before goes into ``releases``."""
        coming = block.layout.mask
        kept: list[Place] = []
        for place in self.places():
            replaced, left = place.mask & coming, place.mask & ~coming
            if replaced:
                releases.drop(place.block, place.position, place.mask, replaced)
            if left:
                kept.append(Place(place.block, place.position, left))
        kept.append(Place(block, position, coming))
        self.block, self.position = kept[0].block, kept[0].position
        self.more = kept[1:] or None
        self.mask |= coming

    def clear(self, releases: Releases) -> None:
        """Let go of all places; the row is never used again."""
        block = self.block
        if self.more is None:
            if block is not None:
                if self.mask == block.layout.mask:
                    releases.drop_whole(block, self.position)
                else:
                    releases.drop(block, self.position, self.mask, self.mask)
        else:
            for place in self.places():
                releases.drop(place.block, place.position, place.mask, place.mask)
        self.arrival = CLEARED_ARRIVAL
