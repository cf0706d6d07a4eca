"""What users put is what they get, through a whole plane: dtype, shape and bits, and always in the same container."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensordict
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.client import DataPlaneClient
from actors.ragged import RaggedTensor
from policies.errors import WireError
from tests.plane_in_process import in_process_plane
from tests.tensor_bits import KEPT_DTYPES, bits
from tests.test_ragged import same, tensor_rows

_PARTITIONS = (f"t{n}" for n in itertools.count())


@pytest.fixture(scope="module")
def client() -> Iterator[DataPlaneClient]:
    with in_process_plane(units=2) as plane:
        yield plane.client()


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(0, 9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(tensor_rows(), st.data())
def test_tensors_of_any_dtype_in_any_split_and_order_are_read_as_they_were_put(
    client: DataPlaneClient, rows: list[torch.Tensor], data: st.DataObject
) -> None:
    """In puts of any size, on two units, read back all at once and each alone."""
    partition = next(_PARTITIONS)
    keys = [f"k{i}" for i in range(len(rows))]
    cut = data.draw(st.integers(0, len(rows)))
    for part in (slice(0, cut), slice(cut, None)):
        if keys[part]:
            client.put(partition, keys[part], {"x": rows[part]})
    order = data.draw(st.permutations(range(len(rows))))
    field = client.get(partition, [keys[i] for i in order])["x"]
    assert type(field) is RaggedTensor and len(field) == len(rows)
    assert all(same(got, rows[i]) for got, i in zip(field, order, strict=True))
    one = client.get(partition, [keys[0]])["x"]
    assert type(one) is RaggedTensor and len(one) == 1 and same(one[0], rows[0])


@settings(max_examples=40, deadline=None)
@given(st.lists(PLAIN.filter(lambda value: type(value) is not bytes), min_size=1, max_size=5), st.data())
def test_plain_values_and_byte_strings_come_back_equal_in_type(
    client: DataPlaneClient, values: list[Any], data: st.DataObject
) -> None:
    partition, keys = next(_PARTITIONS), [f"k{i}" for i in range(len(values))]
    raw = data.draw(st.lists(st.binary(max_size=9), min_size=len(values), max_size=len(values)))
    client.put(partition, keys, {"plain": values, "raw": raw})
    batch = client.get(partition, keys)
    assert repr(batch["plain"].rows()) == repr(values)
    assert batch["raw"].rows() == raw


@pytest.mark.parametrize("dtype", KEPT_DTYPES, ids=str)
def test_a_field_of_every_dtype_is_stored_by_its_name(client: DataPlaneClient, dtype: torch.dtype) -> None:
    partition, value = next(_PARTITIONS), torch.empty((2, 3), dtype=dtype)
    client.put(partition, ["a", "b"], {"x": value})
    assert client.describe()["partitions"][partition]["fields"]["x"]["dtype"] == str(dtype)[6:]
    assert bits(client.get(partition, ["b"])["x"][0]) == bits(value[1])


@pytest.mark.parametrize("lengths", [(5, 5), (5, 6), (5,), (0, 5), (0, 0)])
def test_the_container_does_not_depend_on_whether_lengths_agree(
    client: DataPlaneClient, lengths: tuple[int, ...]
) -> None:
    keys = [f"k{i}" for i in range(len(lengths))]
    rows = [torch.arange(n) + 10 * i for i, n in enumerate(lengths)]
    for together in (True, False):
        partition = next(_PARTITIONS)
        for part in [slice(None)] if together else [slice(i, i + 1) for i in range(len(rows))]:
            client.put(partition, keys[part], {"ids": rows[part]})
        field = client.get(partition, keys)["ids"]
        assert field.shape == (len(rows), -1) and field.lengths().tolist() == list(lengths)
        assert all(torch.equal(got, row) for got, row in zip(field.nested().unbind(), rows, strict=True))
        assert field.padded(-1).shape == (len(rows), max(lengths))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64, torch.float64])
def test_a_scalar_per_row_has_no_dimension(client: DataPlaneClient, dtype: torch.dtype) -> None:
    keys, scores = [f"k{i}" for i in range(8)], torch.arange(8).to(dtype)
    at_once, one_by_one = next(_PARTITIONS), next(_PARTITIONS)
    client.put(at_once, keys, {"score": scores})
    for i, key in enumerate(keys):
        client.put(one_by_one, [key], {"score": scores[i : i + 1]})
    for partition in (at_once, one_by_one):
        assert torch.equal(client.get(partition, keys)["score"].padded(), scores)
        assert torch.equal(client.get(partition, keys[::-1])["score"].padded(), scores.flip(0))
        alone = client.get(partition, ["k3"])["score"]
        assert alone[0].shape == () and alone.padded().shape == (1,) and alone[0] == scores[3]


@pytest.mark.parametrize("shape", [(7,), (7, 4, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_a_nested_tensor_of_one_row_reads_like_one_of_two(
    client: DataPlaneClient, shape: tuple[int, ...], count: int
) -> None:
    partition, keys = next(_PARTITIONS), ["a", "b"][:count]
    rows = [torch.full(shape, i, dtype=torch.uint8) for i in range(count)]
    client.put(partition, keys, {"x": torch.nested.nested_tensor(rows, layout=torch.jagged)})
    nested = client.get(partition, keys)["x"].nested()
    assert nested.layout == torch.jagged and nested.dtype == torch.uint8 and nested.shape[0] == count
    assert all(torch.equal(got, row) for got, row in zip(nested.unbind(), rows, strict=True))


def test_rows_jagged_in_another_dimension_meet_rows_that_agree(client: DataPlaneClient) -> None:
    partition = next(_PARTITIONS)
    rows = [torch.ones(2, 3), torch.zeros(2, 3), torch.ones(2, 3), torch.ones(2, 5)]
    client.put(partition, ["a", "b"], {"x": rows[:2]})
    client.put(partition, ["c", "d"], {"x": rows[2:]})
    field = client.get(partition, ["d", "a", "c", "b"])["x"]
    assert all(torch.equal(got, rows[i]) for got, i in zip(field, (3, 0, 2, 1), strict=True))
    assert field.shape == (4, 2, -1) and field.padded().shape == (4, 2, 5)


def test_numpy_arrays_times_included(client: DataPlaneClient) -> None:
    partition, stamps = next(_PARTITIONS), np.array(["2026-01-01T00:00:01", "NaT"], "M8[ns]")
    client.put(partition, ["a", "b"], {"at": stamps, "big": np.array([1, 2], ">u8")})
    batch = client.get(partition, ["a", "b"])
    assert np.array_equal(np.stack(batch["at"].numpy()), stamps, equal_nan=True)
    assert batch["at"].numpy()[0].dtype == stamps.dtype
    assert batch["big"].rows() == [1, 2] and batch["big"].dtype == torch.uint64


def test_a_tensordict_is_put_and_read(client: DataPlaneClient) -> None:
    partition, ids = next(_PARTITIONS), torch.arange(6).reshape(2, 3)
    source = tensordict.TensorDict({"ids": ids, "meta": {"name": tensordict.NonTensorStack("x", "y")}}, batch_size=[2])
    client.put(partition, ["a", "b"], source)
    batch = client.get(partition, ["b", "a"])
    assert torch.equal(batch["ids"].padded(), ids.flip(0)) and batch["meta.name"].rows() == ["y", "x"]


def test_what_was_read_is_put_again(client: DataPlaneClient) -> None:
    source, copy = next(_PARTITIONS), next(_PARTITIONS)
    client.put(source, ["a", "b"], {"x": [torch.arange(3), torch.arange(2)], "p": [None, [1]]})
    read = client.get(source, ["b", "a"])
    client.put(copy, ["b", "a"], {name: read[name] for name in read.columns})
    batch = client.get(copy, ["a", "b"])
    assert [row.tolist() for row in batch["x"]] == [[0, 1, 2], [0, 1]] and batch["p"].rows() == [None, [1]]


def test_a_refused_row_leaves_nothing_behind(client: DataPlaneClient) -> None:
    partition = next(_PARTITIONS)
    client.put(partition, ["a"], {"x": [torch.ones(2)]})
    with pytest.raises(WireError, match=r"field 'y', key 'b': .*ndarray"):
        client.put(partition, ["a", "b"], {"x": [torch.zeros(2)] * 2, "y": [torch.ones(1), np.ones(1)]})
    assert torch.equal(client.get(partition, ["a"])["x"][0], torch.ones(2))
    assert [key for key, _ in client.list(partition)] == ["a"]
