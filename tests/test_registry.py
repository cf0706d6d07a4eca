"""Engines by name: clear refusals, and no torch until one is built."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from actors.engines.registry import EngineSpec, Option, build_engine
from policies.errors import EngineError
from tests.engine_runs import alone, request


def test_importing_the_registry_imports_no_torch() -> None:
    """Processes that only hand a spec on stay small."""
    code = "import sys, actors.engines.registry, actors.engines.contract; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(EngineError, match="unknown engine 'gpt'; known are smollm2, tiny"):
        build_engine(EngineSpec("gpt"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"row": 8}, "no option 'row'; it has device, max_context, rows, seed, threads"),
        ({"rows": 0}, "'rows' is 0; it must be at least 1"),
        ({"rows": True}, "'rows' is True; it must be of type int"),
        ({"threads": "two"}, "'threads' is 'two'; it must be of type int"),
        ({"device": "tpu"}, "'device' is 'tpu'; it must be 'cpu', 'cuda' or 'auto'"),
        ({"max_context": 5000}, "max_context is 5000; this model allows 1..4096"),
    ],
)
def test_impossible_options_are_named(options: dict[str, Option], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        build_engine(EngineSpec("tiny", options))


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match="finds no CUDA device"):
        build_engine(EngineSpec("tiny", {"device": "cuda"}))
    assert build_engine(EngineSpec("tiny", {"device": "auto"})).unfinished == 0


def test_options_reach_the_engine() -> None:
    engine = build_engine(EngineSpec("tiny", {"rows": 2, "threads": 1, "max_context": 16, "seed": 9}))
    assert engine.fingerprint.model.startswith("tiny-9@")
    for i in range(3):
        engine.start(request(str(i), (65,), 4, min_tokens=4))
    assert len(engine.step().calls) == 2
    with pytest.raises(EngineError, match="context has 16"):
        engine.start(request("long", (65,), 16))


def test_the_default_engine_generates() -> None:
    engine = build_engine(EngineSpec("tiny"))
    assert len(alone(engine, request("a", engine.encode("hello"), 8)).ids) == 8
