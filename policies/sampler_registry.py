"""Which samplers a plane has, by name: the shipped ones, and those it was launched with.

A spec names a class of this table and gives it values; nothing it says is imported or evaluated. Whatever is wrong with
a spec is a `Refused` that names the sampler, the setting and what exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from policies.errors import Refused
from policies.samplers_balanced import Balanced
from policies.samplers_groups import Groups
from policies.samplers_ranks import Ranks
from policies.samplers_sequential import Sequential
from policies.samplers_staleness import Staleness
from policies.sampling import Sampler, SamplerSpec

SHIPPED: Mapping[str, type[Sampler]] = {
    "sequential": Sequential,
    "groups": Groups,
    "ranks": Ranks,
    "balanced": Balanced,
    "staleness": Staleness,
}


class SamplerRegistry:
    """``own``: samplers beside the shipped ones. `Refused` for a shipped name and for what is no sampler."""

    def __init__(self, own: Mapping[str, type[Sampler]] | None = None) -> None:
        for name, cls in (own or {}).items():
            if name in SHIPPED:
                raise Refused(f"{name!r} is a shipped sampler; register yours under another name")
            if not (isinstance(cls, type) and issubclass(cls, Sampler)) or inspect.isabstract(cls):
                raise Refused(f"sampler {name!r}: {cls!r} is no class with all methods of policies.sampling.Sampler")
        self._classes = {**SHIPPED, **(own or {})}

    def build(self, spec: SamplerSpec) -> Sampler:
        """A new sampler as the spec says; `Refused` when there is none such."""
        cls = self._classes.get(spec.name)
        if cls is None:
            known = ", ".join(map(repr, self._classes))
            raise Refused(f"there is no sampler {spec.name!r}; this plane has {known}. Register yours at launch")
        given: dict[str, Any] = dict(spec.settings)
        if spec.of is not None:
            given["of"] = self.build(spec.of)
        _check_settings(spec.name, cls, given)
        try:
            return cls(**given)
        except Refused as refusal:
            raise Refused(f"sampler {spec.name!r}: {refusal.message}", sampler=spec.name) from None
        except Exception as error:  # a user's class may raise anything
            raise Refused(
                f"sampler {spec.name!r} could not be made with {dict(spec.settings)}: {type(error).__name__}: {error}",
                sampler=spec.name,
            ) from error


def _check_settings(name: str, cls: type[Sampler], given: Mapping[str, Any]) -> None:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = {setting: p for setting, p in inspect.signature(cls).parameters.items() if p.kind in named}
    settings = [setting for setting in parameters if setting != "of"]
    there = f"it has {', '.join(map(repr, settings))}" if settings else "it has no settings"
    for setting in given:
        if setting not in parameters:
            what = "wraps no other sampler" if setting == "of" else f"has no setting {setting!r}; {there}"
            raise Refused(f"sampler {name!r} {what}", sampler=name)
    for setting, parameter in parameters.items():
        if parameter.default is parameter.empty and setting not in given:
            what = "wraps another sampler; name that as 'of'" if setting == "of" else f"needs {setting!r}; {there}"
            raise Refused(f"sampler {name!r} {what}", sampler=name)
