"""One thread, its ZeroMQ sockets and its timers.

Guarantees: every callback runs on the loop's thread, so what lives on it needs no locks; only `call_soon` and `stop`
may be called from other threads. A callback that raises is logged and the others go on. Cost: one poll per turn; an
idle loop sleeps until a socket, a timer or `call_soon` wakes it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 3600.0
"""A poll's limit is a 32-bit number of milliseconds; a timer may be due later than that, or never."""

Callback = Callable[[], None]


class Timer:
    """A callback due at a time; `cancel` makes it do nothing."""

    __slots__ = ("callback",)

    def __init__(self, callback: Callback) -> None:
        self.callback: Callback | None = callback

    def cancel(self) -> None:
        self.callback = None


class Loop:
    def __init__(self, name: str) -> None:
        self.context = zmq.Context()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._poller = zmq.Poller()
        self._readers: dict[object, Callback] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._soon: deque[Callback] = deque()
        self._last: deque[Callback] = deque()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._poller.register(self._woken.fileno(), zmq.POLLIN)
        self._readers[self._woken.fileno()] = self._drain_wakes
        self._sockets: list[zmq.Socket[bytes]] = []
        self._stopping = False

    def start(self) -> None:
        self.thread.start()

    def open(self, kind: int) -> zmq.Socket[bytes]:
        """A socket that is closed, without lingering, when the loop ends."""
        opened = self.context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        self._sockets.append(opened)
        return opened

    def read(self, source: zmq.Socket[bytes], callback: Callback) -> None:
        """Call ``callback`` whenever ``source`` has something to receive."""
        self._poller.register(source, zmq.POLLIN)
        self._readers[source] = callback

    def close(self, source: zmq.Socket[bytes]) -> None:
        if self._readers.pop(source, None) is not None:
            self._poller.unregister(source)
        self._sockets.remove(source)
        source.close()

    def call_soon(self, callback: Callback) -> None:
        """Run ``callback`` on the loop's thread. Safe from any thread."""
        self._soon.append(callback)
        if threading.current_thread() is not self.thread:
            # A full pipe means that a wake-up is already due, a closed one that the loop has ended.
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def call_last(self, callback: Callback) -> None:
        """Run ``callback`` when this turn ends, before the loop looks at its sockets again. For the loop's thread."""
        self._last.append(callback)

    def call_later(self, seconds: float, callback: Callback) -> Timer:
        """Run ``callback`` on the loop's thread after ``seconds``; infinity is never. For the loop's thread."""
        if math.isnan(seconds):
            raise ValueError("a timer needs a number of seconds, not NaN")
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def end(self) -> None:
        """End the loop after the current turn. Safe from any thread."""
        self._stopping = True
        self.call_soon(lambda: None)

    def stop(self) -> None:
        """End the loop and wait for its thread (unless called from it)."""
        self.end()
        if self.thread.is_alive() and threading.current_thread() is not self.thread:
            self.thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping:
                for ready, _ in self._poller.poll(self._wait_ms()):
                    reader = self._readers.get(ready)
                    if reader is not None:
                        self._guard(reader)
                self._fire_timers()
                for _ in range(len(self._soon)):
                    self._guard(self._soon.popleft())
                while self._last:
                    self._guard(self._last.popleft())
        finally:
            for opened in self._sockets:
                opened.close()
            self._woken.close()
            self._waker.close()
            self.context.term()

    def _wait_ms(self) -> int | None:
        while self._timers and self._timers[0][2].callback is None:
            heapq.heappop(self._timers)
        if self._soon or self._stopping:
            return 0
        if not self._timers:
            return None
        seconds = min(self._timers[0][0] - time.monotonic(), _LONGEST_SLEEP_S)
        return max(0, int(seconds * 1000) + 1)

    def _fire_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            timer = heapq.heappop(self._timers)[2]
            if timer.callback is not None:
                self._guard(timer.callback)

    def _guard(self, callback: Callback) -> None:
        try:
            callback()
        except Exception:
            logger.exception("a callback of %s failed; the loop goes on", self.thread.name)

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
