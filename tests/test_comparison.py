"""Rows against their reference: ids equal, logprobs bitwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file

from policies.errors import CheckpointMissing, FingerprintMismatch
from recipes.prefix_recovery.comparison import Row, compare_files, compare_rows

logprobs = hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32))


def row(values: np.ndarray) -> Row:
    return Row(np.arange(len(values), dtype=np.int32), values)


@given(logprobs)
def test_a_row_is_identical_to_its_copy(values: np.ndarray) -> None:
    """Whatever its logprobs hold, NaN and -0.0 included."""
    result = compare_rows("c0", row(values), row(values.copy()))
    assert result.matches
    assert result.bit_identical == result.logprobs == len(values)
    assert result.max_abs_diff == 0.0


@given(logprobs.filter(len), st.data())
def test_one_flipped_bit_is_seen(values: np.ndarray, data: st.DataObject) -> None:
    other = values.copy()
    at = data.draw(st.integers(0, len(values) - 1))
    other.view(np.uint32)[at] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    result = compare_rows("c0", row(values), row(other))
    assert result.bit_identical == len(values) - 1
    assert result.matches


@given(st.lists(st.integers(0, 9), max_size=12), st.lists(st.integers(0, 9), max_size=12))
def test_a_row_matches_exactly_when_its_ids_are_equal(expected: list[int], found: list[int]) -> None:
    rows = [Row(np.array(ids, np.int32), np.zeros(len(ids), np.float32)) for ids in (expected, found)]
    result = compare_rows("c0", *rows)
    assert result.matches == (expected == found)
    assert (result.expected, result.found, result.logprobs) == (
        len(expected),
        len(found),
        min(len(expected), len(found)),
    )


def test_a_missing_row_matches_nothing() -> None:
    result = compare_rows("c0", row(np.zeros(3, np.float32)), None)
    assert (result.matches, result.expected, result.found) == (False, 3, None)


def test_the_largest_difference_is_reported() -> None:
    a, b = np.array([0, -1, -2], np.float32), np.array([0, -1.5, -1.75], np.float32)
    assert compare_rows("c0", row(a), row(b)).max_abs_diff == 0.5
    assert compare_rows("c0", row(a), row(np.array([0, np.nan, -2], np.float32))).max_abs_diff == float("inf")


def write(path: Path, calls: dict[str, int], model: str = "m", dtype: type = np.int32) -> Path:
    tensors = {}
    for call, tokens in calls.items():
        tensors[f"{call}/ids"] = np.arange(tokens, dtype=dtype)
        tensors[f"{call}/logprobs"] = np.zeros(tokens, np.float32)
    save_file(tensors, path, {"fingerprint": model})
    return path


def test_files_are_compared_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """Call ids may hold slashes; a call that is in neither file is a row that does not match."""
    reference = write(tmp_path / "a", {"r0/c1": 3, "c0": 4})
    result = compare_files(["c0", "r0/c1", "c9"], reference, write(tmp_path / "b", {"c0": 4, "r0/c1": 2}))
    assert [(r.call, r.matches) for r in result.rows] == [("c0", True), ("r0/c1", False), ("c9", False)]
    assert (result.matching, result.all_match, result.logprobs) == (1, False, 6)


def test_rows_of_another_model_are_not_compared(tmp_path: Path) -> None:
    with pytest.raises(FingerprintMismatch, match="other"):
        compare_files(["c0"], write(tmp_path / "a", {"c0": 3}), write(tmp_path / "b", {"c0": 3}, "other"))


def test_a_file_that_is_missing_cut_off_or_of_other_types_is_named(tmp_path: Path) -> None:
    good = write(tmp_path / "a", {"c0": 30})
    cut_off = tmp_path / "b"
    cut_off.write_bytes(good.read_bytes()[:-7])
    for bad in (tmp_path / "nothing", cut_off, write(tmp_path / "c", {"c0": 3}, dtype=np.int64)):
        with pytest.raises(CheckpointMissing, match=str(bad)):
            compare_files(["c0"], good, bad)
