"""The tiny model: determined by its seed, with text worth testing on."""

from __future__ import annotations

import torch

from actors.engines import tiny
from actors.engines.torch_engine import TorchEngine
from tests.engine_runs import alone, request, run


def build(seed: int) -> TorchEngine:
    torch.set_num_threads(1)
    return tiny.build(8, torch.device("cpu"), None, seed)


def test_a_seed_determines_weights_and_fingerprint() -> None:
    one, same, other = build(1), build(1), build(2)
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint.model != other.fingerprint.model
    asked = request("a", seed=3)
    assert alone(one, asked).ids == alone(same, asked).ids
    assert alone(one, asked).ids != alone(other, asked).ids


def test_fingerprint_says_what_it_is() -> None:
    fingerprint = build(4).fingerprint
    assert fingerprint.model.startswith("tiny-4@xxh3:")
    assert (fingerprint.vocab_size, fingerprint.logprob_mode) == (258, "raw")


def test_text_varies_and_has_bytes_of_characters_of_several_bytes() -> None:
    engine = build(0)
    lives = run(engine, [request(str(i), engine.encode(f"question {i}"), 100, seed=i) for i in range(8)])
    ids = [token for life in lives.values() for token in life.ids]
    assert len(set(ids)) > 150
    assert 0.2 < sum(token >= 0x80 for token in ids) / len(ids) < 0.8
    assert len({tuple(life.ids) for life in lives.values()}) == 8
    assert not all(life.tokens.cuttable.all() for life in lives.values())


def test_end_tokens_are_rare_and_end_a_call() -> None:
    """Of 16 calls of up to 600 tokens some end by themselves, and most live for 100 tokens."""
    lives = run(build(0), [request(str(i), (256, i), 600, seed=i) for i in range(16)]).values()
    ended = [life for life in lives if life.finish == "stop"]
    assert ended and all(life.ids[-1] == tiny.END and tiny.END not in life.ids[:-1] for life in ended)
    assert sum(len(life.ids) >= 100 for life in lives) >= 12
