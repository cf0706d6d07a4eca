"""Chains: what the chunks of one call are when joined, and how a reader knows that they are what was cut.

Rules:
1. A digest covers token ids, logprobs, weight versions, extras with their layout, and the number of tokens, and nothing
   of how they were split.
2. What does not verify is refused with a typed reason; it is never repaired and never trusted.
3. A chunk's key is used for one put only, so the indices along a chain rise but may have gaps: an index that is
   missing belonged to a put that failed.

Costs: `ChainDigest.update` one pass over the new tokens (xxh3, tens of GB/s), `copy` O(1); `verify_chain` one copy and
one pass over the chain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from policies.calls import CallIdentity, Tokens
from policies.coalescing_events import Wish
from policies.errors import KeyCleared, KeyCorrupt, KeyMissing, RegraftError, Unreachable
from policies.extras import Extras, Layout, described, joined_extras, layout_of
from policies.receipts import Continuation

CHUNK_FIELDS: Final = ("ids", "logprobs", "versions")
"""Fields of every chunk's row, each of shape (T,). Its extras, if the engine records any, are fields beside them."""

CHUNK_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "ids": np.dtype("<i4"),
    "logprobs": np.dtype("<f4"),
    "versions": np.dtype("<i4"),
}
TOKEN_BYTES: Final = sum(dtype.itemsize for dtype in CHUNK_DTYPES.values())

# Why a chain is refused: found by verifying it …
NO_CHAIN: Final = "no_chain"
WRONG_IDENTITY: Final = "wrong_identity"
WRONG_FIELDS: Final = "wrong_fields"
LENGTHS_DISAGREE: Final = "lengths_disagree"
WRONG_COUNT: Final = "wrong_count"
WRONG_DIGEST: Final = "wrong_digest"
VERSIONS_DECREASE: Final = "versions_decrease"
VERSION_TOO_NEW: Final = "version_too_new"
# … or because a chunk could not be read.
CHUNK_MISSING: Final = "chunk_missing"
CHUNK_CLEARED: Final = "chunk_cleared"
CHUNK_CORRUPT: Final = "chunk_corrupt"
CHUNK_UNREACHABLE: Final = "chunk_unreachable"
CHUNK_UNREADABLE: Final = "chunk_unreadable"

_UNREAD: Final[Mapping[type[RegraftError], str]] = {
    KeyMissing: CHUNK_MISSING,
    KeyCleared: CHUNK_CLEARED,
    KeyCorrupt: CHUNK_CORRUPT,
    Unreachable: CHUNK_UNREACHABLE,
}


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """The chunks of a call, joined: ``ids`` int32 (T,), ``logprobs`` float32 (T,), ``versions`` int32 (T,), and each of
    ``extras`` (T, …)."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    extras: Extras = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class ChainRefusal:
    """Why a chain cannot be used, as one of this module's reasons and in words. The call is generated anew."""

    reason: str
    cause: str


class ChainDigest:
    """An incremental digest of a chain. ``tokens`` is the number of tokens taken so far, ``layout`` that of their
    extras."""

    __slots__ = ("_streams", "layout", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.layout: Layout = ()
        self._streams = {name: xxhash.xxh3_128() for name in CHUNK_FIELDS}

    @classmethod
    def of(cls, chain: Chain | Tokens) -> ChainDigest:
        digest = cls()
        digest.update({"ids": chain.ids, "logprobs": chain.logprobs, "versions": chain.versions, **chain.extras})
        return digest

    def update(self, parts: Mapping[str, NDArray[Any]]) -> None:
        """Take the next tokens: the fields of a chunk and its extras, of one length and of the layout so far.

        Raises `ValueError` when they are not.
        """
        count = len(parts["ids"])
        if any(len(array) != count for array in parts.values()):
            lengths = {name: len(array) for name, array in parts.items()}
            raise ValueError(f"arrays of different lengths are no tokens: {lengths}")
        if not count:
            return
        if len(parts) > len(CHUNK_FIELDS) or self.layout:
            self._expect(layout_of({name: array for name, array in parts.items() if name not in CHUNK_DTYPES}))
        self.tokens += count
        for name, array in parts.items():
            dtype = CHUNK_DTYPES.get(name) or array.dtype.newbyteorder("<")
            contiguous: Any = np.ascontiguousarray(array, dtype)
            self._streams[name].update(contiguous)

    def _expect(self, layout: Layout) -> None:
        if self.tokens and layout != self.layout:
            raise ValueError(f"the extras of a chain changed: {described(self.layout)} / {described(layout)}")
        if not self.tokens:
            self.layout = layout
            self._streams |= {extra.name: xxhash.xxh3_128() for extra in layout}

    def copy(self) -> ChainDigest:
        """A digest that goes on from here on its own."""
        twin = ChainDigest.__new__(ChainDigest)
        twin.tokens, twin.layout = self.tokens, self.layout
        twin._streams = {name: stream.copy() for name, stream in self._streams.items()}
        return twin

    def hexdigest(self) -> str:
        """32 hex digits."""
        parts = [self.tokens.to_bytes(8, "little")]
        for name in CHUNK_FIELDS:
            parts += (name.encode(), self._streams[name].digest())
        for extra in self.layout:
            parts += (str(extra).encode(), self._streams[extra.name].digest())
        return xxhash.xxh3_128_hexdigest(b"".join(parts))


def chunk_wishes(continuation: Continuation) -> tuple[Wish, ...]:
    """The chunks to read, with what is known of their sizes: the tokens of the chain are taken to be spread evenly.
    The head of a longer chain is likely to be wanted again, by siblings that share it."""
    keys = continuation.keys
    tokens = -(-continuation.tokens // max(1, len(keys)))
    return tuple([Wish(key, tokens, tokens * TOKEN_BYTES, again=len(keys) > 1 and key == keys[0]) for key in keys])


def unread_chain(error: RegraftError) -> ChainRefusal:
    """The refusal of a chain of which a chunk could not be read."""
    reason = next((reason for kind, reason in _UNREAD.items() if isinstance(error, kind)), CHUNK_UNREADABLE)
    return ChainRefusal(reason, f"{type(error).__name__}: {error.message}")


def verify_chain(
    continuation: Continuation, chunks: Sequence[Mapping[str, NDArray[Any]]], current_version: int
) -> Chain | ChainRefusal:
    """Join ``chunks`` (the rows of ``continuation.keys``, in order: field → array (T,)) when they are what was cut.

    Checked: every key names this call, an attempt not after this one and a rising index; every chunk has the three
    fields in their dtypes, the continuation's extras in one layout, and all of them at one length; the number of
    tokens and the digest are the continuation's; weight versions never decrease and none is newer than
    ``current_version``.
    """
    if not continuation.keys:
        return ChainRefusal(
            NO_CHAIN, f"call {continuation.request.identity} has no chunks; generate it from its prompt"
        )
    refusal = _key_fault(continuation, len(chunks)) or _chunk_fault(continuation, chunks)
    if refusal is not None:
        return refusal
    ids, logprobs, versions = (np.concatenate([chunk[name] for chunk in chunks]) for name in CHUNK_FIELDS)
    chain = Chain(ids, logprobs, versions, joined_extras([_extras(continuation, chunk) for chunk in chunks]))
    return _content_fault(continuation, chain, current_version) or chain


def _key_fault(continuation: Continuation, chunks: int) -> ChainRefusal | None:
    if chunks != len(continuation.keys):
        return ChainRefusal(WRONG_COUNT, f"{chunks} chunks were read for {len(continuation.keys)} keys")
    identity = continuation.request.identity
    last = (-1, -1)
    for key in continuation.keys:
        place = chunk_place(identity, key)
        if place is None or place[0] > identity.attempt:
            return ChainRefusal(WRONG_IDENTITY, f"chunk {key!r} is not one of call {identity} or its earlier attempts")
        if place[0] < last[0] or place[1] <= last[1]:
            return ChainRefusal(WRONG_IDENTITY, f"chunk {key!r} of call {identity} is out of order")
        last = place
    return None


def chunk_place(identity: CallIdentity, key: str) -> tuple[int, int] | None:
    """(attempt, index) that ``key`` names, if it is a chunk key of some attempt of this call; else None."""
    head, _, index = key.rpartition("#")
    stem, _, attempt = head.rpartition("@a")
    if stem != identity.row_key or not (_is_number(index) and _is_number(attempt)):
        return None
    return int(attempt), int(index)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _extras(continuation: Continuation, chunk: Mapping[str, NDArray[Any]]) -> Extras:
    return {name: chunk[name] for name in continuation.extras}


def _chunk_fault(continuation: Continuation, chunks: Sequence[Mapping[str, NDArray[Any]]]) -> ChainRefusal | None:
    keys = continuation.keys
    for key, chunk in zip(keys, chunks, strict=True):
        for name, dtype in CHUNK_DTYPES.items():
            array = chunk.get(name)
            if array is None or array.ndim != 1 or array.dtype != dtype:
                found = "nothing" if array is None else f"{array.dtype} {array.shape}"
                return ChainRefusal(WRONG_FIELDS, f"chunk {key!r}: {name} is {found}, not {dtype.name} (T,)")
        lost = [name for name in continuation.extras if getattr(chunk.get(name), "ndim", 0) == 0]
        if lost:
            return ChainRefusal(WRONG_FIELDS, f"chunk {key!r} has no {', '.join(lost)}, which the cut call had")
        lengths = {name: len(chunk[name]) for name in (*CHUNK_FIELDS, *continuation.extras)}
        if len(set(lengths.values())) != 1:
            return ChainRefusal(LENGTHS_DISAGREE, f"chunk {key!r} has fields of different lengths: {lengths}")
    layouts = {layout_of(_extras(continuation, chunk)): key for key, chunk in zip(keys, chunks, strict=True)}
    if len(layouts) > 1:
        found = " / ".join(f"{key!r} {described(layout)}" for layout, key in layouts.items())
        return ChainRefusal(WRONG_FIELDS, f"the extras of the chunks do not join: {found}")
    return None


def _content_fault(continuation: Continuation, chain: Chain, current_version: int) -> ChainRefusal | None:
    identity = continuation.request.identity
    if len(chain) != continuation.tokens:
        return ChainRefusal(WRONG_COUNT, f"the chain of {identity} has {len(chain)} tokens, not {continuation.tokens}")
    digest = ChainDigest.of(chain).hexdigest()
    if digest != continuation.digest:
        return ChainRefusal(WRONG_DIGEST, f"the chain of {identity} has digest {digest}, not {continuation.digest}")
    if (np.diff(chain.versions) < 0).any():
        return ChainRefusal(VERSIONS_DECREASE, f"the weight versions of {identity} decrease along its chain")
    newest = int(chain.versions.max(initial=current_version))
    if newest > current_version:
        cause = f"{identity} has tokens of weight version {newest}, the engine has {current_version}"
        return ChainRefusal(VERSION_TOO_NEW, cause)
    return None
