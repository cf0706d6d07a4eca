"""A row as a sampler sees it: read-only, and alive only as long as the row is.

Each watch makes candidates of its own, so what a sampler does with one concerns no other. ``state`` is the watch's:
whether the sampler may take the row (`OFFERED`), has taken it (`TAKEN`), or must not name it any more (`WITHDRAWN`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from policies.blocks import Block, Field
from policies.errors import Refused
from policies.rows import Row
from policies.shapes import LONGEST, SCALAR

OFFERED, TAKEN, WITHDRAWN = "offered", "taken", "withdrawn"

_NO_TAGS: Mapping[str, Any] = MappingProxyType({})


class Candidate:
    """What a sampler sees of a row. ``key`` and ``arrival`` (its number in the order in which the partition's rows
    came) never change; all else is read from the row when asked."""

    __slots__ = ("_fields", "_row", "arrival", "key", "state")

    def __init__(self, key: str, arrival: int, row: Row | None, fields: Mapping[str, Field]) -> None:
        self.key, self.arrival, self.state = key, arrival, OFFERED
        self._row, self._fields = row, fields

    def __repr__(self) -> str:
        return f"Candidate({self.key!r}, {self.state})"

    @property
    def row(self) -> Row | None:
        """The row itself, for the watch; None once it is cleared."""
        return None if self.gone else self._row

    @property
    def gone(self) -> bool:
        """The row was cleared, so no reader will find it."""
        return self._row is None or self._row.arrival != self.arrival

    @property
    def tags(self) -> Mapping[str, Any]:
        tags = None if self._row is None else self._row.tags
        return MappingProxyType(tags) if tags else _NO_TAGS

    def length(self, field: str) -> int:
        """The size of the row's value in the first dimension, such as its tokens; 1 for a scalar. O(1), and no tensor
        is touched. `Refused` when the row has no value there."""
        known = self._fields.get(field)
        for block, position, mask in () if self._row is None or known is None else self._row.places():
            if known is not None and known.bit & mask:
                number = _shape_number(block, position, known.bit)
                return 1 if number == SCALAR else number & LONGEST
        raise Refused(f"key {self.key!r} has no value in field {field!r}", key=self.key, field=field)


def _shape_number(block: Block, position: int, bit: int) -> int:
    """The shape (`policies.shapes`) that the row at ``position`` has in the field with ``bit``, one of the block's."""
    for field, number in block.layout.fixed:
        if field.bit == bit:
            return number
    jagged = [field.bit for field in block.layout.jagged]
    numbers = block.shapes[jagged.index(bit)]
    return numbers if isinstance(numbers, int) else int(numbers[position])
