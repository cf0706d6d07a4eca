"""What an asker that waited in vain should look at: names that nothing has ever come under, beside those that exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.partition import Partition


def hint(table: Partition, fields: Sequence[str], partitions: Mapping[str, Partition]) -> str:
    """A continuation of what was found; empty when rows with a value in each of ``fields`` have come to ``table``, or
    were declared. O(partitions + fields)."""
    if not table.arrivals:
        others = ", ".join(repr(name) for name, other in partitions.items() if other.arrivals)
        return f"; no row has ever come to partition {table.name!r}, rows have come to {others or 'no other'}"
    unseen = [name for name in fields if table.fields[name].dtype is None]
    if unseen:
        there = ", ".join(repr(name) for name, field in table.fields.items() if field.dtype is not None)
        return f"; no row of the partition has ever had a value in {unseen}, its fields are {there or 'none'}"
    return ""
