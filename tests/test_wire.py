"""The wire over real sockets: answers, errors, deadlines, strangers, and peers that break off."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest
import zmq

from actors.wire.connection import Connection, Outcome
from actors.wire.loop import Loop
from actors.wire.secret import USERNAME, Doorkeeper, Secret, present
from actors.wire.server import Request, Server
from policies.codec import Message
from policies.config import PlaneConfig
from policies.errors import (
    ClosedError,
    DtypeConflict,
    RegraftError,
    RemoteError,
    RequestTimeout,
    Unauthorized,
    Unreachable,
    WireError,
)
from policies.in_flight import MOST_REQUESTS
from policies.operations import Ask

SECRET = Secret("s3cret")
LIMIT = 1 << 20


def echo(request: Request) -> None:
    request.answer(request.body, [bytes(b) for b in request.message.buffers])


def refuse(_: Request) -> None:
    raise DtypeConflict("field 'ids' holds int64, float32 came", field="ids")


def stumble(_: Request) -> None:
    raise OSError("disk on fire")


class Peers:
    """A server and the means to ask it from a test's thread."""

    def __init__(self, secret: Secret = SECRET, **handlers: Callable[[Request], None]) -> None:
        self.parked: list[Request] = []
        config = PlaneConfig(max_frame_bytes=LIMIT, max_undelivered_bytes=LIMIT)
        self.server_loop, self.client_loop = Loop("server"), Loop("client")
        handlers |= {"echo": echo, "refuse": refuse, "stumble": stumble, "park": self.parked.append}
        self.server = Server(self.server_loop, "127.0.0.1", secret, handlers, config)
        self.server_loop.start()
        self.client_loop.start()

    def connect(self, secret: Secret = SECRET, endpoint: str | None = None) -> Connection:
        made: list[Connection] = []
        self.on_client(
            lambda: made.append(Connection(self.client_loop, endpoint or self.server.endpoint, secret, "unit u0"))
        )
        return made[0]

    def on_client(self, work: Any) -> None:
        done = threading.Event()
        self.client_loop.call_soon(lambda: (work(), done.set()))
        assert done.wait(10)

    def ask(self, connection: Connection, op: str, body: Any = None, timeout: float = 10, buffers: Any = ()) -> Outcome:
        outcome: list[Outcome] = []
        done = threading.Event()

        def finish(result: Outcome) -> None:
            outcome.append(result)
            done.set()

        self.client_loop.call_soon(lambda: connection.request(Ask("u0", op, body or {}, buffers), timeout, finish))
        assert done.wait(20), "neither an answer nor an error"
        return outcome[0]

    def close(self) -> None:
        self.client_loop.stop()
        self.server_loop.stop()


@pytest.fixture
def peers() -> Iterator[Peers]:
    pair = Peers()
    yield pair
    pair.close()


def test_an_answer_comes_to_its_own_question(peers: Peers) -> None:
    connection = peers.connect()
    first = peers.ask(connection, "echo", {"n": 1}, buffers=[b"x" * 70_000, b""])
    second = peers.ask(connection, "echo", {"n": 2})
    assert isinstance(first, Message) and isinstance(second, Message)
    assert first.body == {"n": 1} and [bytes(b) for b in first.buffers] == [b"x" * 70_000, b""]
    assert second.body == {"n": 2}


@pytest.mark.parametrize(
    ("op", "kind", "text"),
    [
        ("refuse", DtypeConflict, "float32 came"),
        ("stumble", RemoteError, "disk on fire"),
        ("dance", WireError, "unknown operation 'dance'; known here are echo"),
    ],
)
def test_a_failing_request_is_answered_and_the_next_is_served(
    peers: Peers, op: str, kind: type[RegraftError], text: str
) -> None:
    connection = peers.connect()
    failed = peers.ask(connection, op)
    assert type(failed) is kind and text in failed.message
    assert isinstance(peers.ask(connection, "echo"), Message)


def test_a_frame_over_the_limit_is_refused_and_the_connection_lives(peers: Peers) -> None:
    connection = peers.connect()
    refused = peers.ask(connection, "echo", buffers=[bytes(LIMIT + 1)])
    assert isinstance(refused, WireError) and str(LIMIT) in refused.message
    assert isinstance(peers.ask(connection, "echo"), Message)


def test_an_answer_that_cannot_be_read_ends_its_request_at_once(peers: Peers) -> None:
    connection = peers.connect()

    def garble(request: Request) -> None:
        header = [2, [request.message.id, "answer", {}, [5]]]
        peers.server._router.send_multipart([request._peer, msgpack.packb(header)])

    peers.server._handlers["garble"] = garble  # type: ignore[index]
    outcome = peers.ask(connection, "garble", timeout=15)
    assert isinstance(outcome, WireError) and not isinstance(outcome, RequestTimeout)
    assert isinstance(peers.ask(connection, "echo"), Message)


def test_a_frame_far_over_the_limit_costs_its_connection_only(peers: Peers) -> None:
    greedy, modest = peers.connect(), peers.connect()
    outcome = peers.ask(greedy, "echo", timeout=5, buffers=[bytes(5 * LIMIT)])
    assert isinstance(outcome, Unreachable)
    assert isinstance(peers.ask(modest, "echo"), Message)
    assert isinstance(peers.ask(greedy, "echo"), Message), "it connects again"


def test_silence_ends_in_a_timeout_and_the_late_answer_is_dropped(peers: Peers) -> None:
    connection = peers.connect()
    outcome = peers.ask(connection, "park", timeout=0.2)
    assert isinstance(outcome, RequestTimeout) and "unit u0" in outcome.message and "'park'" in outcome.message
    peers.server_loop.call_soon(lambda: peers.parked[0].answer({"late": True}))
    following = peers.ask(connection, "echo", {"n": 3})
    assert isinstance(following, Message) and following.body == {"n": 3}
    assert connection.late_answers == 1


def test_a_wrong_secret_reaches_no_handler(peers: Peers) -> None:
    outcome = peers.ask(peers.connect(Secret("wrong")), "park")
    assert isinstance(outcome, Unauthorized)
    assert peers.parked == [] and peers.server.refused >= 1
    assert isinstance(peers.ask(peers.connect(), "echo"), Message)


def test_a_peer_without_credentials_is_never_served(peers: Peers) -> None:
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(peers.server.endpoint)
    header = msgpack.packb([2, [1, "echo", {}, []]])
    stranger.send(header)
    assert stranger.poll(500) == 0
    stranger.close()
    context.term()


def test_garbage_from_a_peer_with_the_secret_stops_nothing(peers: Peers) -> None:
    context = zmq.Context()
    odd = context.socket(zmq.DEALER)
    odd.setsockopt(zmq.LINGER, 0)
    present(odd, SECRET)
    odd.connect(peers.server.endpoint)
    for frames in ([b""], [b"\xff\xff"], [msgpack.packb([1])], [msgpack.packb([2, ["x"]])]):
        odd.send_multipart(frames)
    odd.send(msgpack.packb([9, [4, "echo", {}, []]]))
    assert odd.poll(5000), "a readable id gets an error answer"
    _, (number, op, body, _) = msgpack.unpackb(odd.recv())
    assert (number, op) == (4, "error") and "version 9" in body["message"]
    odd.close()
    context.term()
    assert isinstance(peers.ask(peers.connect(), "echo"), Message)


def test_a_connection_that_breaks_fails_its_requests_at_once(peers: Peers) -> None:
    connection = peers.connect()
    assert isinstance(peers.ask(connection, "echo"), Message)
    threading.Timer(0.2, peers.server_loop.stop).start()
    outcome = peers.ask(connection, "park", timeout=15)
    assert type(outcome) is Unreachable and "unit u0" in outcome.message and "'park'" in outcome.message


def test_nobody_listening_ends_in_a_timeout(peers: Peers) -> None:
    outcome = peers.ask(peers.connect(endpoint="tcp://127.0.0.1:9"), "echo", timeout=0.3)
    assert isinstance(outcome, RequestTimeout)


def test_closing_ends_open_requests(peers: Peers) -> None:
    connection = peers.connect()
    threading.Timer(0.2, lambda: peers.client_loop.call_soon(connection.close)).start()
    assert isinstance(peers.ask(connection, "park"), ClosedError)


def test_an_answer_to_a_peer_that_left_is_counted(peers: Peers) -> None:
    connection = peers.connect()
    peers.ask(connection, "park", timeout=0.1)
    peers.on_client(connection.close)
    answered = threading.Event()

    def answer_when_gone() -> None:
        peers.parked[0].answer()
        if peers.server.answers_dropped:
            answered.set()
        else:
            peers.server_loop.call_later(0.05, answer_when_gone)

    peers.server_loop.call_soon(answer_when_gone)
    assert answered.wait(10)


def test_a_thousand_requests_in_flight_are_all_answered(peers: Peers) -> None:
    connection = peers.connect()
    answered: list[int] = []
    done = threading.Event()

    def finish(outcome: Outcome) -> None:
        assert isinstance(outcome, Message)
        answered.append(outcome.body["n"])
        if len(answered) == 5000:
            done.set()

    def send_all() -> None:
        for n in range(5000):
            connection.request(Ask("u0", "echo", {"n": n}), 30, finish)

    peers.client_loop.call_soon(send_all)
    assert done.wait(30)
    assert sorted(answered) == list(range(5000))


def test_what_is_asked_in_one_turn_travels_together_and_is_answered_together(peers: Peers) -> None:
    """Also beside requests that fail, that wait, that cannot be sent, and that carry buffers; in order."""
    connection, ended = peers.connect(), []  # type: ignore[var-annotated]
    received = []
    served = peers.server._dispatch
    peers.server._dispatch = lambda peer, frames: (received.append(len(frames)), served(peer, frames))[1]  # type: ignore
    asks = [
        Ask("u0", "echo", {"n": 0}),
        Ask("u0", "refuse"),
        Ask("u0", "echo", {"n": object()}),
        Ask("u0", "park"),
        Ask("u0", "echo", {"n": 1}, [b"x"]),
        Ask("u0", "echo", {"n": 2}),
        Ask("u0", "dance"),
    ]
    done = threading.Event()

    def finish(number: int, outcome: Outcome) -> None:
        ended.append((number, outcome))
        if len(ended) == len(asks):
            done.set()

    def ask_all() -> None:
        for number, ask in enumerate(asks):
            connection.request(ask, 1.0, functools.partial(finish, number))

    peers.client_loop.call_soon(ask_all)
    assert done.wait(20)
    assert received == [1, 2, 1], "header alone, header and buffer, header alone"
    kinds = {number: type(outcome) for number, outcome in ended}
    assert kinds == {
        0: Message, 1: DtypeConflict, 2: WireError, 3: RequestTimeout, 4: Message, 5: Message, 6: WireError
    }  # fmt: skip
    assert [o.body["n"] for _, o in ended if isinstance(o, Message)] == [0, 1, 2]


def test_timers_fire_in_order_and_cancelled_ones_do_not() -> None:
    loop, fired, done = Loop("timers"), [], threading.Event()  # type: ignore[var-annotated]
    loop.start()

    def plan() -> None:
        loop.call_later(0.06, done.set)
        loop.call_later(0.04, lambda: fired.append("second"))
        loop.call_later(0.02, lambda: fired.append("first"))
        loop.call_later(0.03, lambda: fired.append("never")).cancel()

    loop.call_soon(plan)
    assert done.wait(10)
    loop.stop()
    assert fired == ["first", "second"]


def test_a_failing_callback_does_not_end_the_loop(caplog: pytest.LogCaptureFixture) -> None:
    loop, done = Loop("robust"), threading.Event()
    loop.start()
    loop.call_soon(lambda: 1 / 0)
    loop.call_soon(done.set)
    assert done.wait(10)
    loop.stop()
    assert "the loop goes on" in caplog.text


@pytest.mark.parametrize("credentials", [[b"regraft", b"wrong"], [b"other", SECRET.text.encode()], [], [b"regraft"]])
def test_the_doorkeeper_lets_in_the_secret_only(credentials: list[bytes]) -> None:
    keeper = Doorkeeper(SECRET)
    ask = [b"1.0", b"42", b"", b"10.0.0.1", b"id", b"PLAIN"]
    assert keeper.answer([*ask, USERNAME, SECRET.text.encode()])[:3] == [b"1.0", b"42", b"200"]
    assert keeper.answer([*ask, *credentials])[2] == b"400"
    assert keeper.answer([*ask[:5], b"NULL"])[2] == b"400"


def test_timers_of_any_length_leave_the_loop_alive(caplog: pytest.LogCaptureFixture) -> None:
    """A poll's limit is a 32-bit number of milliseconds; NaN would put the heap of timers out of order."""
    loop, done = Loop("patient"), threading.Event()
    loop.start()
    for seconds in (float("inf"), 1e18, float("nan")):
        loop.call_soon(lambda s=seconds: loop.call_later(s, lambda: None))  # type: ignore[misc]
    loop.call_soon(lambda: loop.call_later(0.01, done.set))
    assert done.wait(10)
    loop.stop()
    assert "not NaN" in caplog.text


@pytest.mark.parametrize("body", [{"x": object()}, {"x": 1 << 80}, {"x": "\ud800"}])
def test_a_body_that_no_message_can_carry_is_an_error_at_once(peers: Peers, body: dict[str, Any]) -> None:
    connection = peers.connect()
    refused = peers.ask(connection, "echo", body)
    assert isinstance(refused, WireError) and "no message can carry" in refused.message
    assert isinstance(peers.ask(connection, "echo"), Message)


def test_a_huge_header_stops_nothing(peers: Peers) -> None:
    connection = peers.connect()
    refused = peers.ask(connection, "echo", {"x": bytes(2 * LIMIT)})
    assert isinstance(refused, WireError) and str(LIMIT) in refused.message
    assert isinstance(peers.ask(connection, "echo"), Message)


def test_a_server_that_comes_back_never_gets_what_was_meant_for_the_one_before_it(peers: Peers) -> None:
    """Fault: old requests queued in a client are delivered to the restarted server. Its first life ends with requests
    open; its second, at the same address, hears of those only that were asked then or had not left yet."""
    connection = peers.connect()
    assert isinstance(peers.ask(connection, "echo"), Message)
    peers.server_loop.stop()
    assert isinstance(peers.ask(connection, "park", {"life": 1}, timeout=0.3), Unreachable)
    port = int(peers.server.endpoint.rsplit(":", 1)[1])
    second_life, heard = Loop("second life"), []  # type: ignore[var-annotated]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Socket, "bind_to_random_port", lambda self, host: (self.bind(f"{host}:{port}"), port)[1])
        handlers = {"park": lambda request: (heard.append(request.body), request.answer())}
        Server(second_life, "127.0.0.1", SECRET, handlers, PlaneConfig())  # type: ignore[arg-type]
    second_life.start()
    assert isinstance(peers.ask(connection, "park", {"life": 2}), Message)
    second_life.stop()
    assert heard == [{"life": 2}]


def test_what_has_not_left_waits_for_the_next_connection(peers: Peers) -> None:
    """Asked while nobody listens, answered when somebody does: the outcome is not unknown, so it is no error."""
    with pytest.MonkeyPatch.context() as patch:
        with socket.create_server(("127.0.0.1", 0)) as placeholder:
            port = placeholder.getsockname()[1]
        connection = peers.connect(endpoint=f"tcp://127.0.0.1:{port}")
        late = Loop("late")
        patch.setattr(zmq.Socket, "bind_to_random_port", lambda self, host: (self.bind(f"{host}:{port}"), port)[1])
        timer = threading.Timer(
            0.3, lambda: (Server(late, "127.0.0.1", SECRET, {"echo": echo}, PlaneConfig()), late.start())
        )
        timer.start()
        assert isinstance(peers.ask(connection, "echo", timeout=15), Message)
        timer.join()
        late.stop()


def test_no_more_than_the_limit_is_out_and_the_rest_waits_with_its_deadline(peers: Peers) -> None:
    connection, outcomes, done = peers.connect(), [], threading.Event()  # type: ignore[var-annotated]

    def finish(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if len(outcomes) == MOST_REQUESTS + 10:
            done.set()

    def ask_all() -> None:
        for n in range(MOST_REQUESTS):
            connection.request(Ask("u0", "park", {"n": n}), 5, finish)
        for _ in range(10):
            connection.request(Ask("u0", "echo"), 0.5, finish)

    peers.client_loop.call_soon(ask_all)
    assert done.wait(20)
    starved = [o for o in outcomes[:10] if isinstance(o, RequestTimeout)]
    assert len(starved) == 10 and all("waited 0.5 s for its turn" in o.message for o in starved)
    assert all("did not answer 'park'" in o.message for o in outcomes[10:])
    assert len(peers.parked) == MOST_REQUESTS
    assert isinstance(peers.ask(connection, "echo"), Message), "what has ended makes room"


def test_requests_that_may_be_parked_keep_nobody_out(peers: Peers) -> None:
    connection = peers.connect()
    parked = threading.Event()
    peers.client_loop.call_soon(
        lambda: (
            [
                connection.request(Ask("u0", "park", {"n": n}, patience_s=30), 30, lambda _: None)
                for n in range(2 * MOST_REQUESTS)
            ]
            and parked.set()
        )
    )
    assert parked.wait(10)
    assert isinstance(peers.ask(connection, "echo"), Message)
    assert len(peers.parked) == 2 * MOST_REQUESTS


def test_a_process_may_ask_thousands_of_peers(peers: Peers) -> None:
    """Fault: the 1024th socket. Each connection takes two."""
    connections = [peers.connect() for _ in range(700)]
    assert isinstance(peers.ask(connections[-1], "echo"), Message)
