"""Inventories, receipts and continuations: what a checkpoint asks for, what it got, and what a restart hands on.

A receipt holds one acknowledgement for each call of its inventory, in the same order (design invariant 3). All of
these are plain values with a plain (msgpack-able) form, since they are written into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from policies.calls import CallIdentity, GenerationRequest

DURABLE_PREFIX = "durable_prefix"
DURABLE_FAILURE = "durable_failure"

# Reasons of a durable failure.
NO_TOKENS = "no_tokens"
UNKNOWN_CALL = "unknown_call"
WRONG_IDENTITY = "wrong_identity"
POISONED = "poisoned"
CUT_ERROR = "cut_error"
CONTROL_DEADLINE = "control_deadline"
INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Inventory:
    """The calls a cut must cover, bound by ``digest`` (xxh3-128 over their identities in order, hex)."""

    checkpoint_id: str
    calls: tuple[CallIdentity, ...]
    digest: str

    @classmethod
    def of(cls, checkpoint_id: str, calls: Iterable[CallIdentity]) -> Inventory:
        ordered = tuple(calls)
        parts: list[bytes] = []
        for call in ordered:
            for part in (call.rollout_id, call.call_id, str(call.attempt)):
                encoded = part.encode()
                parts += (len(encoded).to_bytes(8, "little"), encoded)
        return cls(checkpoint_id, ordered, xxhash.xxh3_128_hexdigest(b"".join(parts)))


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What became of one call of an inventory.

    ``disposition`` is ``durable_prefix`` or ``durable_failure``. For a prefix: ``keys`` is its whole chain in order,
    ``tokens`` the number of tokens in it, ``digest`` the digest of the chain (see `policies.chain`), ``finish_reason``
    is set when the call had already ended by itself (a terminal completion); if its finished row had been stored as
    well, that row holds it and ``keys`` is empty. ``extras`` are the names of the fields that its chunks have beside
    those of every chunk. For a failure: ``reason``, and ``cause`` says in words what was found.
    """

    identity: CallIdentity
    disposition: str
    keys: tuple[str, ...] = ()
    tokens: int = 0
    digest: str = ""
    finish_reason: str | None = None
    reason: str | None = None
    cause: str = ""
    extras: tuple[str, ...] = ()

    def to_plain(self) -> dict[str, Any]:
        return {
            "identity": self.identity.to_plain(),
            "disposition": self.disposition,
            "keys": list(self.keys),
            "tokens": self.tokens,
            "digest": self.digest,
            "finish_reason": self.finish_reason,
            "reason": self.reason,
            "cause": self.cause,
            "extras": list(self.extras),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Acknowledgement:
        return cls(
            identity=CallIdentity.from_plain(plain["identity"]),
            disposition=str(plain["disposition"]),
            keys=tuple(str(k) for k in plain["keys"]),
            tokens=int(plain["tokens"]),
            digest=str(plain["digest"]),
            finish_reason=plain["finish_reason"],
            reason=plain["reason"],
            cause=str(plain["cause"]),
            extras=tuple(str(name) for name in plain["extras"]),
        )


def failure(identity: CallIdentity, reason: str, cause: str) -> Acknowledgement:
    return Acknowledgement(identity, DURABLE_FAILURE, reason=reason, cause=cause)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The complete answer to a cut. ``numbers`` are its measurements.

    Counts: ``calls``, by disposition (``durable_prefix``, ``durable_failure``) and reason (``failed_<reason>``),
    ``terminal`` ones among the prefixes; ``puts``, ``rows``, ``tokens`` and ``bytes`` that were sealed,
    ``largest_put_bytes``, ``rows_retried``, ``clears_failed``, ``puts_in_doubt``.
    Seconds: ``wall_s``; ``freeze_s`` (freezing, batching and whatever else is no sealing), ``pack_s``, ``write_s``
    (from the first PUT to the last answer), ``seal_s``; ``longest_frozen_s``, the longest time for which the cut kept
    any call from taking new tokens; ``longest_unsealed_s``, the longest from the freezing of a call to its sealing or
    roll back, during which it decodes on.
    Rates: ``decode_before_per_s`` and ``decode_during_per_s``, tokens a second that engines delivered, left out when no
    step ended in that time.
    """

    checkpoint_id: str
    inventory_digest: str
    acknowledgements: tuple[Acknowledgement, ...]
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        return {
            "checkpoint_id": self.checkpoint_id,
            "inventory_digest": self.inventory_digest,
            "acknowledgements": [a.to_plain() for a in self.acknowledgements],
            "numbers": dict(self.numbers),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Receipt:
        return cls(
            checkpoint_id=str(plain["checkpoint_id"]),
            inventory_digest=str(plain["inventory_digest"]),
            acknowledgements=tuple(Acknowledgement.from_plain(a) for a in plain["acknowledgements"]),
            numbers={str(k): v for k, v in plain["numbers"].items()},
        )


def merged_numbers(receipts: Iterable[Receipt]) -> dict[str, float]:
    """The measurements of several coordinators' receipts of one cut: counts and rates add up; of times and of largest
    sizes, which pass side by side, the greatest counts."""
    merged: dict[str, float] = {}
    for receipt in receipts:
        for name, value in receipt.numbers.items():
            beside = (name.endswith("_s") and not name.endswith("_per_s")) or name.startswith("largest_")
            merged[name] = max(merged.get(name, 0.0), value) if beside else merged.get(name, 0.0) + value
    return merged


class ReceiptCache:
    """Receipts by their question, (checkpoint id, inventory digest). The oldest go when together they hold more than
    ``capacity`` acknowledgements; the newest always stays."""

    def __init__(self, capacity: int = 131_072) -> None:
        self._capacity, self._size = capacity, 0
        self._receipts: dict[tuple[str, str], Receipt] = {}

    def __len__(self) -> int:
        return len(self._receipts)

    def get(self, inventory: Inventory) -> Receipt | None:
        return self._receipts.get((inventory.checkpoint_id, inventory.digest))

    def add(self, receipt: Receipt) -> None:
        """Keep the answer to a question that is not in here."""
        self._receipts[receipt.checkpoint_id, receipt.inventory_digest] = receipt
        self._size += len(receipt.acknowledgements)
        while self._size > self._capacity and len(self._receipts) > 1:
            oldest = self._receipts.pop(next(iter(self._receipts)))
            self._size -= len(oldest.acknowledgements)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a restart hands to an engine: who the call is, where its chain lies, and what is left of its limits.

    ``request.identity`` is the identity of the new attempt. ``keys``, ``tokens``, ``digest`` and ``extras`` are those
    of the acknowledgement; a call that was acknowledged as a failure has an empty chain and is regenerated from its
    prompt. The limits of ``request`` are those of the whole call; generated tokens in the prefix count against them.
    ``finish_reason`` is set when the chain is the whole call, which then needs no engine any more.
    """

    request: GenerationRequest
    keys: tuple[str, ...]
    tokens: int
    digest: str
    finish_reason: str | None = None
    extras: tuple[str, ...] = ()

    @classmethod
    def of(cls, acknowledgement: Acknowledgement, request: GenerationRequest) -> Continuation:
        """Join an acknowledgement with the request it belongs to.

        Raises `ValueError` when they are of different calls, and for a call that had finished and whose row is stored:
        there is nothing left to go on with.
        """
        asked, got = request.identity, acknowledgement.identity
        if (asked.rollout_id, asked.call_id) != (got.rollout_id, got.call_id):
            raise ValueError(f"the acknowledgement is of call {got}, the request of call {asked}")
        if acknowledgement.finish_reason is not None and not acknowledgement.keys:
            raise ValueError(f"call {got} had finished before the cut; its row is stored, so it is not resumed")
        return cls(
            request,
            acknowledgement.keys,
            acknowledgement.tokens,
            acknowledgement.digest,
            acknowledgement.finish_reason,
            acknowledgement.extras,
        )

    @property
    def remaining_max_tokens(self) -> int:
        return max(0, self.request.max_tokens - self.tokens)

    @property
    def remaining_min_tokens(self) -> int:
        """Never more than `remaining_max_tokens`, since a request's minimum is not above its maximum."""
        return max(0, self.request.min_tokens - self.tokens)

    @property
    def whole_reason(self) -> str | None:
        """The finish reason of a chain that is the whole call, which needs no engine any more; else None."""
        return self.finish_reason or ("length" if self.keys and self.remaining_max_tokens == 0 else None)
