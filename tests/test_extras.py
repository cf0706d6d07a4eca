"""The layout of extras."""

from __future__ import annotations

import numpy as np
import pytest

from policies.calls import Tokens
from policies.extras import described, extras_fault, joined_extras, layout_of, token_bytes
from tests.generated_tokens import tokens

ROUTES = {"routes": np.zeros((5, 48, 8), np.int16), "entropy": np.zeros(5, np.float32)}


def test_a_layout_is_names_dtypes_and_trailing_shapes() -> None:
    layout = layout_of(ROUTES)
    assert layout == (("entropy", "float32", ()), ("routes", "int16", (48, 8)))
    assert token_bytes(layout) == 4 + 48 * 8 * 2
    assert described(layout) == "entropy: float32 (T); routes: int16 (T, 48, 8)" and described(()) == "none"
    assert layout_of({name: array[:0] for name, array in ROUTES.items()}) == layout
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in ROUTES.items()}
    assert layout_of(swapped) == layout


def test_what_makes_no_sense_is_named() -> None:
    assert extras_fault(ROUTES, 5) is None
    assert extras_fault({}, 5) is None
    for extras, words in (
        (ROUTES, "4 ids, 5 of extra 'routes'"),
        ({"versions": np.zeros(4)}, "must not be named"),
        ({"x": [1, 2, 3, 4]}, "came as list"),
        ({"x": np.array(["a"] * 4)}, "came as ndarray <U1"),
        ({"x": np.zeros((), np.int8)}, "came as ndarray int8"),
    ):
        assert words in str(extras_fault(extras, 4))  # type: ignore[arg-type]


def test_runs_of_tokens_join_with_their_extras() -> None:
    parts = [tokens(0, 2, layers=2), tokens(2, 0, layers=2), tokens(2, 3, layers=2)]
    whole, run = Tokens.joined(parts), tokens(0, 5, layers=2)
    for name in ("ids", "logprobs", "versions", "cuttable"):
        assert getattr(whole, name).tolist() == getattr(run, name).tolist()
    assert whole.extras["routes"].tobytes() == run.extras["routes"].tobytes()
    with pytest.raises(ValueError, match=r"extras of a call changed: none / routes"):
        Tokens.joined([tokens(0, 2), tokens(2, 1, layers=1)])
    assert joined_extras([]) == {}
