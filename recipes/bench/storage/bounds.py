"""What the machine allows: the same bytes, copied within each process, or sent over bare ZeroMQ sockets on loopback.

As many processes as there are clients, each with the same PUTs. `memcpy` copies every PUT to memory that it has used
before. `zmq-socket` sends it to one of two receivers, zero-copy, one frame per field, and waits
for the answer, which says how many bytes came.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np
import zmq

from recipes.bench.child import Child, Serve
from recipes.bench.scenario import CheckFailed
from recipes.bench.storage.load import Fields, Load
from recipes.bench.storage.runs import moved, soon

RECEIVERS: Final = 2
_LOOPBACK: Final = "tcp://127.0.0.1"


class BoundRun:
    """``move(load, number, *arguments)`` is what each of the processes does."""

    def __init__(self, load: Load, move: Serve, receivers: int = 0) -> None:
        self._load = load
        with ExitStack() as starting:
            endpoints = []
            for number in range(receivers):
                receiver = Child(f"receiver {number}", receive)
                starting.callback(receiver.close)
                endpoints.append(receiver.first)
            self._movers = []
            for number in range(load.clients):
                arguments = [endpoints[number % receivers]] if receivers else []
                mover = Child(f"sender {number}", move, load, number, *arguments)
                starting.callback(mover.close)
                self._movers.append(mover)
            self._running = starting.pop_all()

    def run(self) -> Mapping[str, float]:
        begin = soon()
        for mover in self._movers:
            mover.tell(begin)
        ends = [mover.answer() for mover in self._movers]
        return moved(self._load, max(ends) - begin)

    def close(self) -> None:
        self._running.close()


def memcpy(load: Load) -> BoundRun:
    return BoundRun(load, copy)


def zmq_socket(load: Load) -> BoundRun:
    return BoundRun(load, send, RECEIVERS)


def copy(load: Load, number: int) -> Generator[Any, float, None]:
    puts = load.puts_of(number)
    target = {name: np.zeros_like(values) for name, values in puts[0][1].items()}

    def one(fields: Fields) -> None:
        for name, values in fields.items():
            np.copyto(target[name], values)

    for _, fields in puts:
        one(fields)
        if any(not np.array_equal(target[name], values) for name, values in fields.items()):
            raise CheckFailed("what was copied is not what was to be copied")
    yield from _moving(puts, one)


def send(load: Load, number: int, endpoint: str) -> Generator[Any, float, None]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(endpoint)

        def one(fields: Fields) -> None:
            socket.send_multipart([memoryview(values).cast("B") for values in fields.values()], copy=False)
            if int.from_bytes(socket.recv(), "little") != sum(values.nbytes for values in fields.values()):
                raise CheckFailed("not as many bytes arrived as were sent")

        yield from _moving(load.puts_of(number), one)


def receive() -> Generator[str, Any, None]:
    """A receiver: its endpoint. It answers how many bytes came, until its process ends."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    endpoint = f"{_LOOPBACK}:{socket.bind_to_random_port(_LOOPBACK)}"

    def serve() -> None:
        while True:
            sender, *frames = socket.recv_multipart(copy=False)
            socket.send_multipart([sender, sum(len(frame) for frame in frames).to_bytes(8, "little")])

    threading.Thread(target=serve, daemon=True).start()
    yield endpoint


def _moving(puts: Sequence[tuple[list[str], Fields]], one: Callable[[Fields], None]) -> Generator[Any, float, None]:
    """Once ready: move all PUTs at each moment that comes in, and say when that had been done."""
    begin = yield None
    while True:
        time.sleep(max(0.0, begin - time.perf_counter()))
        for _, fields in puts:
            one(fields)
        begin = yield time.perf_counter()
