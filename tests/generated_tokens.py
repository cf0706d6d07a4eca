"""Runs of tokens for tests: numbered, so that a token lost, doubled or moved shows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from policies.calls import CallIdentity, GenerationRequest, Tokens
from policies.chain import Chain


def tokens(start: int, count: int, version: int = 0, cuttable: bool | Sequence[bool] = True, layers: int = 0) -> Tokens:
    """Tokens ``start`` .. ``start + count``; the id of each is its position, its logprob the negative of it, and with
    ``layers`` it has ``routes``: its position for each layer's two experts."""
    ids = np.arange(start, start + count, dtype=np.int32)
    versions = np.full(count, version, np.int32)
    extras = {"routes": routes(ids, layers)} if layers else {}
    return Tokens(ids, -ids.astype(np.float32), versions, np.full(count, cuttable, bool), extras)


def routes(ids: NDArray[np.int32], layers: int) -> NDArray[np.int16]:
    return np.broadcast_to(ids.astype(np.int16)[:, None, None], (len(ids), layers, 2)).copy()


def chain(count: int, version: int = 0, layers: int = 0) -> Chain:
    run = tokens(0, count, version, layers=layers)
    return Chain(run.ids, run.logprobs, run.versions, run.extras)


def request(identity: CallIdentity, max_tokens: int = 1000) -> GenerationRequest:
    return GenerationRequest(identity, (1, 2, 3), max_tokens)
