"""The cache of rows that several callers want in turn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.row_cache import RowCache, row_bytes


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60), st.integers(0, 12))
def test_it_never_holds_more_than_it_may_and_the_longest_unasked_goes_first(
    steps: list[tuple[int, bool]], capacity: int
) -> None:
    """Row n has n bytes. The model is a list, the one asked for last at its end."""
    cache, model = RowCache(capacity), list[int]()
    for number, adds in steps:
        if adds:
            cache.add(number, {"data": bytes(number)})
            if number not in model and number <= capacity:
                model.append(number)
            while sum(model) > capacity:
                del model[0]
        else:
            found = cache.get(number)
            assert (found is not None) == (number in model)
            if found is not None:
                assert found == {"data": bytes(number)}
                model.append(model.pop(model.index(number)))


def test_what_is_kept_is_a_copy_that_nobody_can_write_to() -> None:
    cache, ids = RowCache(100), np.arange(4, dtype=np.int32)
    cache.add("a", {"ids": ids, "tag": b"xy", "plain": 3})
    ids[0] = 7
    row = cache.get("a")
    assert row is not None and row["ids"].tolist() == [0, 1, 2, 3] and row_bytes(row) == 18
    with pytest.raises(ValueError, match="read-only"):
        row["ids"][0] = 7
