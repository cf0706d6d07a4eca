"""The plan of a run: everything a job driver needs to know, as one JSON file that both lives read.

Guarantees: `Plan.read` returns exactly what `Plan.write` was given or raises `ConfigError` naming the file and the
field. A file that says ``"recipe": "prefix_recovery"`` is also the mark by which a directory is known as a run's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from policies.config import load
from policies.errors import ConfigError

RECIPE: Final = "prefix_recovery"
PLAN_FILE: Final = "plan.json"


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """One generation: ``id`` is unique in the run, ``seed`` keys its draws."""

    id: str
    prompt: str
    seed: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of a run, its calls, and where its files lie.

    ``cut_after``: generated tokens of the slowest active call before the first cut; ``cut_gap``: tokens between cuts.
    ``reference`` and ``rows``: safetensors files of the uninterrupted and of the recovered rows. ``checkpoints``: a
    directory of checkpoints. ``temp_dir``: short, empty at the start of each life, removed after it. ``address``: an
    existing Ray cluster, empty for one of the job's own.
    """

    engine: str
    leaders: int
    calls: tuple[PlannedCall, ...]
    max_tokens: int
    cut_after: int
    cuts: int
    cut_gap: int
    seed: int
    temperature: float
    top_p: float
    resume: str
    address: str
    reference: str
    checkpoints: str
    rows: str
    temp_dir: str

    @property
    def options(self) -> Mapping[str, Any]:
        """The plan without the texts of its calls and its paths: what a report repeats."""
        plain = dataclasses.asdict(self)
        for name in ("calls", "reference", "checkpoints", "rows", "temp_dir"):
            del plain[name]
        return plain

    def write(self, path: Path) -> None:
        """Write the file whole: a stop at any moment leaves the earlier one or this one."""
        plain = {"recipe": RECIPE, **dataclasses.asdict(self)}
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(plain, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises `ConfigError` when the file is missing, unreadable or no plan of this recipe."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the plan {path}: {error}") from error
        if not isinstance(plain, dict) or plain.pop("recipe", None) != RECIPE:
            raise ConfigError(f"{path} is no plan of this recipe; give a directory that an earlier run wrote")
        try:
            calls = tuple(load(PlannedCall, call, "calls: ") for call in plain.pop("calls"))
            return cls(calls=calls, **{f.name: _checked(f, plain.pop(f.name)) for f in _scalars()}, **plain)
        except (KeyError, TypeError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{path} is no whole plan of this recipe: {error}") from error


def _scalars() -> list[dataclasses.Field[Any]]:
    return [f for f in dataclasses.fields(Plan) if f.name != "calls"]


def _checked(declared: dataclasses.Field[Any], value: Any) -> Any:
    if type(value).__name__ != declared.type:
        raise ConfigError(f"field {declared.name!r} is {value!r}; it must be of type {declared.type}")
    return value
