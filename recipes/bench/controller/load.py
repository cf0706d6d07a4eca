"""Closed-loop clients against a controller in a process of its own, over ZeroMQ.

Many connections share a few client processes. Each connection asks, waits for the answer, checks it and asks again;
nothing is ever in flight twice on one connection. What a connection says is its system's (`Side`); who says it when is
the same for all. Every connection clears the rows that it made once they are `KEPT` many, as a part of what is
measured, so that the number of live rows stays.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Protocol

import zmq

from recipes.bench.child import Child
from recipes.bench.controller.rows import FIELDS, Columns
from recipes.bench.scenario import CheckFailed

KEPT: Final = 8
"""Rows of one connection that live at most; all connections together add a few percent to those that live anyway."""

COLUMNS: Final = Columns(fields=FIELDS, jagged=0)
NAMES: Final = COLUMNS.names
FILLER: Final = -1
"""The number of the client that fills the controller before it is measured."""

_SILENCE_MS: Final = 30_000

Address = Any
"""Where clients of a system connect, and with what: a plain value."""

Steps = Generator[Sequence[Any], Sequence[zmq.Frame], None]
"""A dialogue: yields the frames of each request, is sent the frames of its answer. Raises `CheckFailed`."""


class Client(Protocol):
    """One connection. ``number`` is another one for each, so that their keys differ."""

    def __init__(self, address: Address, number: int) -> None: ...

    def connect(self, context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]: ...

    def cycle(self) -> Steps:
        """Create a row, publish it, look it up, tag it; every `KEPT` times clear those that were made."""

    def fill(self, rows: int) -> Steps:
        """Publish so many rows that stay."""


@dataclass(frozen=True, slots=True)
class Side:
    """A system. ``start`` begins its servers with so many live rows, to be ended by the stack."""

    start: Callable[[int, ExitStack], Address]
    client: type[Client]


class LoadRun:
    """One run is one window of ``seconds`` in which all clients ask."""

    def __init__(self, side: Side, live: int, clients: int, processes: int, seconds: float) -> None:
        self._seconds = seconds
        with ExitStack() as starting:
            address = side.start(live, starting)
            self._children = [
                Child(f"clients {first}", ask_in_windows, side.client, address, range(first, clients, processes))
                for first in range(min(clients, processes))
            ]
            for child in self._children:
                starting.callback(child.close)
            self._started = starting.pop_all()

    def run(self) -> Mapping[str, float]:
        for child in self._children:
            child.tell(self._seconds)
        return {"cycles_per_s": sum(child.answer() for child in self._children) / self._seconds}

    def close(self) -> None:
        self._started.close()


def ask_in_windows(make: type[Client], address: Address, numbers: range) -> Generator[int, float, None]:
    """A client process: for each number of seconds that it is told, the cycles that its clients completed in them."""
    with zmq.Context() as context, ExitStack() as sockets:
        clients = [make(address, number) for number in numbers]
        connections = {}
        for client in clients:
            socket = client.connect(context)
            sockets.callback(socket.close, 0)
            connections[socket] = client
        seconds = yield len(clients)
        while True:
            seconds = yield _window(connections, seconds)


def _window(connections: Mapping[zmq.Socket[bytes], Client], seconds: float) -> int:
    """Cycles that ended within ``seconds``. What has begun by then ends, and is not counted."""
    poller = zmq.Poller()
    dialogues = {}
    deadline = perf_counter() + seconds
    for socket, client in connections.items():
        dialogues[socket] = client.cycle()
        poller.register(socket, zmq.POLLIN)
        socket.send_multipart(next(dialogues[socket]))
    cycles = 0
    while dialogues:
        readable = poller.poll(_SILENCE_MS)
        if not readable:
            raise CheckFailed(f"{len(dialogues)} connections have had no answer for {_SILENCE_MS / 1000:g} s")
        for socket, _ in readable:
            request = _next_request(dialogues[socket], socket)
            if request is None:
                if perf_counter() >= deadline:
                    poller.unregister(socket)
                    del dialogues[socket]
                    continue
                cycles += 1
                dialogues[socket] = connections[socket].cycle()
                request = next(dialogues[socket])
            socket.send_multipart(request)
    return cycles


def _next_request(dialogue: Steps, socket: zmq.Socket[bytes]) -> Sequence[Any] | None:
    """Hand the answer to the dialogue: what it asks next, or None when it has ended."""
    try:
        return dialogue.send(socket.recv_multipart(copy=False))
    except StopIteration:
        return None


def converse(client: Client, dialogue: Steps) -> None:
    """Go through a whole dialogue on a connection of its own."""
    with zmq.Context() as context, client.connect(context) as socket:
        socket.linger = 0
        request: Sequence[Any] | None = next(dialogue)
        while request is not None:
            socket.send_multipart(request)
            if not socket.poll(_SILENCE_MS):
                raise CheckFailed(f"no answer for {_SILENCE_MS / 1000:g} s")
            request = _next_request(dialogue, socket)
