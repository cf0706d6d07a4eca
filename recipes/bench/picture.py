"""The picture of a benchmark: a panel per family of scenarios and metric, a bar per system, whiskers from min to max.

A panel whose figures span more than a decade has a logarithmic axis. Drawn with Agg, no display needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, NullFormatter

from recipes.bench.quantity import quantity
from recipes.bench.record import Record
from recipes.bench.scenario import (
    MEMCPY,
    PATCHED_TRANSFERQUEUE,
    REGRAFT,
    REGRAFT_FRAMES,
    SYSTEMS,
    TRANSFERQUEUE,
    ZMQ_SOCKET,
)

COLOURS: Final = {
    REGRAFT: "#4f9e58",
    REGRAFT_FRAMES: "#a5cfa3",
    TRANSFERQUEUE: "#7b9cc9",
    PATCHED_TRANSFERQUEUE: "#f0a830",
    ZMQ_SOCKET: "#b0b0b0",
    MEMCPY: "#707070",
}
_COLUMNS = 3
_PANEL_IN: Final = (5.2, 3.6)
_HEAD_IN = 0.75
_DECADE = 10.0
_GROUP = 0.8
"""Breadth of a scenario's bars together, where scenarios are 1 apart."""


def draw_picture(title: str, records: Sequence[Record], path: Path) -> None:
    """Draw all records and write them as a PNG."""
    panels = list(dict.fromkeys((record.family, record.metric) for record in records))
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * _PANEL_IN[1] + _HEAD_IN
    figure = Figure(figsize=(columns * _PANEL_IN[0], height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - _HEAD_IN / height))
    for index, (family, metric) in enumerate(panels):
        shown = [record for record in records if (record.family, record.metric) == (family, metric)]
        _panel(figure.add_subplot(rows, columns, index + 1), shown)
    figure.text(0.01, 1 - 0.1 / height, title, fontsize=13, fontweight="bold", va="top")
    systems = [system for system in SYSTEMS if any(record.system == system for record in records)]
    figure.legend(
        handles=[Patch(facecolor=COLOURS[system], label=system) for system in systems],
        loc="upper left",
        bbox_to_anchor=(0.0, 1 - 0.32 / height),
        ncols=len(systems),
        frameon=False,
    )
    figure.savefig(path)


def is_wide(records: Sequence[Record]) -> bool:
    """Whether the figures span more than a decade; then they are shown on a logarithmic axis."""
    smallest, largest = min(record.min for record in records), max(record.max for record in records)
    return smallest > 0 and largest > _DECADE * smallest


def _panel(axes: Axes, records: Sequence[Record]) -> None:
    scenarios = list(dict.fromkeys(record.scenario for record in records))
    systems = [system for system in SYSTEMS if any(record.system == system for record in records)]
    breadth = _GROUP / len(systems)
    for record in records:
        middle = (len(systems) - 1) / 2
        at = scenarios.index(record.scenario) + (systems.index(record.system) - middle) * breadth
        whiskers = [[record.median - record.min], [record.max - record.median]]
        axes.bar(at, record.median, 0.92 * breadth, color=COLOURS[record.system], yerr=whiskers, capsize=3)
        axes.annotate(
            quantity(record.median, record.unit),
            (at, record.max),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    first = records[0]
    if is_wide(records):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(y=0.18)
    axes.set_xticks(range(len(scenarios)), [name.partition("/")[2] or name for name in scenarios])
    axes.yaxis.set_major_formatter(lambda value, _: quantity(value, first.unit))
    better = "less" if first.lower_is_better else "more"
    axes.set_title(f"{first.family}: {first.metric} ({better} is better)", fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
