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
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from policies.errors import CapacityExceeded

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S = 3600.0
"""A poll's limit is a 32-bit number of milliseconds; a timer may be due later than that, or never."""

_MOST_SOCKETS = 16_384
"""Two for each peer asked. What libzmq allows by itself, 1,023, is less than a large plane has units."""

_LOOP_DESCRIPTORS, _SOCKET_DESCRIPTORS = 32, 8
"""More than libzmq takes for a context and its threads, and for a socket with its connection."""

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
        _require_descriptors(_LOOP_DESCRIPTORS, name)
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, _MOST_SOCKETS)
        self.context.socket(zmq.PAIR).close()  # starts libzmq's threads while there are descriptors for them
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
        """A socket that is closed, without lingering, when the loop ends. `CapacityExceeded` when this process may
        open no more."""
        _require_descriptors(_SOCKET_DESCRIPTORS, self.thread.name)
        opened = self.context.socket(kind)
        opened.setsockopt(zmq.LINGER, 0)
        self._sockets.append(opened)
        return opened

    def monitor(self, watched: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """A socket from which the ``events`` of another can be read."""
        endpoint = f"inproc://events-{next(self._order)}"
        watched.monitor(endpoint, events)
        monitor = self.open(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # a full one would hold up libzmq's own thread, and all peers with it
        monitor.connect(endpoint)
        return monitor

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

    @property
    def ending(self) -> bool:
        """Whether what is asked for from now on may never be done."""
        return self._stopping

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
            for _ in range(len(self._soon)):  # what was asked for before the end, such as to end what is open
                self._guard(self._soon.popleft())
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


def _require_descriptors(count: int, name: str) -> None:
    """Raise `CapacityExceeded` when this process may not open ``count`` files more. libzmq, which needs them, ends the
    process where it gets none."""
    held: list[int] = []
    try:
        for _ in range(count):
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise CapacityExceeded(
            f"this process has fewer than {count} file descriptors left, which {name} needs for its sockets: {error}; "
            "allow it more (ulimit -n), or make fewer clients: one serves any number of threads"
        ) from None
    finally:
        for descriptor in held:
            os.close(descriptor)
