"""Figures as people read them: three digits, and the unit's prefix that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

_SCALES: Final[Mapping[str, Sequence[tuple[float, str]]]] = {
    "s": ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns")),
    "bytes": ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B")),
}
"""Units that have prefixes. All others count something that the metric's name says, and are left out."""


def quantity(value: float, unit: str) -> str:
    """``quantity(4.1e-6, "s")`` is ``4.10 µs``."""
    size, name = _scale(value, unit)
    return f"{digits(value / size)}{name}"


def span(least: float, most: float, unit: str) -> str:
    """Both ends of a range, on the scale of the larger one: two numbers, one unit."""
    size, name = _scale(most, unit)
    return f"{digits(least / size)} – {digits(most / size)}{name}"


def digits(value: float) -> str:
    """Three significant digits without an exponent; whole numbers stay whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3g}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    scales = _SCALES.get(unit, ((0.0, ""),))
    return next(((size or 1.0, name) for size, name in scales if abs(value) >= size), scales[-1])
