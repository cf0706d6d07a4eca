"""The forward pass: right against an independent implementation, and bitwise invariant by its tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.engines import tiny
from actors.engines.llama import CallCache, Llama, LlamaWeights, Run

ROWS = 4


@pytest.fixture(scope="module")
def weights() -> LlamaWeights:
    return tiny.random_weights(3)


@pytest.fixture(scope="module")
def model(weights: LlamaWeights) -> Llama:
    torch.set_num_threads(1)
    return Llama(weights, ROWS, torch.device("cpu"))


def through_tiles(model: Llama, ids: list[int], sizes: list[int]) -> Tensor:
    """Logits (len(ids), vocabulary) of one call computed in tiles of the given numbers of positions, then singly."""
    cache, begin, out = model.new_cache(len(ids)), 0, []
    for size in [*sizes, *[1] * len(ids)]:
        part = ids[begin : begin + size]
        if part:
            logits = model.tile([Run(cache, begin, part)], want_logits=True)
            assert logits is not None
            out.append(logits[: len(part)])
            begin += len(part)
    return torch.cat(out)


def reference(weights: LlamaWeights, ids: list[int]) -> Tensor:
    """The same function written out in float64 from its definition, with full attention matrices."""
    shape, count = weights.shape, len(ids)
    x = weights.embedding.double()[ids]
    half = shape.head_dim // 2
    angles = torch.outer(torch.arange(count).double(), shape.rope_theta ** (-torch.arange(half).double() / half))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def normed(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + shape.norm_epsilon).sqrt() * weight.double()

    def rotated(y: Tensor) -> Tensor:
        pairs = torch.complex(y[..., :half], y[..., half:]) * turn
        return torch.cat((pairs.real, pairs.imag), -1)

    for layer in weights.layers:
        mixed = (normed(x, layer.attention_norm) @ layer.qkv.double().T).view(count, -1, shape.head_dim)
        query, key = rotated(mixed[:, : shape.heads]), rotated(mixed[:, shape.heads : shape.heads + shape.kv_heads])
        group = shape.heads // shape.kv_heads
        key = key.repeat_interleave(group, 1)
        value = mixed[:, shape.heads + shape.kv_heads :].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) / shape.head_dim**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).reshape(count, -1)
        x = x + heads @ layer.attention_out.double().T
        gate, up = (normed(x, layer.mlp_norm) @ layer.gate_up.double().T).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down.double().T
    return normed(x, weights.norm) @ weights.head.double().T


ids_of = st.lists(st.integers(0, 257), min_size=1, max_size=24)
sizes_of = st.lists(st.integers(1, ROWS), max_size=8)


@settings(max_examples=15, deadline=None)
@given(ids_of)
def test_logits_are_those_of_the_definition(model: Llama, weights: LlamaWeights, ids: list[int]) -> None:
    assert (through_tiles(model, ids, [ROWS] * 6) - reference(weights, ids)).abs().max() < 1e-4


@settings(max_examples=40, deadline=None)
@given(ids_of, sizes_of)
def test_how_a_call_is_spread_over_tiles_changes_no_bit(model: Llama, ids: list[int], sizes: list[int]) -> None:
    """One position a tile, or several: the logits at each position are the same bits."""
    assert torch.equal(through_tiles(model, ids, sizes), through_tiles(model, ids, []))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, ROWS - 1), st.lists(st.integers(0, 257), min_size=ROWS, max_size=ROWS), st.integers(0, 9))
def test_other_rows_and_the_place_in_the_tile_change_no_bit(
    model: Llama, place: int, others: list[int], depth: int
) -> None:
    """A row gives the same bits alone, at any place, and beside any others at any depth."""
    begun = _cache_of(model, [7] * 9)
    alone = model.tile([Run(begun, 9, [42])], want_logits=True)
    runs = [Run(_cache_of(model, [token] * depth), depth, [token]) for token in others]
    runs[place] = Run(begun, 9, [42])
    among = model.tile(runs, want_logits=True)
    assert alone is not None and among is not None
    assert torch.equal(alone[0], among[place])


def _cache_of(model: Llama, ids: list[int]) -> CallCache:
    cache = model.new_cache(len(ids) + 1)
    for position, token in enumerate(ids):
        model.tile([Run(cache, position, [token])], want_logits=False)
    return cache


@settings(max_examples=20, deadline=None)
@given(ids_of)
def test_prefill_agrees_with_tiles_to_rounding(model: Llama, ids: list[int]) -> None:
    """The keys and values of all positions, in one pass and in tiles."""
    tiles, once = model.new_cache(len(ids)), model.new_cache(len(ids))
    for position, token in enumerate(ids):
        model.tile([Run(tiles, position, [token])], want_logits=False)
    model.prefill(Run(once, 0, ids))
    assert (tiles.kv - once.kv).abs().max() < 1e-4


def test_a_cache_holds_what_was_asked_for(model: Llama) -> None:
    cache = model.new_cache(5)
    assert cache.capacity == 5
    assert cache.kv.shape == (2, 2, 2, 5, 16)


def test_logits_are_only_computed_when_wanted(model: Llama) -> None:
    assert model.tile([Run(model.new_cache(1), 0, [1])], want_logits=False) is None
