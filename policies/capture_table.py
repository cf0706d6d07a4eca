"""The captures of a coordinator's calls: who is admitted, who takes whose place, and what is known of calls that ended.

Rules:
1. An identity is admitted once, and never after a later attempt of its call.
2. An attempt supersedes every earlier one of its call at the same coordinator. Chunks that it does not inherit are
   unneeded from then on.
3. A delta can fail only for the calls it is about.
4. What a call ended as is remembered for ``evidence_s`` seconds and for at most `REMEMBERED` calls, so that a call that
   ends between an inventory and its cut is acknowledged as what it was.

Costs: `observe` O(new tokens); everything else O(attempts of the call), amortised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from policies.calls import CallIdentity, StepDelta
from policies.capture import INT32_MAX, CallCapture, Evidence, State
from policies.errors import Refused
from policies.receipts import (
    DURABLE_PREFIX,
    NO_TOKENS,
    POISONED,
    UNKNOWN_CALL,
    WRONG_IDENTITY,
    Acknowledgement,
    failure,
)

REMEMBERED: Final = 65_536


@dataclass(frozen=True, slots=True)
class Admission:
    """A call that is known now; ``unneeded`` are the chunks of superseded attempts that it does not inherit."""

    capture: CallCapture
    unneeded: tuple[str, ...] = ()


class CaptureTable:
    """``counts``: steps, deltas of unknown calls, poisoned calls and unexpected ends that were seen."""

    def __init__(self, evidence_s: float, remembered: int = REMEMBERED) -> None:
        self._evidence_s, self._remembered = evidence_s, remembered
        self._vocab_size = INT32_MAX
        self._active: dict[CallIdentity, CallCapture] = {}
        self._ended: dict[CallIdentity, tuple[Evidence, float]] = {}
        self._by_call_id: dict[str, dict[CallIdentity, None]] = {}
        self.counts: Counter[str] = Counter()

    def expect_vocabulary(self, size: int) -> None:
        """Ids of ``size`` or more poison their call from now on."""
        self._vocab_size = size
        for capture in self._active.values():
            capture.vocab_size = size

    def active(self) -> tuple[CallIdentity, ...]:
        """Calls that have not ended, in the order in which they came."""
        return tuple(self._active)

    def captures(self) -> tuple[CallCapture, ...]:
        return tuple(self._active.values())

    def get(self, identity: CallIdentity) -> CallCapture | None:
        return self._active.get(identity)

    def ended(self, identity: CallIdentity) -> Evidence | None:
        found = self._ended.get(identity)
        return None if found is None else found[0]

    def admit(self, identity: CallIdentity, now: float, inherited: Iterable[str] = ()) -> Admission:
        """Make a call known, in the place of its earlier attempts, of whose chunks it goes on from ``inherited``.

        A call that is active already stays as it is. Raises `Refused` when it ended, or a later attempt is known.
        """
        known = self._active.get(identity)
        if known is not None:
            return Admission(known)
        self.forget(now)
        family = [other for other in self._others(identity) if other.rollout_id == identity.rollout_id]
        latest = max(family, default=identity)
        if latest > identity:
            raise Refused(f"call {identity} comes after its attempt {latest.attempt}, which has taken its place")
        if identity in self._ended:
            raise Refused(f"call {identity} ended already; a retry or takeover has the next attempt")
        kept = frozenset(inherited)
        unneeded = tuple(
            key
            for earlier in family
            for key in self._abort(earlier, f"attempt {identity.attempt} has taken its place", now)
            if key not in kept
        )
        capture = self._active[identity] = CallCapture(identity, self._vocab_size)
        self._by_call_id.setdefault(identity.call_id, {})[identity] = None
        return Admission(capture, unneeded)

    def observe(self, delta: StepDelta) -> tuple[CallCapture, ...]:
        """Take what an engine step produced. Returns the calls that it poisoned."""
        self.counts["steps"] += 1
        self.counts["deltas_of_unknown_calls"] += sum(call not in self._active for call in delta.calls)
        trusted = [self._trusted(call) for call in delta.calls]
        if len(delta.calls) == len(delta.tokens):
            for capture, tokens in zip(trusted, delta.tokens, strict=True):
                if capture is not None:
                    capture.observe(tokens)
        else:
            cause = f"a step named {len(delta.calls)} calls and brought tokens for {len(delta.tokens)}"
            for capture in trusted:
                if capture is not None:
                    capture.poison(cause)
        poisoned = tuple(c for c in trusted if c is not None and c.state is State.POISONED)
        for call, reason in delta.finished.items():
            ended = self._active.get(call)
            if ended is not None and not ended.end(reason):
                self.counts["unexpected_ends"] += 1
        self.counts["poisoned"] += len(poisoned)
        return poisoned

    def finish(self, identity: CallIdentity, reason: str, now: float) -> tuple[str, ...]:
        """The call ended and is stored elsewhere. Returns the chunk keys that nobody needs any more (none when the
        call is not active)."""
        capture = self._active.get(identity)
        return () if capture is None else self._retire(capture, capture.finish(reason), now)

    def abort(self, identity: CallIdentity, now: float) -> tuple[str, ...]:
        """The call is not wanted any more. Returns the chunk keys that nobody needs any more."""
        return self._abort(identity, "it was aborted", now)

    def forget(self, now: float) -> None:
        """Drop what is remembered of calls that ended more than ``evidence_s`` seconds before ``now``."""
        while self._ended:
            oldest = next(iter(self._ended))
            if len(self._ended) <= self._remembered and self._ended[oldest][1] + self._evidence_s >= now:
                return
            del self._ended[oldest]
            siblings = self._by_call_id[oldest.call_id]
            del siblings[oldest]
            if not siblings:
                del self._by_call_id[oldest.call_id]

    def acknowledge(self, identity: CallIdentity) -> Acknowledgement:
        """What can be said of a call for which nothing is being written.

        A call that finished and is stored elsewhere is a prefix with a finish reason and no keys: its tokens and digest
        say what it came to, and its row, not a chain, holds it.
        """
        capture, ended = self._active.get(identity), self.ended(identity)
        if capture is not None:
            return standing(capture)
        if ended is not None and ended.finish_reason is not None:
            return Acknowledgement(
                identity, DURABLE_PREFIX, tokens=ended.tokens, digest=ended.digest, finish_reason=ended.finish_reason
            )
        if ended is not None:
            return failure(identity, UNKNOWN_CALL, ended.cause)
        others = self._others(identity)
        if others:
            known = ", ".join(map(str, others[:3]))
            return failure(identity, WRONG_IDENTITY, f"this coordinator knows the call id as {known}")
        return failure(identity, UNKNOWN_CALL, "this coordinator has never been told of the call, or long ago")

    def _abort(self, identity: CallIdentity, cause: str, now: float) -> tuple[str, ...]:
        capture = self._active.get(identity)
        return () if capture is None else self._retire(capture, capture.abort(cause), now)

    def _retire(self, capture: CallCapture, evidence: Evidence, now: float) -> tuple[str, ...]:
        del self._active[capture.identity]
        self._ended[capture.identity] = evidence, now
        self.forget(now)
        return capture.keys

    def _others(self, identity: CallIdentity) -> tuple[CallIdentity, ...]:
        """Known calls of the same call id that are another rollout's or another attempt."""
        return tuple(other for other in self._by_call_id.get(identity.call_id, ()) if other != identity)

    def _trusted(self, identity: CallIdentity) -> CallCapture | None:
        capture = self._active.get(identity)
        return None if capture is None or capture.state is State.POISONED else capture


def standing(capture: CallCapture) -> Acknowledgement:
    """The acknowledgement of an active call by what is sealed of it. Its chain is whole when nothing lies outside."""
    identity, cause = capture.identity, capture.cause
    if capture.state is State.POISONED:
        return failure(identity, POISONED, cause)
    if not capture.keys:
        found = f"none of its {capture.live_tokens} tokens can be cut yet" if capture.live_tokens else "not started"
        return failure(identity, NO_TOKENS, f"{found}; {cause}" if cause else found)
    return Acknowledgement(
        identity=identity,
        disposition=DURABLE_PREFIX,
        keys=capture.keys,
        tokens=capture.sealed_tokens,
        digest=capture.digest(),
        finish_reason=capture.finish_reason if capture.live_tokens == 0 else None,
        cause=cause,
        extras=capture.extras,
    )
