"""Ctrl-C and its relatives, turned into one exception that unwinds the run.

Guarantees: the first SIGINT, SIGTERM or SIGHUP raises `Interrupted` in the main thread; later ones are ignored, so that
the clean-up that follows runs to its end. The earlier handlers are back afterwards.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the run to end. ``exit_status`` is the shell's convention, 130 for Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.exit_status = 128 + number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While it is open, the signals raise `Interrupted`. For the main thread only."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    earlier = {each: signal.signal(each, interrupt) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in earlier.items():
            signal.signal(each, handler)
