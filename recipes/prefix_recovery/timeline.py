"""The picture of a run, ``timeline.png``: one lane per call, time to the right, tokens upwards within the lane.

Blue is the uninterrupted run. Amber is what a cut has sealed, first as it is generated, then again as the prefix that
the restart begins with; hatched red is what was generated after the last cut and died with the kill; green is what was
generated after the restart. Cuts, the kill and the resumption are lines through all lanes, named above them. Drawn
with Agg, no display needed; about a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from recipes.prefix_recovery.comparison import Comparison
from recipes.prefix_recovery.events import CUT, PHASES, REFERENCE, RESUME
from recipes.prefix_recovery.plan import Plan
from recipes.prefix_recovery.record import Record

_REFERENCE, _SEALED, _LOST, _REGROWN = "#7b9cc9", "#f0a830", "#d9534f", "#4f9e58"
_KILL, _CUT, _LOADING, _INK = "#b3181f", "#8a5a00", "#e4e4e4", "#333333"
_PHASE_TITLES: Final[Mapping[str, str]] = {
    REFERENCE: "reference, uninterrupted",
    CUT: "the same calls, cut",
    RESUME: "regrown",
}
_PHASE_COLOURS: Final[Mapping[str, str]] = {REFERENCE: _REFERENCE, CUT: _SEALED, RESUME: _REGROWN}
_WIDTH_IN, _LANE_IN, _FRAME_IN, _TALLEST_IN = 13.0, 0.5, 2.9, 60.0
_LANE_FILL: Final = 0.84
_CHARACTER: Final = 0.0075
"""Width of a letter of a label, as a part of the width of the axes."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment with a name, drawn through all lanes."""

    at: float
    text: str
    colour: str
    style: str
    width: float


def draw_timeline(plan: Plan, record: Record, comparison: Comparison, path: Path) -> None:
    """Draw the run and write it as a PNG."""
    lanes = [call.id for call in plan.calls]
    height = min(_FRAME_IN + _LANE_IN * len(lanes), _TALLEST_IN)
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.055, 1.05 / height, 0.845, (height - _FRAME_IN + 0.35) / height))
    zero, end = record.lives[0].started, record.last_time()
    span = max(end - zero, 1e-3)
    axes.set_xlim(-0.005 * span, 1.005 * span)
    axes.set_ylim(len(lanes) + 0.08, -0.55)
    _loading(axes, record, zero, len(lanes))
    _phases(axes, record, zero, end)
    picture = _Lanes(axes, record, zero, max([1, *(row.expected or row.found or 0 for row in comparison.rows)]))
    for lane, row in enumerate(comparison.rows):
        picture.draw(lane, row.call)
        verdict = "missing" if row.found is None else f"{row.found} tokens " + ("✓" if row.matches else "✗ differs")
        colour = _REGROWN if row.matches else _KILL
        axes.text(1.012 * span, lane + 0.62, verdict, color=colour, va="center", fontsize=9, fontweight="bold")
    _marks(axes, _moments(record, zero), span, height)
    axes.set_yticks([lane + 0.62 for lane in range(len(lanes))], lanes)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds since the start")
    axes.spines[["top", "right", "left"]].set_visible(False)
    _title(figure, record, comparison, height)
    _legend(figure, record)
    figure.savefig(path)


class _Lanes:
    """Draws what one call generated, in its lane; ``most`` tokens fill the lane's height."""

    def __init__(self, axes: Axes, record: Record, zero: float, most: int) -> None:
        self._axes, self._record, self._zero, self._most = axes, record, zero, most
        self._sealed = _sealed(record)

    def draw(self, lane: int, call: str) -> None:
        self._axes.axhline(lane + 1, color="#cccccc", linewidth=0.6, zorder=1)
        self._fill(lane, *self._curve(REFERENCE, call, 0), 0, _REFERENCE)
        times, counts = self._curve(CUT, call, 0)
        sealed = np.minimum(counts, self._sealed.get(call, 0))
        self._fill(lane, times, sealed, 0, _SEALED)
        self._fill(lane, times, counts, sealed, _LOST, hatch="//////")
        prefix, chain = self._record.prefix(call) or 0, self._record.chains.get(call)
        times, counts = self._curve(RESUME, call, prefix)
        if chain is not None and prefix:
            last = max([chain.at - self._zero, *times])
            self._fill(lane, np.array([chain.at - self._zero, last]), np.array([prefix, prefix]), 0, _SEALED)
        self._fill(lane, times, counts, prefix, _REGROWN)

    def _curve(self, phase: str, call: str, start: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """(seconds, tokens so far) of the call in the phase, rising from ``start`` at the begin of its first step."""
        steps = [step for step in self._record.steps.get(phase, ()) if step.tokens.get(call)]
        if not steps:
            return np.empty(0), np.empty(0, np.int64)
        times = np.array([steps[0].began, *(step.ended for step in steps)]) - self._zero
        return times, start + np.cumsum([0, *(step.tokens[call] for step in steps)])

    def _fill(
        self,
        lane: int,
        times: NDArray[np.float64],
        counts: NDArray[np.int64],
        floor: NDArray[np.int64] | int,
        colour: str,
        hatch: str | None = None,
    ) -> None:
        if not len(times):
            return
        scale = _LANE_FILL / self._most
        low, high = lane + 1 - scale * np.broadcast_to(floor, counts.shape), lane + 1 - scale * counts
        face = "white" if hatch else colour
        self._axes.fill_between(times, low, high, facecolor=face, edgecolor=colour, hatch=hatch, linewidth=0, zorder=3)


def _sealed(record: Record) -> dict[str, int]:
    """Tokens of each call's chain after the last cut that covered it."""
    sealed: dict[str, int] = {}
    for cut in record.cuts:
        sealed.update(cut.prefix_tokens)
    return sealed


def _loading(axes: Axes, record: Record, zero: float, lanes: int) -> None:
    """Shade the times at which a life started its cluster and loaded its engines."""
    for life in record.lives:
        if life.engines_ready is None:
            continue
        begin, end = life.started - zero, life.engines_ready - zero
        axes.axvspan(begin, end, ymax=lanes / (lanes + 0.63), color=_LOADING, zorder=0)
        text = axes.text((begin + end) / 2, lanes / 2, "cluster and engines start", color="#777777", fontsize=9)
        text.set(rotation=90, ha="center", va="center", zorder=2)


def _phases(axes: Axes, record: Record, zero: float, end: float) -> None:
    """A bar with the phase's name on top of the lanes."""
    for name in PHASES:
        if name not in record.phases:
            continue
        begin, stop = record.phases[name]
        ended = next((life.ended for life in record.lives if life.ended and life.ended >= begin), end)
        stop = ended if stop is None else min(stop, ended)
        axes.barh(-0.25, stop - begin, left=begin - zero, height=0.42, color=_PHASE_COLOURS[name], zorder=3)
        axes.text(
            (begin + stop) / 2 - zero,
            -0.25,
            _PHASE_TITLES[name],
            ha="center",
            va="center",
            fontsize=9,
            zorder=4,
            clip_on=True,
        )


def _moments(record: Record, zero: float) -> list[_Mark]:
    marks = [_Mark((cut.began + cut.ended) / 2 - zero, f"cut {cut.index + 1}", _CUT, "--", 1.3) for cut in record.cuts]
    for life in record.lives:
        if life.killed is not None and life.ended is not None:
            marks.append(_Mark(life.ended - zero, "SIGKILL to everything", _KILL, "-", 2.4))
    if len(record.lives) > 1:
        marks.append(_Mark(record.lives[-1].started - zero, "restart", _INK, ":", 1.3))
    if record.restored is not None:
        marks.append(_Mark(record.restored.t - zero, "checkpoint restored", _INK, ":", 1.3))
    first = record.first_resumed_token()
    if first is not None:
        marks.append(_Mark(first - zero, "resumption", _REGROWN, "-", 1.8))
    return sorted(marks, key=lambda mark: mark.at)


def _marks(axes: Axes, marks: Sequence[_Mark], span: float, height: float) -> None:
    """Draw the lines, their names above the axes, each in the lowest row in which it hides no other."""
    ends: list[float] = []
    row_height = 0.19 / (height - _FRAME_IN + 0.35)
    for mark in marks:
        axes.axvline(mark.at, color=mark.colour, linestyle=mark.style, linewidth=mark.width, zorder=5)
        width = _CHARACTER * len(mark.text) * span
        left = min(max(mark.at - width / 2, 0.0), span - width)
        row = next((row for row, taken in enumerate(ends) if taken < left), len(ends))
        ends[row:] = [*([left + width + 0.01 * span]), *ends[row + 1 :]]
        bottom = 1.01 + row * row_height
        axes.plot(
            [mark.at, mark.at],
            [1.0, bottom],
            transform=axes.get_xaxis_transform(),
            color=mark.colour,
            linewidth=0.8,
            clip_on=False,
        )
        label = axes.text(left + width / 2, bottom, mark.text, transform=axes.get_xaxis_transform(), color=mark.colour)
        label.set(ha="center", va="bottom", fontsize=9, fontweight="bold")


def _title(figure: Figure, record: Record, comparison: Comparison, height: float) -> None:
    calls, chains = len(comparison.rows), [n for row in comparison.rows if (n := record.prefix(row.call))]
    same = "every row equals" if comparison.all_match else f"{comparison.matching} of {calls} rows equal"
    figure.text(
        0.055,
        1 - 0.18 / height,
        f"{calls} generations cut in mid-flight, killed and regrown: {same} the uninterrupted run",
        fontsize=14,
        fontweight="bold",
        va="top",
    )
    total = sum(row.found or 0 for row in comparison.rows)
    killed = next((life.killed for life in record.lives if life.killed is not None), None)
    parts = [f"{sum(chains)} of {total} tokens came back from the checkpoint and were not generated again"]
    parts += [f"SIGKILL ended {killed} processes"] if killed is not None else []
    figure.text(0.055, 1 - 0.5 / height, "; ".join(parts), fontsize=10, color="#555555", va="top")


def _legend(figure: Figure, record: Record) -> None:
    patches = [
        Patch(facecolor=_SEALED, label="sealed by a cut: the prefix"),
        Patch(facecolor=_REGROWN, label="generated after the restart"),
    ]
    if record.cuts:
        lost = Patch(facecolor="white", edgecolor=_LOST, hatch="//////", label="after the last cut: lost in the kill")
        patches = [Patch(facecolor=_REFERENCE, label="uninterrupted run"), patches[0], lost, patches[1]]
    patches.append(Patch(facecolor=_LOADING, label="cluster and engines start"))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=9)
