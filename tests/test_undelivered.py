"""A peer that asks and does not take its answers: it waits, others do not, nothing is lost, memory is bounded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import zmq

from actors.wire.secret import Secret, present
from policies.codec import Message, encode_messages, error_of, pack_message
from policies.codec import decode_messages as decode
from policies.errors import CapacityExceeded
from tests.test_client_faults import freeze
from tests.test_wire import LIMIT, SECRET, Peers

ROOT = Path(__file__).resolve().parent.parent
ANSWER = 1 << 20
ANSWERS = 1024
WINDOW = 16 << 20

SERVER = f"""if True:
    import sys, time
    from actors.wire.loop import Loop
    from actors.wire.secret import Secret
    from actors.wire.server import Server
    from policies.config import PlaneConfig
    loop = Loop("server")
    handlers = {{
        "big": lambda request: request.answer({{"n": request.body["n"]}}, [b"x" * {ANSWER}]),
        "counts": lambda request: request.answer(
            {{"dropped": server.answers_dropped, "refused": server.requests_refused}}
        ),
    }}
    config = PlaneConfig(max_undelivered_bytes={WINDOW})
    server = Server(loop, "127.0.0.1", Secret(sys.argv[1]), handlers, config)
    loop.start()
    print(server.endpoint, flush=True)
    time.sleep(600)
"""


class ServerProcess:
    def __init__(self) -> None:
        arguments = [sys.executable, "-c", SERVER, SECRET.text]
        self.child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert self.child.stdout is not None
        self.endpoint = self.child.stdout.readline().strip()
        self.context = zmq.Context()

    def peer(self, secret: Secret = SECRET) -> zmq.Socket[bytes]:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 30_000)
        present(dealer, secret)
        dealer.connect(self.endpoint)
        return dealer

    def resident(self) -> int:
        return int(psutil.Process(self.child.pid).memory_info().rss)

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    running = ServerProcess()
    yield running
    running.close()


def ask(peer: zmq.Socket[bytes], number: int, op: str, buffers: list[bytes] | None = None) -> None:
    peer.send_multipart(encode_messages([pack_message(Message(number, op, {"n": number}, buffers or []))]))


def take(peer: zmq.Socket[bytes]) -> list[Message]:
    frames = peer.recv_multipart()
    read = decode([memoryview(frame) for frame in frames])
    assert all(isinstance(message, Message) for message in read)
    return read  # type: ignore[return-value]


def test_answers_that_nobody_takes_wait_within_a_bound_and_none_is_lost(server: ServerProcess) -> None:
    """Fault: drops that look like timeouts, or memory without limit. 1 GiB is due to a peer that does not read."""
    stuck, other = server.peer(), server.peer()
    ask(other, 1, "big")
    take(other)
    before = server.resident()
    for number in range(ANSWERS):
        ask(stuck, number, "big")
    grown = 0
    for number in range(2, 102):
        ask(other, number, "big")
        (answer,) = take(other)
        assert answer.id == number, "others are served"
        grown = max(grown, server.resident() - before)
    assert grown < 8 * WINDOW < ANSWERS * ANSWER // 4
    taken = [message.id for _ in range(ANSWERS) for message in take(stuck)]
    assert taken == list(range(ANSWERS))
    ask(other, 999, "counts")
    assert take(other)[0].body == {"dropped": 0, "refused": 0}


def test_a_frozen_client_costs_a_bound_and_gets_its_answers_when_it_wakes(server: ServerProcess) -> None:
    script = """if True:
        import sys, threading
        from actors.wire.connection import Connection
        from actors.wire.loop import Loop
        from actors.wire.secret import Secret
        from policies.codec import Message
        from policies.operations import Ask
        loop, done, answers = Loop("client"), threading.Event(), []
        loop.start()
        def finish(outcome):
            answers.append(isinstance(outcome, Message) and len(outcome.buffers[0]))
            if len(answers) == 1: print("asked", flush=True)
            if len(answers) == 512: done.set()
        def ask_all():
            connection = Connection(loop, sys.argv[1], Secret(sys.argv[2]), "the server")
            for n in range(512):
                connection.request(Ask("server", "big", {"n": n}), 120, finish)
        loop.call_soon(ask_all)
        done.wait(60)
        print(set(answers), flush=True)
        loop.stop()
    """
    arguments = [sys.executable, "-c", script, server.endpoint, SECRET.text]
    child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "asked\n"
        freeze(child)
        before, other = server.resident(), server.peer()
        for number in range(50):
            ask(other, number, "big")
            take(other)
            assert server.resident() - before < 8 * WINDOW
        os.kill(child.pid, signal.SIGCONT)
        assert child.communicate(timeout=60)[0] == f"{{{ANSWER}}}\n"
    finally:
        child.kill()
        child.communicate()


def test_requests_of_a_peer_that_takes_nothing_are_refused_and_counted() -> None:
    """In the server's own process, with a limit of 1 MiB: answers fill the way, then requests fill the waiting room."""
    peers = Peers(big=lambda request: request.answer({}, [b"x" * (LIMIT // 2)]))
    context = zmq.Context()
    stuck = context.socket(zmq.DEALER)
    for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096), (zmq.LINGER, 0), (zmq.RCVTIMEO, 20_000)):
        stuck.setsockopt(option, value)
    present(stuck, SECRET)
    stuck.connect(peers.server.endpoint)
    for number in range(64):
        ask(stuck, number, "big", [bytes(LIMIT // 4)])
    outcomes: dict[int, Message] = {}
    while len(outcomes) < 64:
        outcomes |= {message.id: message for message in take(stuck)}
    errors = [error for message in outcomes.values() if (error := error_of(message)) is not None]
    assert errors and all(type(error) is CapacityExceeded and str(LIMIT) in error.message for error in errors)
    assert peers.server.requests_refused == len(errors) < 64
    assert peers.server.answers_dropped == 0
    context.destroy(linger=0)
    peers.close()
