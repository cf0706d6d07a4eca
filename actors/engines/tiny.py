"""A very small Llama with random weights, so that whole jobs run in a test within seconds.

It is the same code as the real model at other numbers: 2 layers, width 64, a vocabulary of the 256 bytes and two
special tokens. A seed determines its weights. Its text is noise of all byte values, so characters of several bytes
begin and break off everywhere. It draws its end token about once in 2,000 tokens at temperature 1.
"""

from __future__ import annotations

from typing import Final

import torch
import xxhash
from torch import Tensor

from actors.engines.contract import EngineFingerprint
from actors.engines.llama import LayerWeights, Llama, LlamaShape, LlamaWeights
from actors.engines.torch_engine import TorchEngine
from actors.engines.vocabulary import Vocabulary

BEGIN: Final = 256
END: Final = 257
SHAPE: Final = LlamaShape(
    vocab_size=258, hidden=64, intermediate=160, layers=2, heads=4, kv_heads=2, head_dim=16, context=4096,
    rope_theta=10_000.0, norm_epsilon=1e-5,
)  # fmt: skip


def build(rows: int, device: torch.device, max_context: int | None, seed: int) -> TorchEngine:
    """The engine with the weights of ``seed``."""
    weights = random_weights(seed)
    fingerprint = EngineFingerprint(
        model=f"tiny-{seed}@xxh3:{_digest(weights)}",
        tokenizer=f"bytes/{SHAPE.vocab_size}",
        vocab_size=SHAPE.vocab_size,
        logprob_mode="raw",
    )
    return TorchEngine(Llama(weights, rows, device), vocabulary(), fingerprint, max_context)


def vocabulary() -> Vocabulary:
    """One token a byte; a prompt is the begin token and the bytes of the message."""
    return Vocabulary(
        token_bytes=(*(bytes([byte]) for byte in range(256)), b"", b""),
        end_ids=(END,),
        encode=lambda text: (BEGIN, *text.encode()),
    )


def random_weights(seed: int) -> LlamaWeights:
    """Weights from a generator seeded with ``seed``, scaled so that activations keep their size from layer to layer
    and logits have a standard deviation of about 2. The logits of the special tokens are 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, deviation: float) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * deviation

    def layer() -> LayerWeights:
        heads = SHAPE.heads * SHAPE.head_dim
        return LayerWeights(
            attention_norm=torch.ones(SHAPE.hidden),
            qkv=normal(heads + 2 * SHAPE.kv_heads * SHAPE.head_dim, SHAPE.hidden, SHAPE.hidden**-0.5),
            attention_out=normal(SHAPE.hidden, heads, heads**-0.5),
            mlp_norm=torch.ones(SHAPE.hidden),
            gate_up=normal(2 * SHAPE.intermediate, SHAPE.hidden, SHAPE.hidden**-0.5),
            down=normal(SHAPE.hidden, SHAPE.intermediate, SHAPE.intermediate**-0.5),
        )

    embedding = normal(SHAPE.vocab_size, SHAPE.hidden, 1.0)
    layers = tuple(layer() for _ in range(SHAPE.layers))
    head = normal(SHAPE.vocab_size, SHAPE.hidden, 2.0 * SHAPE.hidden**-0.5)
    head[BEGIN:] = 0.0
    return LlamaWeights(SHAPE, embedding, layers, torch.ones(SHAPE.hidden), head)


def _digest(weights: LlamaWeights) -> str:
    state = xxhash.xxh3_64()
    tensors = [weights.embedding, weights.head]
    for layer in weights.layers:
        tensors += [layer.qkv, layer.attention_out, layer.gate_up, layer.down]
    for tensor in tensors:
        state.update(tensor.numpy().tobytes())
    return str(state.hexdigest())
