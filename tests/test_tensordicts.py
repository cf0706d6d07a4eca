"""TensorDicts as the fields of a put: everything in them arrives, or the put is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensordict
import torch

from actors.ragged import RaggedTensor
from actors.tensors import as_columns
from policies.errors import WireError

KEYS = ["a", "b"]


def rows_of(source: Any, keys: list[str] = KEYS) -> dict[str, list[Any]]:
    """Field → rows, tensors as lists."""
    return {
        name: [row.tolist() if isinstance(row, torch.Tensor) else row for row in RaggedTensor(column)]
        for name, column in as_columns(source, keys).items()
    }


@tensordict.tensorclass
class Rollout:
    ids: torch.Tensor
    origin: str


def test_tensors_nested_ones_and_plain_values_become_fields() -> None:
    ragged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    source = tensordict.TensorDict(
        {
            "score": torch.tensor([0.5, 1.5]),
            "ids": ragged,
            "meta": {"step": torch.tensor([[1], [2]]), "deep": {"text": tensordict.NonTensorStack("x", "y")}},
            "same": tensordict.NonTensorData("s", batch_size=[2]),
            "dicts": tensordict.NonTensorStack({"k": 1}, {"k": None}),
        },
        batch_size=[2],
    )
    assert rows_of(source) == {
        "score": [0.5, 1.5],
        "ids": [[0, 1], [0, 1, 2]],
        "meta.step": [[1], [2]],
        "meta.deep.text": ["x", "y"],
        "same": ["s", "s"],
        "dicts": [{"k": 1}, {"k": None}],
    }


def test_more_batch_dimensions_than_the_keys_are_dimensions_of_the_rows() -> None:
    source = tensordict.TensorDict({"x": torch.arange(6).reshape(2, 3)}, batch_size=[2, 3])
    assert rows_of(source) == {"x": [[0, 1, 2], [3, 4, 5]]}


def test_a_lazy_stack_of_rows_of_different_lengths_is_a_jagged_field() -> None:
    rows = [
        tensordict.TensorDict(
            {"x": torch.arange(n), "name": tensordict.NonTensorData(str(n)), "in": {"y": torch.ones(2)}}
        )
        for n in (2, 3)
    ]
    source = tensordict.LazyStackedTensorDict(*rows, stack_dim=0)
    assert rows_of(source) == {"x": [[0, 1], [0, 1, 2]], "name": ["2", "3"], "in.y": [[1, 1], [1, 1]]}


def test_file_backed_tensors_are_tensors(tmp_path: Path) -> None:
    source = tensordict.TensorDict({"x": torch.arange(2)}, batch_size=[2]).memmap(str(tmp_path))
    assert rows_of(source) == {"x": [0, 1]}


@pytest.mark.parametrize("batch_size", [[], [3], [3, 2]])
def test_another_batch_size_than_the_keys_is_refused(batch_size: list[int]) -> None:
    source = tensordict.TensorDict({"x": torch.zeros(3, 2)}, batch_size=batch_size)
    with pytest.raises(WireError, match="for 2 keys; its first size must be 2"):
        as_columns(source, KEYS)


def test_two_leaves_of_one_path_are_refused() -> None:
    source = tensordict.TensorDict({"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}}, batch_size=[2])
    with pytest.raises(WireError, match=r"field 'a\.b': two leaves"):
        as_columns(source, KEYS)


def test_a_class_of_tensors_is_refused_as_a_put_and_as_a_field() -> None:
    rollout = Rollout(ids=torch.zeros(2), origin="x", batch_size=[2])
    for source in (rollout, tensordict.TensorDict({"r": rollout}, batch_size=[2])):
        with pytest.raises(WireError, match=r"Rollout: give its \.to_tensordict"):
            as_columns(source, KEYS)


def test_a_tensordict_as_one_field_of_a_mapping_is_no_column() -> None:
    with pytest.raises(WireError, match="field 'x': a TensorDict is no column"):
        as_columns({"x": tensordict.TensorDict({"y": torch.zeros(2)}, batch_size=[2])}, KEYS)


def test_a_row_that_does_not_fit_is_refused_by_field_and_key() -> None:
    source = tensordict.TensorDict({"in": {"s": tensordict.NonTensorStack("x", (1, 2))}}, batch_size=[2])
    with pytest.raises(WireError, match=r"field 'in\.s', key 'b': .*tuple"):
        as_columns(source, KEYS)


def test_the_package_is_not_imported_for_its_sake() -> None:
    script = (
        "import sys, numpy; from actors.tensors import as_columns; from actors.ragged import RaggedTensor;"
        "RaggedTensor(as_columns({'x': numpy.ones(2)}, ['a', 'b'])['x']).numpy();"
        "assert not {'torch', 'tensordict'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
