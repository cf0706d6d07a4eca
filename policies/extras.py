"""Extras: what an engine records of each token beside its id, logprob and weight version, such as the experts a
mixture-of-experts model routed it to.

Rules:
1. An extra is an array (T, …) with one entry per token, of any trailing shape and of a dtype of the fixed table.
2. A call's extras have one layout (names, dtypes, trailing shapes) for all of its tokens: the rows of its chunks join
   to one array each, and calls of one layout share a PUT.
3. They are as much part of the call as its ids: digests cover them, and a chain that lost them does not verify.

Costs: nothing here looks at values; all functions are O(number of extras).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.dtypes import storage_dtype
from policies.errors import WireError

Extras = Mapping[str, NDArray[Any]]

RESERVED_NAMES: Final = frozenset({"ids", "logprobs", "versions", "cuttable"})


class ExtraLayout(NamedTuple):
    """``dtype`` by name, ``shape`` without the token dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} ({', '.join(map(str, ('T', *self.shape)))})"


Layout = tuple[ExtraLayout, ...]
"""Sorted by name."""


def layout_of(extras: Extras) -> Layout:
    return tuple(ExtraLayout(name, array.dtype.name, tuple(array.shape[1:])) for name, array in sorted(extras.items()))


def token_bytes(layout: Layout) -> int:
    """Bytes that one token's extras take."""
    if not layout:
        return 0
    return sum(np.dtype(extra.dtype).itemsize * math.prod(extra.shape) for extra in layout)


def extras_fault(extras: Extras, tokens: int) -> str | None:
    """What is wrong with the extras of ``tokens`` new tokens, in words; None when nothing is."""
    for name, array in extras.items():
        if name in RESERVED_NAMES:
            return f"an extra must not be named {name!r}"
        if not isinstance(array, np.ndarray) or array.ndim == 0 or not _is_storable(array.dtype.name):
            return f"extra {name!r} came as {type(array).__name__} {getattr(array, 'dtype', '')}"
        if len(array) != tokens:
            return f"the parts of a delta disagree in length: {tokens} ids, {len(array)} of extra {name!r}"
    return None


def described(layout: Layout) -> str:
    return "; ".join(map(str, layout)) or "none"


def joined_extras(parts: Sequence[Extras]) -> dict[str, NDArray[Any]]:
    """The extras of consecutive runs of tokens as one. Raises `ValueError` when their layouts differ."""
    layouts = {layout_of(extras) for extras in parts}
    if len(layouts) > 1:
        raise ValueError(f"the extras of a call changed: {' / '.join(sorted(map(described, layouts)))}")
    return {name: np.concatenate([extras[name] for extras in parts]) for name in (parts[0] if parts else ())}


def _is_storable(dtype: str) -> bool:
    try:
        return str(storage_dtype(dtype).name) == dtype
    except WireError:
        return False
