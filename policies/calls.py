"""A call: one generation request, who it is, what it asks for and what an engine says about it step by step.

These are the values that travel between the job, the workers and the coordinators. All of them are frozen; arrays in
them are never written to after construction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.extras import Extras, joined_extras

_RESERVED = frozenset("/@#")


@dataclass(frozen=True, slots=True, order=True)
class CallIdentity:
    """Who a call is. A retry or a takeover of the same call has the next ``attempt``.

    Keys are made from it (``rollout/call``, ``rollout/call@a0#1``), so its ids may hold none of ``/``, ``@`` and ``#``:
    two calls never share a key. Raises `ValueError` for such an id, an empty one, one that is no UTF-8 text, or a
    negative attempt.
    """

    rollout_id: str
    call_id: str
    attempt: int = 0

    def __post_init__(self) -> None:
        for name, part in (("rollout_id", self.rollout_id), ("call_id", self.call_id)):
            if not part or not _RESERVED.isdisjoint(part):
                raise ValueError(f"{name} is {part!r}; it must not be empty, nor hold any of {' '.join(_RESERVED)}")
            if not part.isascii() and part != part.encode(errors="ignore").decode():
                raise ValueError(f"{name} is {part!r}; it must be encodable as UTF-8, and lone surrogates are not")
        if self.attempt < 0:
            raise ValueError(f"the attempt of call {self.rollout_id}/{self.call_id} is {self.attempt}; it begins at 0")

    def __str__(self) -> str:
        return f"{self.row_key}@a{self.attempt}"

    @property
    def row_key(self) -> str:
        """The key of the call's finished row, the same for every attempt, so that a call is one row."""
        return f"{self.rollout_id}/{self.call_id}"

    def next_attempt(self) -> CallIdentity:
        return CallIdentity(self.rollout_id, self.call_id, self.attempt + 1)

    def chunk_key(self, index: int) -> str:
        """The staging key of chunk ``index`` of this call's chain."""
        return f"{self}#{index}"

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> CallIdentity:
        return cls(str(plain["rollout_id"]), str(plain["call_id"]), int(plain["attempt"]))


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a call asks for.

    ``prompt_ids`` are the token ids of the prompt. ``max_tokens`` and ``min_tokens`` count generated tokens only.
    ``temperature`` 0 is greedy; ``top_p`` is in (0, 1]. ``seed`` keys the counter-based generator, so the draw at
    a position depends on (seed, position) and on nothing else. A stop string ends the call with reason ``stop``.
    """

    identity: CallIdentity
    prompt_ids: tuple[int, ...]
    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(f"call {self.identity}: the prompt has no tokens")
        if self.max_tokens < 1:
            raise ValueError(f"call {self.identity}: max_tokens is {self.max_tokens}; it must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"call {self.identity}: min_tokens {self.min_tokens} is outside 0..{self.max_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(
                f"call {self.identity}: temperature {self.temperature} must be >= 0, top_p {self.top_p} in (0, 1]"
            )

    def with_identity(self, identity: CallIdentity) -> GenerationRequest:
        """The same request as another attempt."""
        return replace(self, identity=identity)

    def to_plain(self) -> dict[str, Any]:
        return {
            "identity": self.identity.to_plain(),
            "prompt_ids": list(self.prompt_ids),
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": list(self.stop),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> GenerationRequest:
        return cls(
            identity=CallIdentity.from_plain(plain["identity"]),
            prompt_ids=tuple(int(i) for i in plain["prompt_ids"]),
            max_tokens=int(plain["max_tokens"]),
            min_tokens=int(plain["min_tokens"]),
            temperature=float(plain["temperature"]),
            top_p=float(plain["top_p"]),
            seed=int(plain["seed"]),
            stop=tuple(str(s) for s in plain["stop"]),
        )


@dataclass(frozen=True, slots=True)
class Tokens:
    """A run of generated tokens of one call, all arrays of one length T.

    ``ids`` int32 (T,), ``logprobs`` float32 (T,), ``versions`` int32 (T,): the weight version that made each token.
    ``cuttable`` bool (T,): whether the text may be cut right after the token (not inside a multi-byte character,
    not inside a stop string that may be starting). ``extras``: whatever else the engine records of these tokens, and of
    no others (see `policies.extras`).
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    cuttable: NDArray[np.bool_]
    extras: Extras = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def joined(cls, parts: Sequence[Tokens]) -> Tokens:
        """Consecutive runs as one; at least one. Raises `ValueError` when their extras have different layouts."""
        ids, logprobs, versions, cuttable = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("ids", "logprobs", "versions", "cuttable")
        )
        return cls(ids, logprobs, versions, cuttable, joined_extras([part.extras for part in parts]))


@dataclass(frozen=True, slots=True)
class StepDelta:
    """What one engine step produced, for all calls that produced anything.

    ``tokens[i]`` are the new tokens of ``calls[i]``; ``finished`` maps a call to its finish reason (``"stop"`` or
    ``"length"``) in the step that ended it. A step that only consumed prompts or prefixes has no calls.
    """

    calls: tuple[CallIdentity, ...]
    tokens: tuple[Tokens, ...]
    finished: Mapping[CallIdentity, str]
