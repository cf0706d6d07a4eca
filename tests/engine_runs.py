"""Driving an engine in a test: start calls, step until they end, collect what each produced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.engines.contract import Engine
from policies.calls import CallIdentity, GenerationRequest, Tokens


def request(
    name: str, prompt: Sequence[int] = (256, 72, 105), max_tokens: int = 24, **limits: Any
) -> GenerationRequest:
    return GenerationRequest(CallIdentity("r", name), tuple(prompt), max_tokens, **limits)


@dataclass
class Life:
    """What one call produced: its tokens in order, and how it ended (None while it lives)."""

    parts: list[Tokens] = field(default_factory=list)
    finish: str | None = None

    @property
    def ids(self) -> list[int]:
        return [int(i) for part in self.parts for i in part.ids]

    @property
    def tokens(self) -> Tokens:
        return joined(self.parts)


def joined(parts: Sequence[Tokens]) -> Tokens:
    """The parts as one run of tokens; at least one part."""
    return Tokens(
        ids=np.concatenate([p.ids for p in parts]),
        logprobs=np.concatenate([p.logprobs for p in parts]),
        versions=np.concatenate([p.versions for p in parts]),
        cuttable=np.concatenate([p.cuttable for p in parts]),
    )


def first(tokens: Tokens, count: int) -> Tokens:
    return Tokens(tokens.ids[:count], tokens.logprobs[:count], tokens.versions[:count], tokens.cuttable[:count])


def rest(tokens: Tokens, count: int) -> Tokens:
    return Tokens(tokens.ids[count:], tokens.logprobs[count:], tokens.versions[count:], tokens.cuttable[count:])


def identical(a: Tokens, b: Tokens) -> bool:
    """Bit for bit: ids, logprobs, versions and cut places."""
    pairs = ((a.ids, b.ids), (a.logprobs, b.logprobs), (a.versions, b.versions), (a.cuttable, b.cuttable))
    return all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in pairs)


def collect(engine: Engine, lives: dict[CallIdentity, Life], steps: int | None = None) -> None:
    """Step ``steps`` times, or until every call has ended, and add what comes to ``lives``."""
    taken = 0
    while engine.unfinished if steps is None else taken < steps:
        delta = engine.step()
        taken += 1
        for identity, tokens in zip(delta.calls, delta.tokens, strict=True):
            lives.setdefault(identity, Life()).parts.append(tokens)
        for identity, reason in delta.finished.items():
            lives[identity].finish = reason


def run(engine: Engine, requests: Iterable[GenerationRequest]) -> dict[CallIdentity, Life]:
    """Start all requests at once and run them to their ends."""
    lives: dict[CallIdentity, Life] = {}
    for asked in requests:
        engine.start(asked)
    collect(engine, lives)
    return lives


def alone(engine: Engine, asked: GenerationRequest) -> Life:
    return run(engine, [asked])[asked.identity]


def resumed(engine: Engine, asked: GenerationRequest, prefix: Tokens, resume: Any = "exact") -> Life:
    """Run a call alone from a prefix; what is returned holds the new tokens only."""
    lives: dict[CallIdentity, Life] = {}
    engine.start(asked, prefix, resume)
    collect(engine, lives)
    return lives[asked.identity]
