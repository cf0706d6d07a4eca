"""What a checkpoint is bound to: every runtime knob may change between a save and its restore, nothing that shapes the
data may."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from actors.checkpointing import restore_plane, save_plane
from actors.cut_coordinator import CutCoordinator
from actors.engines.contract import EngineFingerprint
from actors.read_coalescer import ReadCoalescer
from policies import manifest
from policies.calls import CallIdentity, StepDelta
from policies.chain import Chain
from policies.config import CoalescerConfig, RolloutRecoveryConfig
from policies.errors import FingerprintMismatch
from policies.receipts import Continuation, Inventory, Receipt
from tests.generated_tokens import request, tokens
from tests.plane_in_process import in_process_plane

CALL = CallIdentity("r0", "c0")
ENGINE = EngineFingerprint("m", "t", 1000, "raw")
ENGINES = {
    "model": replace(ENGINE, model="another"),
    "tokenizer": replace(ENGINE, tokenizer="another"),
    "vocab_size": replace(ENGINE, vocab_size=1001),
    "logprob_mode": replace(ENGINE, logprob_mode="processed"),
}


def changed(config: Any, name: str) -> Any:
    """``config`` with another value of one field."""
    value = getattr(config, name)
    return replace(config, **{name: value + 1 if isinstance(value, int) else value + 0.5})


KNOBS = [
    *((changed(RolloutRecoveryConfig(), f.name), CoalescerConfig()) for f in fields(RolloutRecoveryConfig)),
    *((RolloutRecoveryConfig(), changed(CoalescerConfig(), f.name)) for f in fields(CoalescerConfig)),
]


async def saved(directory: Path) -> Receipt:
    """A checkpoint with one call of 5 tokens, made with the defaults."""
    with in_process_plane() as plane:
        coordinator = CutCoordinator(plane.address, RolloutRecoveryConfig())
        coordinator.begin(CALL)
        coordinator.observe([StepDelta((CALL,), (tokens(0, 5),), {})])
        receipt = await coordinator.cut(Inventory.of("k", [CALL]))
        save_plane(plane.client(), directory, {"receipt": receipt.to_plain()}, asdict(ENGINE), "k")
        await coordinator.close()
        return receipt


@pytest.mark.parametrize(("recovery", "coalescing"), KNOBS)
async def test_no_runtime_knob_invalidates_a_checkpoint(
    recovery: RolloutRecoveryConfig, coalescing: CoalescerConfig, tmp_path: Path
) -> None:
    await saved(tmp_path)
    with in_process_plane() as plane:
        job = restore_plane(plane.client(), tmp_path, asdict(ENGINE)).job
        acknowledgement = Receipt.from_plain(job["receipt"]).acknowledgements[0]
        continuation = Continuation.of(acknowledgement, request(CALL.next_attempt()))
        coordinator = CutCoordinator(plane.address, recovery)
        coalescer = ReadCoalescer(plane.address, coalescing)
        chain = await coalescer.read_chain(continuation, 0)
        assert isinstance(chain, Chain) and chain.ids.tolist() == list(range(5))
        life = continuation.request.identity
        coordinator.adopt(continuation, chain)
        coordinator.observe([StepDelta((life,), (tokens(5, 2),), {})])
        receipt = await coordinator.cut(Inventory.of("k2", [life]))
        assert receipt.acknowledgements[0].tokens == 7
        await coalescer.close()
        await coordinator.close()


def test_every_field_that_shapes_data_is_tried() -> None:
    assert set(ENGINES) == {f.name for f in fields(EngineFingerprint)}


@pytest.mark.parametrize("name", ENGINES)
async def test_what_shapes_the_data_is_refused_by_name(name: str, tmp_path: Path) -> None:
    await saved(tmp_path)
    with in_process_plane() as plane, pytest.raises(FingerprintMismatch, match=name) as refused:
        restore_plane(plane.client(), tmp_path, asdict(ENGINES[name]))
    assert refused.value.details["field"] == name


async def test_another_schema_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved(tmp_path)
    monkeypatch.setattr(manifest, "SCHEMA_VERSION", manifest.SCHEMA_VERSION + 1)
    with in_process_plane() as plane, pytest.raises(FingerprintMismatch) as refused:
        restore_plane(plane.client(), tmp_path, asdict(ENGINE))
    assert refused.value.details["field"] == "schema_version"
