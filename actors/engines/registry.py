"""Engines by name. A spec is plain data that travels to the process which builds the engine; only there, and only by
`build_engine`, are torch and the model's libraries imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from actors.engines.contract import Engine
from policies.errors import EngineError

if TYPE_CHECKING:
    import torch

Option = str | int | float | bool

_SHARED_OPTIONS: Final[Mapping[str, Option]] = {"rows": 8, "threads": 1, "max_context": 0, "device": "cpu"}
_DEFAULTS: Final[Mapping[str, Mapping[str, Option]]] = {
    "smollm2": _SHARED_OPTIONS,
    "tiny": {**_SHARED_OPTIONS, "seed": 0},
}


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine, and its options.

    ``rows``: height of the tile, the number of calls decoded at once (8). ``threads``: torch threads of the process
    (1). ``max_context``: longest prompt plus ``max_tokens`` (0: the model's own limit). ``device``: ``"cpu"``,
    ``"cuda"`` or ``"auto"`` (CUDA when there is one). ``seed``: of the weights, for ``tiny`` only (0).
    """

    name: str
    options: Mapping[str, Option] = field(default_factory=dict)


def build_engine(spec: EngineSpec) -> Engine:
    """Load the engine of ``spec``. Raises `EngineError` for an unknown name or option, an option of the wrong type or
    out of range, a device that is not there, or a model that is not installed."""
    options = _checked(spec)
    import torch

    torch.set_num_threads(int(options["threads"]))
    device = _device(str(options["device"]))
    rows, max_context = int(options["rows"]), int(options["max_context"]) or None
    if spec.name == "tiny":
        from actors.engines import tiny

        return tiny.build(rows, device, max_context, seed=int(options["seed"]))
    from actors.engines import smollm2

    return smollm2.build(rows, device, max_context)


def _checked(spec: EngineSpec) -> dict[str, Option]:
    if spec.name not in _DEFAULTS:
        raise EngineError(f"unknown engine {spec.name!r}; known are {', '.join(sorted(_DEFAULTS))}")
    defaults = _DEFAULTS[spec.name]
    for name, value in spec.options.items():
        if name not in defaults:
            raise EngineError(f"engine {spec.name!r} has no option {name!r}; it has {', '.join(sorted(defaults))}")
        if type(value) is not type(defaults[name]):
            raise EngineError(f"option {name!r} is {value!r}; it must be of type {type(defaults[name]).__name__}")
        least = 1 if name in ("rows", "threads") else 0
        if isinstance(value, int) and value < least:
            raise EngineError(f"option {name!r} is {value}; it must be at least {least}")
    return {**defaults, **spec.options}


def _device(name: str) -> torch.device:
    import torch

    if name not in ("cpu", "cuda", "auto"):
        raise EngineError(f"option 'device' is {name!r}; it must be 'cpu', 'cuda' or 'auto'")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("option 'device' is 'cuda' and torch finds no CUDA device here; use 'cpu' or 'auto'")
    return torch.device("cpu" if name == "cpu" or not torch.cuda.is_available() else "cuda")
