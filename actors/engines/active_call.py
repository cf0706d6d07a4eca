"""One call inside the torch engine: what it knows so far, what of it is computed, and when it ends.

A call ends with ``stop`` at an end token (which is its last token) or at the token that completes a stop string (kept
whole: trimming text is the reader's business), with ``length`` at ``max_tokens``. Before ``min_tokens`` an end token
cannot be drawn and a completed stop string is passed over. All of these count the tokens of a prefix, so a resumed
call ends where the uncut one would, also when a stop string spans the cut.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actors.engines.llama import CallCache
from actors.engines.vocabulary import Vocabulary
from policies.boundary import Boundary, Mark
from policies.calls import GenerationRequest, Tokens
from policies.counter_random import uniform
from policies.errors import EngineError
from policies.sampling_rule import draw


class ActiveCall:
    """``ids``: prompt and all generated tokens; ``filled``: how many of them are in ``cache``; ``fast``: all but the
    last are to be computed in one pass. ``finish_reason`` is None while the call lives."""

    def __init__(self, request: GenerationRequest, prefix: Tokens | None, vocabulary: Vocabulary, fast: bool) -> None:
        """Raises `EngineError` when the request or the prefix cannot be served."""
        self.request, self._vocabulary = request, vocabulary
        self.cache: CallCache | None = None
        self.filled = 0
        self.finish_reason: str | None = None
        vocabulary.check(request.prompt_ids, f"prompt of call {request.identity}")
        self.ids = list(request.prompt_ids)
        self._boundary = self._checked_boundary()
        self.fast = fast and prefix is not None and len(prefix) > 0
        if prefix is not None:
            self._take(prefix)

    @property
    def generated(self) -> int:
        """Tokens generated so far, prefix included."""
        return len(self.ids) - len(self.request.prompt_ids)

    @property
    def unfilled(self) -> int:
        """Known positions that are not in the cache. When the last of them is computed, its row samples."""
        return len(self.ids) - self.filled

    def sample(self, logits: NDArray[np.float32], version: int) -> Tokens:
        """Draw the next token from raw logits (vocabulary,); may set ``finish_reason``."""
        request = self.request
        banned = self._vocabulary.end_ids if self.generated < request.min_tokens else ()
        chance = uniform(request.seed, self.generated)
        drawn = draw(logits, chance, request.temperature, request.top_p, banned)
        mark = self._append(drawn.token)
        # Nothing follows the last token of a finished call, so its end holds nothing back.
        cuttable = mark.cuttable or self.finish_reason is not None
        return Tokens(
            ids=np.array([drawn.token], np.int32),
            logprobs=np.array([drawn.logprob], np.float32),
            versions=np.array([version], np.int32),
            cuttable=np.array([cuttable], np.bool_),
        )

    def _append(self, token: int) -> Mark:
        self.ids.append(token)
        mark = self._boundary.feed(self._vocabulary.token_bytes[token])
        stopped = mark.stopped and self.generated >= self.request.min_tokens
        if stopped or token in self._vocabulary.end_ids:
            self.finish_reason = "stop"
        elif self.generated >= self.request.max_tokens:
            self.finish_reason = "length"
        return mark

    def _take(self, prefix: Tokens) -> None:
        identity = self.request.identity
        ids: list[int] = prefix.ids.tolist()
        self._vocabulary.check(ids, f"prefix of call {identity}")
        for index, token in enumerate(ids):
            self._append(token)
            if self.finish_reason is not None:
                raise EngineError(
                    f"call {identity} ended in its prefix of {len(ids)} tokens: {self.finish_reason!r} at token "
                    f"{index + 1} of max_tokens {self.request.max_tokens}; finish it without an engine"
                )

    def _checked_boundary(self) -> Boundary:
        try:
            uniform(self.request.seed, 0)
            return Boundary(self.request.stop)
        except ValueError as error:
            raise EngineError(f"call {self.request.identity}: {error}") from error
