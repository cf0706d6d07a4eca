"""What an engine must offer so that its calls can be cut and regrown.

An engine is driven from one thread, one step at a time. It knows nothing of Ray, of the plane or of checkpoints: calls
go in, `StepDelta` values come out. `GenerationWorker` is its only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from policies.calls import CallIdentity, GenerationRequest, StepDelta, Tokens

ResumeMode = Literal["exact", "fast"]


@dataclass(frozen=True, slots=True)
class EngineFingerprint:
    """What shapes the data an engine makes. A checkpoint is only resumed by an engine with the same fingerprint.

    ``model`` names the weights together with a digest of them, ``tokenizer`` the vocabulary, ``logprob_mode`` says what
    a logprob is (``"raw"``: log-softmax of the unscaled logits, before temperature and top-p).
    """

    model: str
    tokenizer: str
    vocab_size: int
    logprob_mode: str


class Engine(Protocol):
    """A continuously batching generator. Calls join and leave between steps."""

    fingerprint: EngineFingerprint
    weight_version: int

    @property
    def unfinished(self) -> int:
        """Calls that were started and have neither finished nor been aborted."""
        ...

    def start(self, request: GenerationRequest, prefix: Tokens | None = None, resume: ResumeMode = "exact") -> None:
        """Queue a call. ``prefix`` are tokens it has generated in an earlier life: they are never reported again,
        and count against ``max_tokens`` and ``min_tokens``. Raises `EngineError` when the call cannot be served
        (longer than the context, token id outside the vocabulary, identity already active, prefix already at its
        limit)."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """The token ids of a user's message, chat template applied; what `GenerationRequest.prompt_ids` takes."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of generated token ids (special tokens left out, broken characters as U+FFFD)."""
        ...

    def abort(self, identity: CallIdentity) -> bool:
        """Forget a call. False when it is not known; nothing is reported for it any more."""
        ...

    def step(self) -> StepDelta:
        """Advance every active call, by at most one new token each, and report what is new."""
        ...
