"""Which rows are stored: the same for every system, and a function of where they belong.

Each of ``clients`` processes owns an equal part and brings it in PUTs of ``rows_per_put`` rows. What one PUT holds is a
window of one array, one token further on for each PUT, so that a client needs memory for one PUT only, and rows differ
as long as they have no fewer tokens than a client has PUTs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Fields = Mapping[str, NDArray[Any]]

TOKEN_BYTES: Final = 16
_CLIENT_STRIDE: Final = 1 << 40
_PRIMES: Final = (4093, 5)


@dataclass(frozen=True, slots=True)
class Load:
    """``rows`` is rounded up to whole PUTs of all clients."""

    rows: int
    tokens: int
    rows_per_put: int
    clients: int

    @property
    def puts(self) -> int:
        """PUTs of each client."""
        return -(-self.rows // (self.clients * self.rows_per_put))

    @property
    def stored_rows(self) -> int:
        return self.clients * self.puts * self.rows_per_put

    @property
    def row_bytes(self) -> int:
        return self.tokens * TOKEN_BYTES

    @property
    def stored_bytes(self) -> int:
        return self.stored_rows * self.row_bytes

    def keys(self, client: int) -> list[str]:
        """Of the rows that a client owns, in the order in which it writes them."""
        return [f"{client}/{number}" for number in range(self.puts * self.rows_per_put)]

    def puts_of(self, client: int) -> list[tuple[list[str], Fields]]:
        """The keys and fields ``(rows, tokens)`` of each PUT; views of one array per field."""
        count, keys = self.rows_per_put * self.tokens, self.keys(client)
        window = _values(client, 0, count + self.puts)
        shape = (self.rows_per_put, self.tokens)
        return [
            (
                keys[put * self.rows_per_put : (put + 1) * self.rows_per_put],
                {name: values[put : put + count].reshape(shape) for name, values in window.items()},
            )
            for put in range(self.puts)
        ]

    def row(self, key: str) -> Fields:
        """What must be read under ``key``."""
        client, number = map(int, key.split("/"))
        put, place = divmod(number, self.rows_per_put)
        return _values(client, put + place * self.tokens, self.tokens)


@dataclass(frozen=True, slots=True)
class Reading:
    """How rows are read: ``keys_per_get`` together, ``in_flight`` GETs at once in each process. ``scattered``: the keys
    of a GET lie far from each other in the order of writing. ``touched``: what came is also summed up."""

    keys_per_get: int
    in_flight: int = 1
    scattered: bool = False
    touched: bool = False

    def gets(self, keys: list[str]) -> list[list[str]]:
        size = self.keys_per_get
        if self.scattered:
            count = -(-len(keys) // size)
            return [keys[first::count] for first in range(count)]
        return [keys[at : at + size] for at in range(0, len(keys), size)]


def _values(client: int, first: int, count: int) -> Fields:
    index = np.arange(first, first + count, dtype=np.int64)
    return {
        "ids": index + client * _CLIENT_STRIDE,
        "mask": (index % _PRIMES[1] != client % _PRIMES[1]).astype(np.float32),
        "logprobs": ((index + client) % _PRIMES[0]).astype(np.float32) * np.float32(-0.001),
    }
