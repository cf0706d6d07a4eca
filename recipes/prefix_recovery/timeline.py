"""The picture of a run, ``timeline.png``: one lane per call, time to the right, tokens upwards within the lane.

Blue is the uninterrupted run. Amber is what a cut has sealed, first as it is generated, then again as the prefix that
the restart begins with; red is what was generated after the last cut and died with the kill; green is what was
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
    REFERENCE: "reference",
    CUT: "cut run",
    RESUME: "regrowing",
}
_PHASE_COLOURS: Final[Mapping[str, str]] = {REFERENCE: _REFERENCE, CUT: _SEALED, RESUME: _REGROWN}
_WIDTH_IN: Final = 13.0
_LANE_IN, _TALLEST_LANES_IN = 0.5, 40.0
_TITLE_IN, _FLAG_IN, _FOOT_IN = 0.85, 0.19, 1.0
_LEFT, _BREADTH = 0.045, 0.86
_HEADER: Final = 0.55
"""Height of the row with the names of the phases, in lanes."""
_LANE_FILL: Final = 0.84
_CHARACTER: Final = 0.0076
"""Breadth of a letter, as a part of the breadth of the axes."""


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
    most = max([1, *(row.expected or row.found or 0 for row in comparison.rows)])
    zero, end = record.lives[0].started, record.last_time()
    span = max(end - zero, 1e-3)
    flags = _flags(_moments(record, zero), span)
    lanes_in = min(_LANE_IN * (len(lanes) + _HEADER), _TALLEST_LANES_IN)
    flags_in = _FLAG_IN * (1 + max((row for row, _ in flags), default=0)) + 0.1
    height = _TITLE_IN + flags_in + lanes_in + _FOOT_IN
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((_LEFT, _FOOT_IN / height, _BREADTH, lanes_in / height))
    axes.set_xlim(-0.005 * span, 1.005 * span)
    axes.set_ylim(len(lanes) + 0.05, -_HEADER)
    _phases(axes, record, zero, span)
    picture = _Lanes(axes, record, zero, most)
    for lane, row in enumerate(comparison.rows):
        picture.draw(lane, row.call)
        verdict = "missing ✗" if row.found is None else f"{row.found} tokens {'✓' if row.matches else '✗'}"
        colour = _REGROWN if row.matches else _KILL
        axes.text(1.012 * span, lane + 0.62, verdict, color=colour, va="center", fontsize=9, fontweight="bold")
    for row_number, mark in flags:
        _draw_flag(axes, mark, 1 + row_number * _FLAG_IN / lanes_in, _FLAG_IN / lanes_in, span)
    axes.set_yticks([lane + 0.62 for lane in range(len(lanes))], lanes)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"seconds since the start (the full height of a lane is {most} tokens)")
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
        self._fill(lane, times, counts, sealed, _LOST)
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
    ) -> None:
        if not len(times):
            return
        scale = _LANE_FILL / self._most
        low, high = lane + 1 - scale * np.broadcast_to(floor, counts.shape), lane + 1 - scale * counts
        self._axes.fill_between(times, low, high, color=colour, linewidth=0, zorder=3)


def _sealed(record: Record) -> dict[str, int]:
    """Tokens of each call's chain after the last cut that covered it."""
    sealed: dict[str, int] = {}
    for cut in record.cuts:
        sealed.update(cut.prefix_tokens)
    return sealed


def _phases(axes: Axes, record: Record, zero: float, span: float) -> None:
    """Shade the times at which a life starts its cluster and engines; name these and the phases above the lanes."""
    for life in record.lives:
        if life.engines_ready is not None:
            axes.axvspan(life.started - zero, life.engines_ready - zero, color=_LOADING, linewidth=0, zorder=0)
            _name(axes, "engines load", life.started - zero, life.engines_ready - zero, span)
    for name in PHASES:
        if name not in record.phases:
            continue
        begin, stop = record.phases[name]
        life = next(life for life in reversed(record.lives) if life.started <= begin)
        begin = max(begin, life.engines_ready or begin) - zero
        stop = min(stop or zero + span, life.ended or zero + span) - zero
        axes.barh(-_HEADER / 2, stop - begin, left=begin, height=0.42, color=_PHASE_COLOURS[name], zorder=3)
        _name(axes, _PHASE_TITLES[name], begin, stop, span)


def _name(axes: Axes, text: str, begin: float, stop: float, span: float) -> None:
    """Write the text above the lanes if there is room for it."""
    if _CHARACTER * len(text) * span <= stop - begin:
        axes.text((begin + stop) / 2, -_HEADER / 2, text, ha="center", va="center", fontsize=9, zorder=6)


def _moments(record: Record, zero: float) -> list[_Mark]:
    marks = [_Mark((cut.began + cut.ended) / 2 - zero, f"cut {cut.index + 1}", _CUT, "--", 1.3) for cut in record.cuts]
    if record.checkpoint is not None:
        marks.append(_Mark(record.checkpoint.t - zero, "checkpoint saved", _INK, ":", 1.3))
    for life in record.lives:
        if life.killed is not None and life.ended is not None:
            marks.append(_Mark(life.ended - zero, "SIGKILL", _KILL, "-", 2.4))
    if len(record.lives) > 1:
        marks.append(_Mark(record.lives[-1].started - zero, "restart", _INK, ":", 1.3))
    if record.restored is not None:
        marks.append(_Mark(record.restored.t - zero, "checkpoint restored", _INK, ":", 1.3))
    first = record.first_resumed_token()
    if first is not None:
        marks.append(_Mark(first - zero, "resumed", _REGROWN, "-", 1.8))
    return sorted(marks, key=lambda mark: mark.at)


def _flags(marks: Sequence[_Mark], span: float) -> list[tuple[int, _Mark]]:
    """Give each mark's name a row above the axes in which no other name and no other mark's pole is in its way.

    A name starts at its pole and extends to the right, so from right to left each takes the lowest free row: free when
    it ends before the leftmost pole of this and of all higher rows.
    """
    poles: list[float] = []
    flags = []
    for mark in sorted(marks, key=lambda mark: mark.at, reverse=True):
        end = mark.at + _CHARACTER * (len(mark.text) + 2) * span
        row = next((row for row in range(len(poles)) if end < min(poles[row:])), len(poles))
        poles[row:] = [mark.at, *poles[row + 1 :]]
        flags.append((row, mark))
    return flags


def _draw_flag(axes: Axes, mark: _Mark, bottom: float, height: float, span: float) -> None:
    """The mark's line through all lanes, its pole, and its name at ``bottom``, all in heights of the axes."""
    above = axes.get_xaxis_transform()
    axes.axvline(mark.at, color=mark.colour, linestyle=mark.style, linewidth=mark.width, zorder=5)
    axes.plot([mark.at] * 2, [1, bottom + height], transform=above, color=mark.colour, clip_on=False)
    label = axes.text(mark.at + 0.004 * span, bottom, mark.text, transform=above, color=mark.colour)
    label.set(ha="left", va="bottom", fontsize=9, fontweight="bold")


def _title(figure: Figure, record: Record, comparison: Comparison, height: float) -> None:
    calls, chains = len(comparison.rows), [n for row in comparison.rows if (n := record.prefix(row.call))]
    same = "every row equals" if comparison.all_match else f"{comparison.matching} of {calls} rows equal"
    figure.text(
        _LEFT,
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
    figure.text(_LEFT, 1 - 0.5 / height, "; ".join(parts), fontsize=10, color="#555555", va="top")


def _legend(figure: Figure, record: Record) -> None:
    patches = [
        Patch(facecolor=_SEALED, label="sealed by a cut: the prefix"),
        Patch(facecolor=_REGROWN, label="generated after the restart"),
    ]
    if record.cuts:
        lost = Patch(facecolor=_LOST, label="after the last cut: lost in the kill")
        patches = [Patch(facecolor=_REFERENCE, label="uninterrupted run"), patches[0], lost, patches[1]]
    patches.append(Patch(facecolor=_LOADING, label="cluster and engines start"))
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False, fontsize=9)
