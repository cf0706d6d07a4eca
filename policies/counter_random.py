"""The random numbers of a call: a function of (seed, position), so a resumed call draws what it would have drawn.

There is no generator to save or restore. The Philox4x64-10 block cipher (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011; as numpy implements it) is keyed with the seed and applied to the position, which is the
index of the generated token, counted from 0 over the whole life of the call. Different seeds are different keys,
hence unrelated streams. Cost: some 15 µs a number, no state.
"""

from __future__ import annotations

from typing import Final

import numpy as np

SEED_LIMIT: Final = 1 << 128
_MANTISSA: Final = 2.0**-53


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) at ``position`` of stream ``seed``: a multiple of 2^-53.

    Raises `ValueError` when ``seed`` is outside 0..2^128-1 or ``position`` is negative.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed {seed} is outside 0..2^128-1; choose a seed in that range")
    if position < 0:
        raise ValueError(f"position {position} is negative; the first generated token is at position 0")
    word = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (word >> 11) * _MANTISSA
