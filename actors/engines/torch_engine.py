"""The torch engine: continuous batching over a `Llama` tile, one token a step for every call that decodes.

A step packs the tile in this order: one row for each call that decodes, then, oldest call first, the positions of
prompts and prefixes that are still to be computed. At most ``rows`` calls are active, the others wait in the order in
which they came. So a call that is being filled never slows one that decodes (the tile costs the same either way), and
the oldest of them always gets a row (calls that decode are fewer than rows while one is being filled).

Guarantees:
- A call's tokens and logprobs are a function of its request, bit for bit: neither the other calls, nor when it
  joined, nor an exact resume at any place changes them (see `actors.engines.llama` for how, and under which threads
  and hardware it holds: the same ones).
- A fast resume computes prompt and prefix in one pass, one call in a step, while the others wait for it; its
  logprobs differ from the exact ones in the last bits.
- Memory for a call's keys and values is taken when it becomes active and freed when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from actors.engines.active_call import ActiveCall
from actors.engines.contract import EngineFingerprint, ResumeMode
from actors.engines.llama import Llama, Run
from actors.engines.vocabulary import Vocabulary
from policies.calls import CallIdentity, GenerationRequest, StepDelta, Tokens
from policies.errors import EngineError


class TorchEngine:
    """Implements `actors.engines.contract.Engine`.

    ``max_context`` limits prompt plus ``max_tokens`` of a call and is at most the model's own context. Set
    ``weight_version`` between steps when the weights have changed: each token carries the version that made it.
    """

    def __init__(
        self, model: Llama, vocabulary: Vocabulary, fingerprint: EngineFingerprint, max_context: int | None = None
    ) -> None:
        limit = model.shape.context
        if max_context is not None and not 1 <= max_context <= limit:
            raise EngineError(f"max_context is {max_context}; this model allows 1..{limit}")
        self.fingerprint = fingerprint
        self.weight_version = 0
        self._model, self._vocabulary = model, vocabulary
        self._max_context = max_context or limit
        self._active: dict[CallIdentity, ActiveCall] = {}
        self._waiting: deque[ActiveCall] = deque()

    @property
    def unfinished(self) -> int:
        return len(self._active) + len(self._waiting)

    def start(self, request: GenerationRequest, prefix: Tokens | None = None, resume: ResumeMode = "exact") -> None:
        """See the contract. ``resume`` matters only with a prefix: a call without one is always computed exactly."""
        identity = request.identity
        if identity in self._active or any(call.request.identity == identity for call in self._waiting):
            raise EngineError(f"call {identity} is already active; abort it first or start its next attempt")
        needed = len(request.prompt_ids) + request.max_tokens
        if needed > self._max_context:
            raise EngineError(
                f"call {identity} needs {needed} positions ({len(request.prompt_ids)} prompt + {request.max_tokens} "
                f"max_tokens) and the context has {self._max_context}; shorten the prompt or lower max_tokens"
            )
        self._waiting.append(ActiveCall(request, prefix, self._vocabulary, fast=resume == "fast"))

    def encode(self, text: str) -> tuple[int, ...]:
        return self._vocabulary.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._vocabulary.decode(ids)

    def abort(self, identity: CallIdentity) -> bool:
        if self._active.pop(identity, None) is not None:
            return True
        kept = deque(call for call in self._waiting if call.request.identity != identity)
        found = len(kept) < len(self._waiting)
        self._waiting = kept
        return found

    def step(self) -> StepDelta:
        self._admit()
        self._prefill_oldest()
        planned = self._plan()
        if not planned:
            return StepDelta((), (), {})
        sampling = [call for call, count in planned if call.unfilled == count]
        runs = [_run(call, count) for call, count in planned]
        logits = self._model.tile(runs, want_logits=bool(sampling))
        rows = np.cumsum([count for _, count in planned]) - 1
        last_rows = {call.request.identity: int(row) for (call, _), row in zip(planned, rows, strict=True)}
        for call, count in planned:
            call.filled += count
        return self._sample(sampling, last_rows, logits)

    def _admit(self) -> None:
        while self._waiting and len(self._active) < self._model.rows:
            call = self._waiting.popleft()
            call.cache = self._model.new_cache(len(call.request.prompt_ids) + call.request.max_tokens)
            self._active[call.request.identity] = call

    def _prefill_oldest(self) -> None:
        """One pass over all but the last known position of one call that wants it; the last one samples."""
        call = next((call for call in self._active.values() if call.fast), None)
        if call is not None:
            count = call.unfilled - 1
            self._model.prefill(_run(call, count))
            call.filled, call.fast = count, False

    def _plan(self) -> list[tuple[ActiveCall, int]]:
        """Which calls get how many rows of the next tile."""
        ready = [call for call in self._active.values() if not call.fast]
        planned = [(call, 1) for call in ready if call.unfilled == 1]
        free = self._model.rows - len(planned)
        for call in ready:
            if call.unfilled > 1 and free:
                count = min(call.unfilled, free)
                planned.append((call, count))
                free -= count
        return planned

    def _sample(
        self, sampling: Sequence[ActiveCall], last_rows: dict[CallIdentity, int], logits: Tensor | None
    ) -> StepDelta:
        tokens: list[Tokens] = []
        finished: dict[CallIdentity, str] = {}
        if logits is not None:
            values = logits.numpy()
            for call in sampling:
                identity = call.request.identity
                tokens.append(call.sample(values[last_rows[identity]], self.weight_version))
                if call.finish_reason is not None:
                    finished[identity] = call.finish_reason
                    del self._active[identity]
        return StepDelta(tuple(call.request.identity for call in sampling), tuple(tokens), finished)


def _run(call: ActiveCall, count: int) -> Run:
    if call.cache is None:
        raise EngineError(f"call {call.request.identity} has no cache; only an active call can be computed")
    return Run(call.cache, call.filled, call.ids[call.filled : call.filled + count])
