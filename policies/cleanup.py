"""Which rows of the staging partition are cleared in the background, and when.

Two kinds of rows come here. *Unneeded* chunks of calls that finished or were superseded: a checkpoint that is being
saved may still need them, so they wait behind a fence. *Discarded* rows, which a cut wrote and gave to no call: no
receipt names them, so no fence holds them back.

A discarded row may be *in doubt*: its PUT got no answer, and its unit goes on publishing it once the controller can be
reached again. A clear that found nothing then proves nothing. But a key is given to one PUT only, a PUT is applied
once, and its rows become visible together, so one clear that removed something settles it. Until then it is looked at
again after each of ``looks_after_s``; their sum is how late a publish may come and still leave no row behind. Clears
that fail are no looks: the unit cannot publish to a controller that nobody reaches.

Rules:
1. One clear at a time. A clear that fails is tried again, each time after twice as long, at most ``attempts`` times;
   what is given up is counted, and its cause latched until it is reported.
2. While the fence is closed no clear of unneeded chunks is under way or starts.
3. Whoever brings unneeded chunks is to wait while more than ``capacity_keys`` wait, except while the fence is closed,
   which such a wait could keep from opening.

Costs: O(1) per key; one clear per ``batch_keys`` unneeded chunks and one per look at a discarded batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace

from policies.errors import Refused


@dataclass(frozen=True, slots=True)
class CleanupLimits:
    batch_keys: int = 1024
    capacity_keys: int = 65_536
    attempts: int = 8
    retry_after_s: float = 1.0
    looks_after_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


class Fence:
    """Closed by the pause of an epoch until that epoch or a later one is resumed. Epochs are whole numbers that rise
    from checkpoint to checkpoint, so the pause of one that was given up already cannot close the fence again."""

    def __init__(self) -> None:
        self._paused = self._resumed = -1

    @property
    def closed(self) -> bool:
        return self._paused > self._resumed

    def pause(self, epoch: int) -> None:
        """Raises `Refused` when this epoch is over."""
        self.require(epoch)
        self._paused = max(self._paused, epoch)

    def resume(self, epoch: int) -> None:
        self._resumed = max(self._resumed, epoch)

    def require(self, epoch: int) -> None:
        """Raises `Refused` unless ``epoch`` may hold, or holds, the fence."""
        if epoch <= self._resumed:
            raise Refused(
                f"epoch {epoch} cannot pause the clearing of chunks: epoch {self._resumed} was resumed already; a new "
                "checkpoint takes the next epoch"
            )


@dataclass(frozen=True, slots=True)
class Unneed:
    """These chunks are nobody's any more."""

    keys: tuple[str, ...]
    now: float


@dataclass(frozen=True, slots=True)
class Discard:
    """These rows of one PUT belong to no call; see above for ``in_doubt``. In doubt, a first clear found nothing."""

    keys: tuple[str, ...]
    in_doubt: bool
    now: float


@dataclass(frozen=True, slots=True)
class ClearDone:
    """``removed`` of the keys were there."""

    removed: int
    now: float


@dataclass(frozen=True, slots=True)
class ClearFailed:
    cause: str
    now: float


@dataclass(frozen=True, slots=True)
class FenceMoved:
    now: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    now: float


@dataclass(frozen=True, slots=True)
class Closing:
    """Everything that may be cleared is tried once more, and nothing after that."""

    now: float


Event = Unneed | Discard | ClearDone | ClearFailed | FenceMoved | TimerFired | Closing


@dataclass(frozen=True, slots=True)
class StartClear:
    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Send `TimerFired` at ``at``, and forget the timer that was set before."""

    at: float


Instruction = StartClear | SetTimer


@dataclass(frozen=True, slots=True)
class _Batch:
    """Keys that are cleared together, not before ``due``. ``looks``: the delays after which a batch in doubt is looked
    at again, should this clear find nothing."""

    keys: tuple[str, ...]
    fenced: bool
    in_doubt: bool
    due: float
    looks: tuple[float, ...] = ()
    failures: int = 0


class Cleanup:
    """Feed it events and carry out what it says; tell `FenceMoved` after every change of ``fence``."""

    def __init__(self, limits: CleanupLimits) -> None:
        self._limits = limits
        self.fence = Fence()
        self._unneeded: deque[str] = deque()
        self._again: list[_Batch] = []  # discarded ones, and whatever failed
        self._running: _Batch | None = None
        self._closing = False
        self._cause = ""
        self._cleared = self._unseen = self._failures = self._given_up = self._latched = 0

    @property
    def over_capacity(self) -> bool:
        return len(self._unneeded) > self._limits.capacity_keys and not self.fence.closed

    @property
    def fence_is_granted(self) -> bool:
        """Whether no clear is under way that a closed fence forbids."""
        return self._running is None or not self._running.fenced

    @property
    def drained(self) -> bool:
        """Whether all is cleared or given up, but for rows in doubt that have not been seen."""
        certain = [batch for batch in self._again if not batch.in_doubt]
        return self._running is None and not self._unneeded and not certain

    @property
    def idle(self) -> bool:
        """Whether no clear is under way; after `Closing`, whether everything had its last try."""
        return self._running is None

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case Unneed(keys):
                self._unneeded.extend(keys)
            case Discard(keys, in_doubt, now):
                batch = _Batch(keys, False, in_doubt, now, self._limits.looks_after_s if in_doubt else ())
                self._again.append(_looked(batch, now) if in_doubt else batch)
            case ClearDone(removed, now):
                self._succeeded(self._finish(), removed, now)
            case ClearFailed(cause, now):
                self._failed(self._finish(), cause, now)
            case Closing():
                self._closing = True
            case FenceMoved() | TimerFired():
                pass  # what is due now is started after every event
        return self._advance(event.now)

    def take_failure(self) -> str | None:
        """What could not be cleared since this was asked last, in words; None when nothing."""
        if not self._latched:
            return None
        told = f"{self._latched} rows stay behind that could not be cleared, the last because of: {self._cause}"
        self._latched = 0
        return told

    def statistics(self) -> Mapping[str, int]:
        """Keys by what became of them. Of those that were in doubt, ``cleanup_in_doubt`` are still looked for and
        ``cleanup_unseen`` never appeared."""
        doubtful = sum(len(batch.keys) for batch in self._again if batch.in_doubt)
        return {
            "cleanup_waiting": len(self._unneeded) + sum(len(batch.keys) for batch in self._again) - doubtful,
            "cleanup_in_doubt": doubtful,
            "cleanup_cleared": self._cleared,
            "cleanup_unseen": self._unseen,
            "cleanup_failures": self._failures,
            "cleanup_given_up": self._given_up,
        }

    def _advance(self, now: float) -> list[Instruction]:
        if self._running is not None:
            return []
        batch = self._next_batch(now)
        if batch is not None:
            self._running = batch
            return [StartClear(batch.keys)]
        times = [batch.due for batch in self._again if not (batch.fenced and self.fence.closed)]
        return [SetTimer(min(times))] if times else []

    def _next_batch(self, now: float) -> _Batch | None:
        is_open = not self.fence.closed
        for batch in self._again:
            if (batch.due <= now or self._closing) and (is_open or not batch.fenced):
                self._again.remove(batch)
                return batch
        if not self._unneeded or not is_open:
            return None
        count = min(self._limits.batch_keys, len(self._unneeded))
        return _Batch(tuple(self._unneeded.popleft() for _ in range(count)), True, False, now)

    def _finish(self) -> _Batch:
        batch, self._running = self._running, None
        if batch is None:
            raise ValueError("no clear is under way")
        return batch

    def _succeeded(self, batch: _Batch, removed: int, now: float) -> None:
        if removed or not batch.in_doubt:
            self._cleared += len(batch.keys)
        elif batch.looks and not self._closing:
            self._again.append(_looked(batch, now))
        else:
            self._unseen += len(batch.keys)

    def _failed(self, batch: _Batch, cause: str, now: float) -> None:
        self._failures += 1
        failures = batch.failures + 1
        if failures < self._limits.attempts and not self._closing:
            due = now + self._limits.retry_after_s * 2**batch.failures
            self._again.append(replace(batch, failures=failures, due=due))
            return
        self._given_up += len(batch.keys)
        self._latched += len(batch.keys)
        self._cause = cause


def _looked(batch: _Batch, now: float) -> _Batch:
    """A batch in doubt of which nothing was there at ``now``: its next look."""
    return replace(batch, due=now + batch.looks[0], looks=batch.looks[1:], failures=0)
