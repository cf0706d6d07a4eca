"""Nobody uninvited: what a peer without the secret can do to a plane (nothing), and where a plane is reached."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from actors.client import DataPlaneClient
from actors.wire import server as wire_server
from actors.wire.secret import USERNAME
from policies.codec import Message, encode_messages, pack_message
from policies.config import ENCRYPTIONS
from policies.errors import RequestTimeout, Unauthorized
from tests.plane_in_process import InProcessPlane, in_process_plane
from tests.test_client import wait_until

ROOT = Path(__file__).resolve().parent.parent
_NETWORKS = itertools.count()
SIGNATURE = b"\xff" + b"\0" * 8 + b"\x7f"
EACH = 25
"""Of every kind of stranger: 300 in all."""


def greeting(mechanism: bytes) -> bytes:
    """The first 64 bytes of ZMTP 3.1."""
    return SIGNATURE + b"\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" * 32


def command(name: bytes, data: bytes) -> bytes:
    body = bytes([len(name)]) + name + data
    return b"\x04" + bytes([len(body)]) + body


def hello(password: bytes) -> bytes:
    return command(b"HELLO", bytes([len(USERNAME)]) + USERNAME + bytes([len(password)]) + password)


def clear_request() -> bytes:
    """A whole, valid request, as frames on a connection that was never let in."""
    (frame,) = encode_messages([pack_message(Message(1, "clear", {"partition": "t", "keys": ["kept"]}))])
    return b"\x00" + bytes([len(frame)]) + bytes(frame)


STRANGERS: dict[str, bytes] = {
    "nothing": b"",
    "garbage": os.urandom(64),
    "another protocol": b"GET / HTTP/1.1\r\nHost: plane\r\n\r\n" * 4,
    "half a greeting": greeting(b"PLAIN")[:20],
    "a greeting only": greeting(b"PLAIN"),
    "no mechanism": greeting(b"NULL") + command(b"READY", b"") + clear_request(),
    "another mechanism": greeting(b"GSSAPI"),
    "a wrong secret": greeting(b"PLAIN") + hello(b"guess") + command(b"INITIATE", b"") + clear_request(),
    "no secret": greeting(b"PLAIN") + hello(b"") + command(b"INITIATE", b"") + clear_request(),
    "no handshake": greeting(b"PLAIN") + clear_request() * 10,
    "a command of 1 TiB": greeting(b"PLAIN") + b"\x06" + struct.pack(">Q", 1 << 40),
    "a welcome of its own": greeting(b"PLAIN") + command(b"WELCOME", b"") + clear_request(),
}


@contextlib.contextmanager
def crowd(endpoint: str, kinds: Iterable[bytes]) -> Iterator[list[socket.socket]]:
    """Strangers of these kinds who connect and stay."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    with contextlib.ExitStack() as held:
        strangers = []
        for say in kinds:
            strangers.append(held.enter_context(socket.create_connection((host, int(port)), timeout=10)))
            with contextlib.suppress(OSError):
                strangers[-1].sendall(say)
        yield strangers


@pytest.fixture(params=ENCRYPTIONS)
def plane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessPlane]:
    monkeypatch.setattr(wire_server, "HANDSHAKE_MS", 1500)
    with in_process_plane(units=1, timeout=20.0, encryption=request.param) as running:
        yield running


def work(client: DataPlaneClient) -> None:
    """Every kind of request, each of which must be answered."""
    client.put("t", ["a"], {"x": [np.arange(5)]})
    assert client.get("t", ["a"])["x"][0].tolist() == [0, 1, 2, 3, 4]
    client.tag("t", ["a"], [{"seen": True}])
    assert client.clear("t", ["a"]) == 1


def test_a_crowd_of_strangers_is_refused_and_counted_while_a_client_works(plane: InProcessPlane) -> None:
    """They reach no handler, and none of them is still there when its time to prove the secret is over."""
    client = plane.client()
    client.put("t", ["kept"], {"x": [np.arange(3)]})
    endpoints = [plane.address.endpoint, client.describe()["units"]["u0"]]
    with contextlib.ExitStack() as crowds:
        held = [crowds.enter_context(crowd(endpoint, [*STRANGERS.values()] * EACH)) for endpoint in endpoints]
        for _ in range(20):
            work(client)
        with DataPlaneClient(plane.address) as newcomer:
            work(newcomer)
        wait_until(lambda: client.describe()["peers_refused"] == EACH * len(STRANGERS), 20)
        wait_until(lambda: all(is_closed(stranger) for strangers in held for stranger in strangers), 20)
    assert [row["x"].tolist() for _, row in client.get("t", ["kept"]).rows()] == [[0, 1, 2]]
    assert client.describe()["partitions"]["t"]["rows"] == 1


def is_closed(stranger: socket.socket) -> bool:
    """Whether the plane has hung up."""
    stranger.setblocking(False)
    try:
        while stranger.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def test_those_who_prove_the_secret_are_not_counted(plane: InProcessPlane) -> None:
    for _ in range(5):
        with DataPlaneClient(plane.address) as client:
            work(client)
    assert plane.client().describe()["peers_refused"] == 0


def test_strangers_that_come_and_go_leave_nothing_behind(plane: InProcessPlane) -> None:
    client = plane.client()
    work(client)
    before = psutil.Process().num_fds()
    for _ in range(5):
        with crowd(plane.address.endpoint, [STRANGERS["a wrong secret"]] * 100):
            work(client)
    wait_until(lambda: psutil.Process().num_fds() <= before + 5, 20)


@contextlib.contextmanager
def another_network() -> Iterator[tuple[Callable[[str], subprocess.Popen[str]], str]]:
    """A network namespace with a wire to this one: runs scripts there; and this side's address on that wire."""
    number = f"{os.getpid()}-{next(_NETWORKS)}"
    name, here, there = f"rg{number}", f"rgh{number}", f"rgt{number}"
    address = "10.213.77.1"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    with contextlib.ExitStack() as undo:
        try:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
            ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
            undo.callback(ip, "link", "del", here)
            ip("addr", "add", f"{address}/30", "dev", here)
            ip("link", "set", here, "up")
            ip("-n", name, "addr", "add", "10.213.77.2/30", "dev", there)
            ip("-n", name, "link", "set", there, "up")
            ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            detail = getattr(error, "stderr", b"") or b""
            pytest.skip(f"no network namespaces here (needs iproute2 and CAP_NET_ADMIN): {error} {detail.decode()}")

        def run(script: str) -> subprocess.Popen[str]:
            arguments = ["ip", "netns", "exec", name, sys.executable, "-c", script]
            return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)

        yield run, address


ASK = """if True:
    from actors.client import DataPlaneClient, PlaneAddress
    from actors.wire.secret import Secret
    from policies.errors import RegraftError
    with DataPlaneClient(PlaneAddress({endpoint!r}, Secret({secret!r}), 4)) as client:
        try:
            print([key for key, _ in client.list("t")])
            print(client.get("t", ["kept"])["x"][0].tolist())
        except RegraftError as error:
            print(type(error).__name__)
"""


def asked_from(run: Callable[[str], subprocess.Popen[str]], endpoint: str, secret: str) -> list[str]:
    child = run(ASK.format(endpoint=endpoint, secret=secret))
    return child.communicate(timeout=60)[0].splitlines()


def test_a_local_plane_cannot_be_reached_from_another_network() -> None:
    """Not even with the secret: on no address of this machine, and on the other network's own loopback neither."""
    with another_network() as (run, address), in_process_plane(units=1) as plane:
        client = plane.client()
        client.put("t", ["kept"], {"x": [np.arange(3)]})
        endpoints = [plane.address.endpoint, client.describe()["units"]["u0"]]
        ports = [endpoint.rsplit(":", 1)[1] for endpoint in endpoints]
        assert asked_from(run, f"tcp://{address}:{ports[0]}", plane.secret.text) == [RequestTimeout.__name__]
        probe = "import socket\n" + "".join(
            f"print(socket.socket().connect_ex(({host!r}, {port})))\n"
            for host in (address, "127.0.0.1")
            for port in ports
        )
        refused = str(errno.ECONNREFUSED)
        assert run(probe).communicate(timeout=30)[0].split() == [refused] * 4


def test_a_plane_on_its_nodes_address_is_reached_with_the_secret_only() -> None:
    """The same wire: so what keeps others from a local plane is where it listens, and from this one the secret."""
    with another_network() as (run, address), in_process_plane(units=1, host=address) as plane:
        plane.client().put("t", ["kept"], {"x": [np.arange(3)]})
        assert asked_from(run, plane.address.endpoint, plane.secret.text) == ["['kept']", "[0, 1, 2]"]
        assert asked_from(run, plane.address.endpoint, "guess") == [Unauthorized.__name__]
        probe = (
            f"import socket\nprint(socket.socket().connect_ex(('127.0.0.1', {plane.address.endpoint.rsplit(':')[-1]})))"
        )
        ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
        assert ended.stdout.strip() != "0", "it listens on that address, and on no other"
