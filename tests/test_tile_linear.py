"""The packed linear layer: the product it should be, and rows that do not feel each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.tile_linear import TileLinear

SIZES = [(64, 32), (960, 576), (576, 1536), (258, 64)]


@pytest.mark.parametrize(("out", "into"), SIZES)
@pytest.mark.parametrize("count", [1, 8, 13])
def test_product_is_right_for_any_number_of_rows(out: int, into: int, count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(out, into, generator=generator), torch.randn(count, into, generator=generator)
    with torch.inference_mode():
        product = TileLinear(weight, 8)(x)
    assert (product.double() - x.double() @ weight.double().T).abs().max() < 1e-3


@settings(max_examples=40)
@given(st.sampled_from(SIZES), st.sampled_from([4, 8, 16]), st.integers(0, 1000), st.data())
def test_a_row_is_the_same_bits_in_any_company(
    size: tuple[int, int], rows: int, seed: int, data: st.DataObject
) -> None:
    """Moved to another place, beside other rows, with one thread or two."""
    here, there = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, rows - 1))
    generator = torch.Generator().manual_seed(seed)
    linear = TileLinear(torch.randn(*size, generator=generator), rows)
    one, other = (torch.randn(rows, size[1], generator=generator) for _ in range(2))
    other[there] = one[here]
    before = torch.get_num_threads()
    with torch.inference_mode():
        expected = linear(one)[here]
        torch.set_num_threads(2)
        found = linear(other)[there]
        torch.set_num_threads(before)
    assert torch.equal(expected, found)
