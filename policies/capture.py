"""The capture of a call: what its coordinator holds of it, and the only ways in which that changes.

A call's tokens lie in one growing buffer. Its front may be frozen, which is a mark and no copy: tokens that arrive
meanwhile go behind it. Sealing drops the front, since the plane has it now; rolling back takes the mark away, so the
tokens are at the front of the live buffer without having moved.

Rules:
1. Every change of state goes through `_MOVES`.
2. A chunk is sealed only while the call is still frozen with that very chunk. A call that ended meanwhile is not.
3. A key is given to one put and never again, whatever became of that put: a write or a clear that comes late cannot
   touch a row that was sealed.
4. A delta that makes no sense poisons its call and changes nothing else. A poisoned call is never cut.

Costs: `observe` O(new tokens), amortised; `freeze`, `roll_back` O(1); `seal` O(tokens behind the chunk).
13 bytes per live token, and its extras.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from policies.calls import CallIdentity, Tokens
from policies.chain import CHUNK_DTYPES, Chain, ChainDigest, chunk_place
from policies.chunks import Frozen
from policies.extras import Layout, described, extras_fault, layout_of

COMPLETE: Final = frozenset({"stop", "length"})
"""Finish reasons with which a call is whole. Any other end (an engine's "abort") leaves it to be resumed."""

_CUTTABLE: Final = "cuttable"
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = {**CHUNK_DTYPES, _CUTTABLE: np.dtype(bool)}
_KINDS: Final[Mapping[str, str]] = {"ids": "iu", "logprobs": "f", "versions": "iu", _CUTTABLE: "b"}
_EMPTY: Final[Mapping[str, NDArray[Any]]] = {name: np.empty(0, dtype) for name, dtype in _DTYPES.items()}
INT32_MAX: Final = 2**31 - 1


class State(Enum):
    LIVE = "live"
    FROZEN = "frozen"
    POISONED = "poisoned"
    FINISHED = "finished"
    ABORTED = "aborted"


class Event(Enum):
    ADOPT = "adopt"
    OBSERVE = "observe"
    POISON = "poison"
    FREEZE = "freeze"
    SEAL = "seal"
    ROLL_BACK = "roll_back"
    FINISH = "finish"
    ABORT = "abort"


_MOVES: Final[Mapping[tuple[State, Event], State]] = {
    (State.LIVE, Event.ADOPT): State.LIVE,
    (State.LIVE, Event.OBSERVE): State.LIVE,
    (State.LIVE, Event.POISON): State.POISONED,
    (State.LIVE, Event.FREEZE): State.FROZEN,
    (State.LIVE, Event.FINISH): State.FINISHED,
    (State.LIVE, Event.ABORT): State.ABORTED,
    (State.FROZEN, Event.OBSERVE): State.FROZEN,
    (State.FROZEN, Event.POISON): State.POISONED,
    (State.FROZEN, Event.SEAL): State.LIVE,
    (State.FROZEN, Event.ROLL_BACK): State.LIVE,
    (State.FROZEN, Event.FINISH): State.FINISHED,
    (State.FROZEN, Event.ABORT): State.ABORTED,
    (State.POISONED, Event.OBSERVE): State.POISONED,
    (State.POISONED, Event.POISON): State.POISONED,
    (State.POISONED, Event.FINISH): State.FINISHED,
    (State.POISONED, Event.ABORT): State.ABORTED,
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is remembered of a call that ended. ``finish_reason`` is None when it was aborted, for ``cause``."""

    tokens: int
    digest: str
    finish_reason: str | None
    cause: str = ""


class CallCapture:
    """The state of one call. ``keys`` are its sealed chain; ``finish_reason`` is set once it has ended by itself;
    ``cause`` says in words why it is poisoned, or what odd end its engine reported."""

    __slots__ = (
        "_buffer",
        "_cut_at",
        "_digest",
        "_frozen",
        "_layout",
        "_length",
        "_newest",
        "_next_index",
        "cause",
        "finish_reason",
        "identity",
        "keys",
        "state",
        "vocab_size",
    )  # fmt: skip

    def __init__(self, identity: CallIdentity, vocab_size: int = INT32_MAX) -> None:
        """Ids of ``vocab_size`` or more poison the call."""
        self.identity = identity
        self.state = State.LIVE
        self.keys: tuple[str, ...] = ()
        self.finish_reason: str | None = None
        self.cause = ""
        self.vocab_size = vocab_size
        self._buffer: dict[str, NDArray[Any]] = dict(_EMPTY)
        self._length = 0  # tokens in the buffer, the frozen ones first
        self._cut_at = 0  # how many of them lie before the last place where the text may be cut
        self._frozen: Frozen | None = None
        self._layout: Layout | None = None  # of its extras, once it has tokens
        self._digest = ChainDigest()
        self._next_index = 0
        self._newest = -INT32_MAX

    @property
    def sealed_tokens(self) -> int:
        return self._digest.tokens

    @property
    def live_tokens(self) -> int:
        """Tokens that no sealed chunk holds."""
        return self._length

    @property
    def cuttable_tokens(self) -> int:
        """Those of them that a cut could stage now."""
        return self._cut_at if self.state is State.LIVE else 0

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the extras of its sealed chunks."""
        return tuple(extra.name for extra in self._digest.layout)

    def digest(self) -> str:
        """The digest of the sealed chain."""
        return self._digest.hexdigest()

    def adopt(self, keys: tuple[str, ...], chain: Chain, finish_reason: str | None = None) -> None:
        """Take over the verified chain of an earlier life; the chunks of this attempt follow its last index.

        ``finish_reason`` is set when the chain is the whole call.

        Raises `ValueError` when the capture already has tokens or a key is not one of this call's.
        """
        places = [chunk_place(self.identity, key) for key in keys]
        if self._length or self.keys:
            raise ValueError(f"call {self.identity} already has tokens; a chain is adopted before the first of them")
        last = places[-1] if places else None
        if last is None or None in places:
            raise ValueError(f"{list(keys)} are no chain of call {self.identity}")
        self._move(Event.ADOPT)
        self.keys = keys
        self._next_index = last[1] + 1
        self._digest = ChainDigest.of(chain)
        if len(chain):
            self._expect(self._digest.layout)
        self.finish_reason = finish_reason
        self._newest = int(chain.versions.max(initial=-INT32_MAX))

    def observe(self, tokens: Tokens) -> None:
        """Take new tokens, or poison the call when they make no sense. What a poisoned call says is ignored."""
        self._move(Event.OBSERVE)
        if self.state is State.POISONED:
            return
        fault = self._fault(tokens)
        if fault is not None:
            self.poison(fault)
            return
        count = len(tokens.ids)
        if not count:
            return
        if self._layout is None:
            self._expect(layout_of(tokens.extras))
        self._make_room(count)
        for name in _DTYPES:
            self._buffer[name][self._length : self._length + count] = getattr(tokens, name)
        for name, array in tokens.extras.items():
            self._buffer[name][self._length : self._length + count] = array
        places = np.flatnonzero(tokens.cuttable)
        if len(places):
            self._cut_at = self._length + int(places[-1]) + 1
        self._length += count
        self._newest = int(tokens.versions[-1])

    def end(self, reason: str) -> bool:
        """The engine says that the call has ended. True when that makes it whole; then nothing holds its tail back."""
        if reason not in COMPLETE:
            self.cause = f"its engine ended it with {reason!r}, which is no completion"
            return False
        self.finish_reason = reason
        self._cut_at = self._length
        return True

    def freeze(self) -> Frozen:
        """Freeze what may be cut now. Raises `ValueError` when nothing may (see `cuttable_tokens`)."""
        if not self._cut_at:
            raise ValueError(f"call {self.identity} has nothing that could be cut now")
        self._move(Event.FREEZE)
        parts = self._first(self._cut_at)
        self._frozen = Frozen(self.identity, self.sealed_tokens, parts, self._layout or (), self._digest)
        return self._frozen

    def holds(self, frozen: Frozen) -> bool:
        """Whether the call is frozen with this very chunk."""
        return self.state is State.FROZEN and self._frozen is frozen

    def new_key(self) -> str:
        """A key for the next put of a chunk of this call."""
        self._next_index += 1
        return self.identity.chunk_key(self._next_index - 1)

    def seal(self, frozen: Frozen, key: str, digest: ChainDigest) -> None:
        """``frozen`` is stored and published under ``key``: it ends the chain now, whose digest is ``digest``."""
        self._require(frozen)
        self._move(Event.SEAL)
        self.keys += (key,)
        self._digest = digest
        self._drop_front(frozen.tokens)
        self._frozen = None

    def roll_back(self, frozen: Frozen) -> None:
        """``frozen`` was not stored: its tokens are live again, before all later ones."""
        self._require(frozen)
        self._move(Event.ROLL_BACK)
        self._frozen = None

    def thaw(self) -> None:
        """Roll back whatever is frozen; for when a cut broke off without saying what became of its chunks."""
        if self._frozen is not None:
            self.roll_back(self._frozen)

    def finish(self, reason: str) -> Evidence:
        """The call's row is stored elsewhere, so its tokens are not needed any more. ``reason`` counts when the engine
        did not report its end."""
        self._move(Event.FINISH)
        self._frozen = None
        digest = self._digest.copy()
        digest.update(self._first(self._length))
        return Evidence(digest.tokens, digest.hexdigest(), self.finish_reason or reason)

    def abort(self, cause: str) -> Evidence:
        """The call is not wanted any more, because of ``cause``."""
        self._move(Event.ABORT)
        self._frozen = None
        return Evidence(self.sealed_tokens, self.digest(), None, cause)

    def poison(self, cause: str) -> None:
        """The call cannot be trusted: it is never cut and has to be generated anew."""
        self._move(Event.POISON)
        self.cause = cause
        self._frozen = None

    def _first(self, count: int) -> dict[str, NDArray[Any]]:
        """The first tokens of the buffer as a chunk would hold them."""
        return {name: array[:count] for name, array in self._buffer.items() if name != _CUTTABLE}

    def _move(self, event: Event) -> None:
        try:
            self.state = _MOVES[self.state, event]
        except KeyError:
            raise ValueError(f"call {self.identity} is {self.state.value}; it cannot {event.value} now") from None

    def _require(self, frozen: Frozen) -> None:
        if not self.holds(frozen):
            raise ValueError(f"call {self.identity} is not frozen with the chunk at token {frozen.start}")

    def _fault(self, tokens: Tokens) -> str | None:
        arrays = {name: np.asarray(getattr(tokens, name)) for name in _DTYPES}
        ids, versions = arrays["ids"], arrays["versions"]
        for name, array in arrays.items():
            if array.ndim != 1 or array.dtype.kind not in _KINDS[name]:
                return f"{name} came as {array.dtype} {array.shape}"
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) != 1:
            return f"the parts of a delta disagree in length: {lengths}"
        fault = extras_fault(tokens.extras, len(ids))
        if fault is not None or not len(ids):
            return fault
        if self.finish_reason is not None:
            return f"{len(ids)} tokens came after it had ended with {self.finish_reason!r}"
        lowest, highest = _range(ids)
        if lowest < 0 or highest >= self.vocab_size:
            return f"token ids {lowest}..{highest} lie outside the vocabulary 0..{self.vocab_size - 1}"
        falls = len(versions) > 1 and bool((versions[1:] < versions[:-1]).any())
        if falls or versions[0] < self._newest or versions[-1] > INT32_MAX:
            return f"weight versions decrease or do not fit: {versions.tolist()[:8]} after {self._newest}"
        if self._layout is not None and (tokens.extras or self._layout):
            layout = layout_of(tokens.extras)
            if layout != self._layout:
                return f"its extras changed from {described(self._layout)} to {described(layout)}"
        return None

    def _expect(self, layout: Layout) -> None:
        """The call's extras have this layout from now on; it has no token in its buffer yet."""
        self._layout = layout
        capacity = len(self._buffer["ids"])
        for extra in layout:
            self._buffer[extra.name] = np.empty((capacity, *extra.shape), extra.dtype)

    def _make_room(self, count: int) -> None:
        needed = self._length + count
        if needed <= len(self._buffer["ids"]):
            return
        capacity = max(64, 2 * needed)
        for name, old in self._buffer.items():
            self._buffer[name] = np.empty((capacity, *old.shape[1:]), old.dtype)
            self._buffer[name][: self._length] = old[: self._length]

    def _drop_front(self, count: int) -> None:
        """A new buffer holds what stays: the old one may still be read by whoever was handed the chunk."""
        for name, old in self._buffer.items():
            self._buffer[name] = old[count : self._length].copy() if count < self._length else _none_of(name, old)
        self._length -= count
        self._cut_at -= count


def _none_of(name: str, like: NDArray[Any]) -> NDArray[Any]:
    """No tokens. Arrays of its own would be most of what sealing a call costs, and nobody writes into an empty one."""
    empty = _EMPTY.get(name)
    return np.empty((0, *like.shape[1:]), like.dtype) if empty is None else empty


def _range(ids: NDArray[Any]) -> tuple[int, int]:
    """Least and greatest id; nearly always there is one only, and then no reduction is worth its overhead."""
    return (int(ids[0]), int(ids[0])) if len(ids) == 1 else (int(ids.min()), int(ids.max()))
