"""Tensors of any device become host memory, whole. Devices are those of the machine; the way from a device is also
taken by host tensors, so that it is tested where there is none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors import host_copy
from actors.ragged import RaggedTensor
from actors.tensors import as_column
from tests.tensor_bits import KEPT_DTYPES, bits, filled

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = [(2, 3), (0, 3), (5, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_a_tensor_is_stored_the_same_from_every_device(device: str, dtype: torch.dtype) -> None:
    rows = [filled(shape, dtype) for shape in SHAPES]
    there = [row.to(device) for row in rows]
    assert [bits(row) for row in RaggedTensor(as_column("x", there))] == [bits(row) for row in rows]
    for dense in (rows[2], rows[2].t()):
        assert [bits(row) for row in RaggedTensor(as_column("x", dense.to(device)))] == [bits(row) for row in dense]
    nested = torch.nested.nested_tensor(there, layout=torch.jagged)
    assert [bits(row) for row in RaggedTensor(as_column("x", nested))] == [bits(row) for row in rows]


@pytest.mark.parametrize("dtype", KEPT_DTYPES, ids=str)
def test_the_copy_from_a_device_lays_rows_side_by_side(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [filled(shape, dtype) for shape in SHAPES] + [filled((3, 5), dtype).t()]
    joined = host_copy.joined_on_host(rows)
    monkeypatch.setattr(
        host_copy, "_copied", lambda tensors, stored, count: host_copy._fetched(tensors, count).numpy().view(stored)
    )
    name, values, shapes = host_copy.joined_on_host(rows)
    assert (name, shapes) == (joined[0], joined[2])
    assert values.dtype == joined[1].dtype and values.tobytes() == joined[1].tobytes()
    assert values.tobytes() == b"".join(bits(row) for row in rows)


def test_without_pinned_memory_ordinary_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may refuse to pin, as it does where there is no device driver."""
    asked: list[bool] = []
    empty = torch.empty

    def refusing(*size: int, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("cannot pin")
        return empty(*size, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", refusing)
    fetched = host_copy._fetched([torch.arange(3), torch.arange(2)], 5)
    assert fetched.tolist() == [0, 1, 2, 0, 1] and asked == [True, False]


def test_a_row_on_the_host_is_never_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "_fetched", lambda *_: pytest.fail("host tensors need no fetching"))
    assert np.array_equal(as_column("x", [torch.arange(3)]).row(0), np.arange(3))
