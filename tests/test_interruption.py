"""Signals become one exception; the clean-up after it is not interrupted again."""

from __future__ import annotations

import os
import signal

import pytest

from recipes.prefix_recovery.interruption import Interrupted, interruptible


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_raises_and_later_ones_do_not(number: signal.Signals) -> None:
    """The exit status is the shell's; the earlier handlers come back."""
    earlier, cleaned = signal.getsignal(number), False
    with pytest.raises(Interrupted, match=number.name) as interrupted, interruptible():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            cleaned = True
    assert cleaned
    assert interrupted.value.exit_status == 128 + number
    assert signal.getsignal(number) is earlier
