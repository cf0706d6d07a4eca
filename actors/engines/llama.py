"""A Llama decoder (RMSNorm, rotary positions, grouped-query attention, SwiGLU) whose result for a call does not depend
on what else is in the batch.

Floating-point sums change in their last bits with the order of summation, and the order changes with the shape of the
operands. So every decoding pass works on a *tile* of exactly ``rows`` rows, a row being one token of one call at one
position, and rows nobody needs are padding: the matrix products always have the same shape. Attention is computed for
each row alone over exactly its own history. Prompts, and the prefixes of calls that are resumed exactly, go through
the same tile, several consecutive positions of a call at a time. A row's result is therefore a function of its call's
tokens up to its position, bit for bit: a call resumed this way is nothing but a call with a longer prompt.

`Llama.prefill` is the other way: all positions of a call in one pass. It costs about 2 ms a token for a model of
135 million parameters on one core, against 5 ms in a tile of 8, and its results differ in the last bits.

Cost of a tile: it reads all weights once, whatever the number of rows used, and each row reads its call's cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engines.tile_linear import TileLinear


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The numbers of a Llama. ``context``: positions it was made for; ``heads`` is a multiple of ``kv_heads``."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    rope_theta: float
    norm_epsilon: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer, float32. ``qkv`` ((heads + 2 kv_heads) head_dim, hidden): query, key and value rows, rotary halves
    split (not interleaved); ``attention_out`` (hidden, heads head_dim); ``gate_up`` (2 intermediate, hidden);
    ``down`` (hidden, intermediate); the norms (hidden,)."""

    attention_norm: Tensor
    qkv: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LlamaWeights:
    """``embedding`` (vocab_size, hidden), ``norm`` (hidden,), ``head`` (vocab_size, hidden): the embedding itself when
    the model ties them."""

    shape: LlamaShape
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CallCache:
    """Keys and values of one call: float32 (layers, 2, kv_heads, capacity, head_dim)."""

    kv: Tensor

    @property
    def capacity(self) -> int:
        return int(self.kv.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Consecutive positions ``begin..begin + len(ids)`` of one call, to be computed in one pass."""

    cache: CallCache
    begin: int
    ids: Sequence[int]


class _Layer:
    """The packed form of `LayerWeights`."""

    def __init__(self, weights: LayerWeights, rows: int, device: torch.device) -> None:
        self.attention_norm = weights.attention_norm.to(device)
        self.qkv = TileLinear(weights.qkv.to(device), rows)
        self.attention_out = TileLinear(weights.attention_out.to(device), rows)
        self.mlp_norm = weights.mlp_norm.to(device)
        self.gate_up = TileLinear(weights.gate_up.to(device), rows)
        self.down = TileLinear(weights.down.to(device), rows)


class Llama:
    """``rows`` is the height of the tile. The weights are copied (packed); the caller's may be dropped."""

    def __init__(self, weights: LlamaWeights, rows: int, device: torch.device) -> None:
        self.shape, self.rows, self.device = weights.shape, rows, device
        self._embedding = weights.embedding.to(device)
        self._layers = tuple(_Layer(layer, rows, device) for layer in weights.layers)
        self._norm = weights.norm.to(device)
        self._head = TileLinear(weights.head.to(device), rows)
        self._cos, self._sin = _rotary_tables(weights.shape, device)

    def new_cache(self, capacity: int) -> CallCache:
        """Room for ``capacity`` positions of one call: 8 layers kv_heads head_dim bytes a position."""
        shape = self.shape
        return CallCache(torch.empty(shape.layers, 2, shape.kv_heads, capacity, shape.head_dim, device=self.device))

    @torch.inference_mode()
    def tile(self, runs: Sequence[Run], want_logits: bool) -> Tensor | None:
        """Compute the positions of ``runs`` (at most ``rows`` together) and store their keys and values. Every
        position before a run must be in its cache. Returns logits (rows, vocab_size) on the CPU, the rows of the runs
        in order and then padding; None unless wanted."""
        ids = [token for run in runs for token in run.ids]
        positions = [run.begin + i for run in runs for i in range(len(run.ids))]
        padding = [0] * (self.rows - len(ids))
        x = self._embedding[torch.tensor(ids + padding, device=self.device)]
        rotary = self._rotary(torch.tensor(positions + padding, device=self.device))
        for index, layer in enumerate(self._layers):
            query, key_value = self._project(layer, x, rotary)
            x = self._finish(layer, x, self._attend_rows(index, runs, query, key_value))
        if not want_logits:
            return None
        return self._head(self._normed(x, self._norm)).cpu()

    @torch.inference_mode()
    def prefill(self, run: Run) -> None:
        """Compute all positions of ``run``, which begins at position 0, in one pass and store their keys and
        values."""
        count = len(run.ids)
        x = self._embedding[torch.tensor(run.ids, device=self.device)]
        rotary = self._rotary(torch.arange(count, device=self.device))
        for index, layer in enumerate(self._layers):
            query, key_value = self._project(layer, x, rotary)
            stored = key_value.permute(1, 2, 0, 3)
            run.cache.kv[index, :, :, :count] = stored
            heads = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None], stored[None, 0], stored[None, 1], is_causal=True, enable_gqa=True
            )
            x = self._finish(layer, x, heads[0].transpose(0, 1).reshape(count, -1))

    def _project(self, layer: _Layer, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Rotated queries (n, heads, head_dim) and keys with values (n, 2, kv_heads, head_dim) of the rows ``x``."""
        shape = self.shape
        mixed = layer.qkv(self._normed(x, layer.attention_norm)).view(len(x), -1, shape.head_dim)
        rotated, value = mixed.tensor_split([shape.heads + shape.kv_heads], 1)
        rotated = _rotate(rotated, *rotary)
        query, key = rotated.tensor_split([shape.heads], 1)
        return query, torch.stack((key, value), 1)

    def _attend_rows(self, index: int, runs: Sequence[Run], query: Tensor, key_value: Tensor) -> Tensor:
        """Store the rows' keys and values of layer ``index``, then attend row by row: (rows, heads head_dim)."""
        heads: list[Tensor] = []
        for run in runs:
            stored, row = run.cache.kv[index], len(heads)
            count = len(run.ids)
            stored[:, :, run.begin : run.begin + count] = key_value[row : row + count].permute(1, 2, 0, 3)
            for position in range(run.begin + 1, run.begin + count + 1):
                key, value = stored[:, None, :, :position].unbind(0)
                alone = query[len(heads), None, :, None]
                heads.append(F.scaled_dot_product_attention(alone, key, value, enable_gqa=True).view(1, -1))
        missing = self.rows - len(heads)
        if missing:
            heads.append(query.new_zeros(missing, self.shape.heads * self.shape.head_dim))
        return torch.cat(heads)

    def _finish(self, layer: _Layer, x: Tensor, attended: Tensor) -> Tensor:
        x = x + layer.attention_out(attended)
        gate, up = layer.gate_up(self._normed(x, layer.mlp_norm)).chunk(2, -1)
        return x + layer.down(F.silu(gate) * up)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.hidden,), weight, self.shape.norm_epsilon)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self._cos[positions, None], self._sin[positions, None]


def _rotary_tables(shape: LlamaShape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine (context, head_dim) of the rotary angles (Su et al., RoFormer, 2021)."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(shape.context, dtype=torch.float32)[:, None] / shape.rope_theta**exponents
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(device), torch.cat((-sin, sin), -1).to(device)


def _rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate (n, heads, head_dim) by the angles of its rows: element i turns with element i + head_dim / 2."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * signed_sin
