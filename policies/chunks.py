"""Chunks: what one cut stages of a call, and how many of them become one PUT.

Guarantees: packing looks at nothing but its chunks, which never change, so it may run on another thread while their
calls go on. Costs: one copy of a batch's bytes and two passes over them (checksum and digests).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.calls import CallIdentity
from policies.chain import TOKEN_BYTES, ChainDigest
from policies.checksums import block_checksum
from policies.columns import Column
from policies.extras import Layout, token_bytes

ROWS_BETWEEN_PAUSES: Final = 16


@dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """A chunk to be staged: tokens ``start`` .. ``start + tokens`` of a call, as views of its buffer.

    ``parts[field]`` has the dtype of `CHUNK_DTYPES` and shape (tokens,), and (tokens, …) for the extras, whose layout
    is ``layout``. ``before`` is the digest of the chain that it continues.
    """

    identity: CallIdentity
    start: int
    parts: Mapping[str, NDArray[Any]]
    layout: Layout
    before: ChainDigest

    @property
    def tokens(self) -> int:
        return len(self.parts["ids"])

    @property
    def nbytes(self) -> int:
        return self.tokens * (TOKEN_BYTES + token_bytes(self.layout))

    def digest(self) -> ChainDigest:
        """The digest of the chain that ends with this chunk."""
        digest = self.before.copy()
        digest.update(self.parts)
        return digest


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What must be remembered of a batch until it is acknowledged: the checksum of its block, and the digest of each
    chain that its chunks end."""

    checksum: int
    digests: tuple[ChainDigest, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A batch as it is written: one row for each chunk."""

    columns: Mapping[str, Column]
    tags: tuple[Mapping[str, Any], ...]
    sent: Sent


def pack(keys: Sequence[str], chunks: Sequence[Frozen], pause: Callable[[], None] | None = None) -> Packed:
    """``chunks`` of one layout as rows under ``keys``. ``pause`` is called after every few rows, for whoever does this
    beside something that must not wait."""
    lengths = [chunk.tokens for chunk in chunks]
    columns = {
        name: Column.jagged(np.concatenate([chunk.parts[name] for chunk in chunks]), lengths)
        for name in chunks[0].parts
    }
    checksum = block_checksum(columns)
    digests = []
    for number, chunk in enumerate(chunks):
        if pause is not None and number % ROWS_BETWEEN_PAUSES == 0:
            pause()
        digests.append(chunk.digest())
    return Packed(columns, tuple(map(_tags, chunks, keys)), Sent(checksum, tuple(digests)))


def _tags(chunk: Frozen, key: str) -> dict[str, Any]:
    identity = chunk.identity
    return {
        "rollout_id": identity.rollout_id,
        "call_id": identity.call_id,
        "attempt": identity.attempt,
        "index": int(key.rpartition("#")[2]),
        "start": chunk.start,
        "tokens": chunk.tokens,
    }
