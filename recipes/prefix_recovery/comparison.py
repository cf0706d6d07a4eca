"""The recovered rows against those of the uninterrupted run, row by row and bit by bit.

Row files are safetensors: ``<call>/ids`` int32 (T,) and ``<call>/logprobs`` float32 (T,) of each call, and the model's
fingerprint as JSON in the metadata. Rules: a row matches when its token ids are all equal; logprobs are compared
wherever both rows have a token, bitwise (so -0.0 differs from 0.0, and a NaN equals itself). Cost: one read of both
files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from policies.errors import CheckpointMissing, FingerprintMismatch

FINGERPRINT = "fingerprint"


@dataclass(frozen=True, slots=True)
class Row:
    """Generated tokens of one call: ``ids`` int32 (T,), ``logprobs`` float32 (T,)."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowComparison:
    """One call. ``expected`` and ``found`` are token counts, None where the row is missing. ``max_abs_diff`` is over
    the ``logprobs`` compared, infinite where just one side is no finite number."""

    call: str
    expected: int | None
    found: int | None
    matches: bool
    logprobs: int
    bit_identical: int
    max_abs_diff: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All calls, in the order they were asked for."""

    rows: tuple[RowComparison, ...]

    @property
    def matching(self) -> int:
        return sum(row.matches for row in self.rows)

    @property
    def all_match(self) -> bool:
        return self.matching == len(self.rows)

    @property
    def logprobs(self) -> int:
        return sum(row.logprobs for row in self.rows)

    @property
    def bit_identical(self) -> int:
        return sum(row.bit_identical for row in self.rows)

    @property
    def max_abs_diff(self) -> float:
        return max((row.max_abs_diff for row in self.rows), default=0.0)


def read_rows(path: Path) -> tuple[Mapping[str, Row], str]:
    """The rows of a file by call, and its fingerprint (empty when it names none).

    Raises `CheckpointMissing` when the file is not there or is no whole file of rows.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            names = set(file.keys())
            calls = sorted({name.rsplit("/", 1)[0] for name in names})
            rows = {call: _row(file, call) for call in calls}
            return rows, (file.metadata() or {}).get(FINGERPRINT, "")
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointMissing(f"cannot read rows from {path}: {error}; run the recipe again") from error


def _row(file: Any, call: str) -> Row:
    ids, logprobs = file.get_tensor(f"{call}/ids"), file.get_tensor(f"{call}/logprobs")
    if ids.dtype != np.int32 or logprobs.dtype != np.float32 or ids.ndim != 1 or ids.shape != logprobs.shape:
        raise ValueError(
            f"call {call} has ids {ids.dtype}{ids.shape} and logprobs {logprobs.dtype}{logprobs.shape}, not int32 and "
            "float32 of one length"
        )
    return Row(ids, logprobs)


def compare_files(calls: Sequence[str], reference: Path, recovered: Path) -> Comparison:
    """Compare two row files. Raises `FingerprintMismatch` when they come from different models."""
    expected, model = read_rows(reference)
    found, other = read_rows(recovered)
    if model != other:
        raise FingerprintMismatch(f"{recovered} is of the model {other or '?'}, {reference} of {model or '?'}")
    return Comparison(tuple(compare_rows(call, expected.get(call), found.get(call)) for call in calls))


def compare_rows(call: str, expected: Row | None, found: Row | None) -> RowComparison:
    """Compare one call's row with its reference; a missing row matches nothing."""
    if expected is None or found is None:
        return RowComparison(call, _length(expected), _length(found), False, 0, 0, 0.0)
    common = min(len(expected.ids), len(found.ids))
    a, b = expected.logprobs[:common], found.logprobs[:common]
    same = a.view(np.uint32) == b.view(np.uint32)
    return RowComparison(
        call=call,
        expected=len(expected.ids),
        found=len(found.ids),
        matches=bool(np.array_equal(expected.ids, found.ids)),
        logprobs=common,
        bit_identical=int(np.count_nonzero(same)),
        max_abs_diff=_largest_difference(a[~same], b[~same]),
    )


def _length(row: Row | None) -> int | None:
    return None if row is None else len(row.ids)


def _largest_difference(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    if not len(a):
        return 0.0
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    return float(np.abs(a.astype(np.float64) - b.astype(np.float64)).max())
