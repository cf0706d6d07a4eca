"""Runs of tokens for tests: numbered, so that a token lost, doubled or moved shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from policies.calls import CallIdentity, GenerationRequest, Tokens
from policies.chain import Chain


def tokens(start: int, count: int, version: int = 0, cuttable: bool | Sequence[bool] = True) -> Tokens:
    """Tokens ``start`` .. ``start + count``; the id of each is its position, its logprob the negative of it."""
    ids = np.arange(start, start + count, dtype=np.int32)
    return Tokens(ids, -ids.astype(np.float32), np.full(count, version, np.int32), np.full(count, cuttable, bool))


def chain(count: int, version: int = 0) -> Chain:
    run = tokens(0, count, version)
    return Chain(run.ids, run.logprobs, run.versions)


def request(identity: CallIdentity, max_tokens: int = 1000) -> GenerationRequest:
    return GenerationRequest(identity, (1, 2, 3), max_tokens)
