"""The fixed table of dtypes. A dtype travels by its name, and a name outside this table is refused.

Types that numpy lacks (bfloat16 and the float8 family) are stored as unsigned integers of their width; `actors.tensors`
gives them back their meaning where torch is present.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from policies.errors import WireError

BYTES: Final = "bytes"
MSGPACK: Final = "msgpack"

# fmt: off
_NUMPY = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64", "complex64", "complex128",
)
# fmt: on
_CARRIED = {
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "float8_e4m3fnuz": "uint8",
    "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8",
    BYTES: "uint8",
    MSGPACK: "uint8",
}
_STORAGE: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in _NUMPY},
    **{name: np.dtype(stored).newbyteorder("<") for name, stored in _CARRIED.items()},
}


def storage_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype in which values of dtype ``name`` are kept; `WireError` for an unknown name."""
    try:
        return _STORAGE[name]
    except (KeyError, TypeError):
        raise WireError(f"unknown dtype {name!r}; known are {', '.join(sorted(_STORAGE))}") from None
