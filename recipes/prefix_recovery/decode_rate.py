"""Whether a cut slows the engines down: the rate of decoding around it, against the rate just before.

Rules: a window of one second is centred on the middle of the cut, the window before it ends where this one begins. A
step's tokens count evenly over the time the step took, so that the ratio does not depend on where step boundaries
fall. A leader is only asked about times at which it was seen at work, from the beginning of its first step to the
end of its last: a window that a kill or a late start has shortened is judged by its rate. Cost: linear in steps
times cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """An engine step of one leader: ``tokens`` are its new tokens by call, times are Unix seconds."""

    leader: int
    began: float
    ended: float
    tokens: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.tokens.values())


def decode_during_cut(
    steps: Sequence[Step], cuts: Sequence[tuple[float, float]], window: float = WINDOW_S
) -> float | None:
    """Tokens decoded in the window around each cut (its begin, its end) ÷ tokens in the window before, mean over cuts.

    None when no cut has a window before it in which something was decoded. A constant rate gives 1.0.
    """
    ratios = [ratio for began, ended in cuts if (ratio := _ratio(steps, (began + ended) / 2, window)) is not None]
    return sum(ratios) / len(ratios) if ratios else None


def ratios_without_cut(steps: Sequence[Step], window: float = WINDOW_S) -> list[float]:
    """The same ratio at moments of a run without cuts, half a window apart: what the machine alone does to it.

    Only moments are taken at which every leader decoded the same calls through both windows.
    """
    if not steps:
        return []
    middle, last = min(step.began for step in steps), max(step.ended for step in steps)
    ratios = []
    while (middle := middle + window / 2) + window / 2 < last:
        near = [s for s in steps if s.ended > middle - 1.5 * window and s.began < middle + window / 2]
        sets = {(step.leader, frozenset(step.tokens)) for step in near}
        leaders = {step.leader for step in near}
        if len(sets) == len(leaders) and (ratio := _ratio(near, middle, window)) is not None:
            ratios.append(ratio)
    return ratios


def _ratio(steps: Sequence[Step], middle: float, window: float) -> float | None:
    around = before = 0.0
    for leader in {step.leader for step in steps}:
        own = [step for step in steps if step.leader == leader]
        start = middle - window / 2
        during, earlier = _rate(own, start, start + window), _rate(own, start - window, start)
        if during is not None and earlier is not None:
            around += during
            before += earlier
    return around / before if before else None


def _rate(steps: Sequence[Step], start: float, stop: float) -> float | None:
    """Tokens a second in the part of the window in which the leader was seen; None when it was not seen in it."""
    start = max(start, min(step.began for step in steps))
    stop = min(stop, max(step.ended for step in steps))
    if stop <= start:
        return None
    return sum(step.total * _share(step, start, stop) for step in steps) / (stop - start)


def _share(step: Step, start: float, stop: float) -> float:
    """The part of the step that lies in the window; a step of no length lies in it whole or not at all."""
    if step.ended <= step.began:
        return float(start <= step.began < stop)
    return max(0.0, min(step.ended, stop) - max(step.began, start)) / (step.ended - step.began)
