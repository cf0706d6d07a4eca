"""The fixed table of dtypes. A dtype travels by its name, and a name outside this table is refused.

What numpy has and can share as raw memory is stored as it is. Everything else is stored as unsigned or signed integers
of its width and gets its meaning back from whoever has the type: numpy its times, `actors.ragged` the types of torch
(bfloat16, the float8 family, half-precision complex, and the sub-byte types, one element a byte as torch keeps them).
"""

from __future__ import annotations

from functools import lru_cache
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
_TIME_UNITS = ("", *(f"[{unit}]" for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")))
_TIMES = tuple(kind + unit for kind in ("datetime64", "timedelta64") for unit in _TIME_UNITS)
_OF_TORCH = {
    "bfloat16": "uint16", "complex32": "uint32",
    "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "float8_e4m3fnuz": "uint8", "float8_e5m2fnuz": "uint8",
    "float8_e8m0fnu": "uint8", "float4_e2m1fn_x2": "uint8",
    "bits8": "uint8", "bits16": "uint16", "bits1x8": "uint8", "bits2x4": "uint8", "bits4x2": "uint8",
    **{f"{sign}{width}": "uint8" for sign in ("int", "uint") for width in range(1, 8)},
}
# fmt: on
_STORAGE: dict[str, np.dtype[Any]] = {
    name: np.dtype(stored).newbyteorder("<")
    for name, stored in {
        **{name: name for name in _NUMPY},
        **dict.fromkeys(_TIMES, "int64"),
        **_OF_TORCH,
        BYTES: "uint8",
        MSGPACK: "uint8",
    }.items()
}
_READABLE: dict[str, np.dtype[Any]] = {name: np.dtype(name).newbyteorder("<") for name in (*_NUMPY, *_TIMES)}

_INSTEAD = {
    "O": "give a list with one item per key",
    "U": "give a list of str, or the characters as integers",
    "T": "give a list of str",
    "S": "give a list of bytes, since numpy drops trailing zero bytes",
    "V": "give each of its fields as a field of its own",
}
_WIDER_THAN_ANYWHERE_ELSE = "its width depends on the machine; convert it to float64 or complex128"


def storage_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype in which values of dtype ``name`` are kept; `WireError` for an unknown name."""
    try:
        return _STORAGE[name]
    except (KeyError, TypeError):
        raise WireError(f"unknown dtype {name!r}; known are {', '.join(sorted(_STORAGE))}") from None


def readable_dtype(name: str) -> np.dtype[Any] | None:
    """The numpy dtype that values of dtype ``name`` have; None when numpy has no such dtype."""
    return _READABLE.get(name)


@lru_cache(maxsize=256)
def dtype_name(dtype: np.dtype[Any]) -> str:
    """The name under which arrays of ``dtype`` are kept, in either byte order; `WireError` says what to give instead.

    A dtype that another package has taught numpy (such as ``ml_dtypes.bfloat16``) goes by its own name.
    """
    name = str(dtype.name)
    if name in _STORAGE and name not in (BYTES, MSGPACK):
        return name
    instead = _WIDER_THAN_ANYWHERE_ELSE if dtype.kind in "fc" else _INSTEAD.get(dtype.kind, "convert it")
    raise WireError(f"unknown dtype {name!r}: arrays of it are not kept; {instead}")
