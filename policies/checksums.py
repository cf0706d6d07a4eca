"""Checksums of stored blocks (xxh3-64: tens of GB/s, detects damage; it is no protection against forgery)."""

from __future__ import annotations

from collections.abc import Mapping

import xxhash

from policies.columns import Column


def block_checksum(columns: Mapping[str, Column]) -> int:
    """xxh3-64 over the values and offsets of all columns, in the order of their names."""
    state = xxhash.xxh3_64()
    for name in sorted(columns):
        column = columns[name]
        state.update(column.values.view("u1").data)
        if column.offsets is not None:
            state.update(column.offsets.view("u1").data)
    return state.intdigest()
