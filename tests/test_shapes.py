"""Shape numbers and counts: exact, whatever way a shape was said."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import Refused
from policies.shapes import ShapeCounts, ShapeKeys, Shapes, count_rows, discount_rows, uniform

sizes = st.integers(0, 4)
row_shapes = st.lists(sizes, max_size=4).map(tuple)


@st.composite
def columns(draw: st.DrawFn) -> tuple[tuple[int, ...], np.ndarray | None, list[tuple[int, ...]]]:
    """(row shape, lengths, the full shape of each row)."""
    shape = list(draw(row_shapes))
    rows = draw(st.integers(1, 6))
    if not shape or draw(st.booleans()):
        return tuple(shape), None, [tuple(shape)] * rows
    at = draw(st.integers(0, len(shape) - 1))
    lengths = draw(st.lists(sizes, min_size=rows, max_size=rows))
    full = [tuple(length if i == at else n for i, n in enumerate(shape)) for length in lengths]
    shape[at] = -1
    return tuple(shape), np.array(lengths, np.int64), full


def numbered(shapes: Shapes, shape: tuple[int, ...], lengths: np.ndarray | None, rows: int) -> ShapeKeys:
    return shapes.number(shape) if lengths is None else shapes.numbers(shapes.jagged(shape), lengths, rows)


@given(st.lists(columns(), min_size=1, max_size=6))
def test_two_rows_have_one_number_exactly_when_they_have_one_shape(blocks: list) -> None:
    shapes, numbers = Shapes(), {}
    for shape, lengths, full in blocks:
        keys = numbered(shapes, shape, lengths, len(full))
        for row, key in zip(full, np.broadcast_to(keys, len(full)).tolist(), strict=True):
            assert numbers.setdefault(row, key) == key
            assert shapes.shape(key) == row
    assert len(set(numbers.values())) == len(numbers)


@given(st.lists(columns(), min_size=1, max_size=5), st.data())
def test_a_field_is_uniform_exactly_when_its_live_rows_agree(blocks: list, data: st.DataObject) -> None:
    shapes, counts = Shapes(), ShapeCounts()
    live: Counter[tuple[int, ...]] = Counter()
    counted = []
    for shape, lengths, full in blocks:
        keys = numbered(shapes, shape, lengths, len(full))
        count_rows(counts, keys, len(full))
        live.update(full)
        counted.append((keys, full))
    for keys, full in counted:
        gone = data.draw(st.lists(st.integers(0, len(full) - 1), unique=True))
        discount_rows(counts, keys, gone) if gone else None
        live -= Counter(full[i] for i in gone)
        key = uniform(counts)
        assert (None if key is None else shapes.shape(key)) == (next(iter(live)) if len(live) == 1 else None)


@given(st.lists(row_shapes, min_size=1, max_size=8))
def test_restored_shapes_number_all_shapes_alike(seen: list[tuple[int, ...]]) -> None:
    shapes = Shapes()
    numbers = [shapes.number(shape) for shape in seen]
    restored = Shapes(shapes.trailing)
    assert [restored.number(shape) for shape in reversed(seen)] == numbers[::-1]


MISFITS = [
    ((-1,), None),
    ((3, -1), None),
    ((-2, 3), None),
    ((3,), [1, 1]),
    ((-1, -1), [1, 1]),
    ((-1,), [1]),
    ((-1,), [1, -1]),
    ((-1,), [1, 1 << 41]),
]


@pytest.mark.parametrize(("shape", "lengths"), MISFITS)
def test_a_shape_and_lengths_that_do_not_fit_are_refused(shape: tuple[int, ...], lengths: list | None) -> None:
    with pytest.raises(Refused):
        numbered(Shapes(), shape, None if lengths is None else np.array(lengths, np.int64), 2)
