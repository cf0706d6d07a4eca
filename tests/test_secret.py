"""The secret: what each encryption proves, over real sockets, and that it shows nowhere."""

from __future__ import annotations

import dataclasses
import pickle
import socket
import threading

import numpy as np
import pytest
import zmq

from actors.client import DataPlaneClient, PlaneAddress
from actors.data_plane import DataPlane
from actors.wire import secret as secrets
from actors.wire.secret import Doorkeeper, Secret, new_secret
from policies.codec import Message
from policies.config import ENCRYPTIONS, PlaneConfig
from policies.errors import ConfigError, Unauthorized
from tests.plane_in_process import in_process_plane
from tests.test_wire import Peers

CURVE = Secret("a" * 64, "curve")


def test_no_two_secrets_are_the_same_and_none_shows() -> None:
    one, other = new_secret(), new_secret("curve")
    assert len(one.text) == 64 and one.text != other.text
    assert one.text not in repr(one) and other.text not in repr([other])
    assert pickle.loads(pickle.dumps(other)) == other


def test_without_libsodium_curve_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda name: name != "curve")
    with pytest.raises(ConfigError, match="built without") as raised:
        new_secret("curve")
    assert raised.value.details["field"] == "encryption"
    assert new_secret("none").encryption == "none"


def test_an_unknown_encryption_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="encryption is 'rot13'; it must be one of none, curve"):
        PlaneConfig(encryption="rot13")


def test_the_keys_follow_from_the_secret_and_from_nothing_else() -> None:
    derive = secrets._private_key
    keys = {derive(CURVE, b"regraft server"), derive(CURVE, b"regraft client"), derive(Secret("b", "curve"), b"x")}
    assert len(keys) == 3 and derive(CURVE, b"regraft client") == derive(Secret("a" * 64, "curve"), b"regraft client")


@pytest.mark.parametrize("credentials", [[], [b"\0" * 32], [b"short"]])
def test_the_doorkeeper_of_an_encrypted_plane_knows_one_key(credentials: list[bytes]) -> None:
    keeper = Doorkeeper(CURVE)
    ask = [b"1.0", b"42", b"", b"10.0.0.1", b"id"]
    assert keeper.answer([*ask, b"CURVE", *keeper._proof])[2] == b"200"
    assert keeper.answer([*ask, b"CURVE", *credentials])[2] == b"400"
    assert keeper.answer([*ask, b"PLAIN", secrets.USERNAME, CURVE.text.encode()])[2] == b"400"


@pytest.mark.parametrize("theirs", [Secret("b" * 64, "curve"), Secret("a" * 64, "none")], ids=["other", "in clear"])
def test_an_encrypted_server_serves_the_holder_of_its_secret_only(theirs: Secret) -> None:
    peers = Peers(secret=CURVE)
    try:
        assert isinstance(peers.ask(peers.connect(CURVE), "echo", {"n": 1}), Message)
        assert isinstance(peers.ask(peers.connect(theirs), "park"), Unauthorized)
        assert peers.parked == [] and peers.server.refused >= 1
    finally:
        peers.close()


def test_a_client_of_an_encrypted_plane_speaks_to_no_other_server() -> None:
    peers = Peers(secret=Secret("b" * 64, "curve"))
    try:
        assert isinstance(peers.ask(peers.connect(CURVE), "park"), Unauthorized)
        assert peers.parked == []
    finally:
        peers.close()


@pytest.mark.parametrize("encryption", ENCRYPTIONS)
def test_only_encryption_hides_what_travels(encryption: str) -> None:
    """A tap between client and plane sees the bytes of a row, or does not."""
    with in_process_plane(units=1, encryption=encryption) as plane:
        tap = Tap(plane.address.endpoint)
        with DataPlaneClient(PlaneAddress(tap.endpoint, plane.secret, 10)) as client:
            client.create_partition("a-name-to-look-for")
            assert "a-name-to-look-for" in client.describe()["partitions"]
        tap.close()
        assert (b"a-name-to-look-for" in bytes(tap.seen)) == (encryption == "none")
        assert (plane.secret.text.encode() in bytes(tap.seen)) == (encryption == "none")


class Tap:
    """Passes the bytes of one connection on, both ways, and keeps those of the client."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = bytearray()
        self._behind = (host, int(port))
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        front, _ = self._listener.accept()
        back = socket.create_connection(self._behind)
        answers = threading.Thread(target=self._pass_on, args=(back, front, bytearray()), daemon=True)
        answers.start()
        self._pass_on(front, back, self.seen)
        answers.join(10)

    @staticmethod
    def _pass_on(source: socket.socket, to: socket.socket, seen: bytearray) -> None:
        try:
            while data := source.recv(65_536):
                seen += data
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._threads[0].join(10)
        self._listener.close()


def test_an_encrypted_plane_serves_whoever_ray_hands_its_address(ray_cluster: str) -> None:
    """Launched by configuration, its keys in nobody's representation, and deaf to the same secret in clear."""
    import ray

    @ray.remote(num_cpus=0)
    def read(address: PlaneAddress) -> list[int]:
        with DataPlaneClient(address) as client:
            return client.get("t", ["a"])["x"][0].tolist()  # type: ignore[no-any-return]

    with DataPlane.launch(PlaneConfig(units=1, encryption="curve"), name="encrypted") as plane:
        plane.client().put("t", ["a"], {"x": [np.arange(3)]})
        assert ray.get(read.remote(plane.address)) == [0, 1, 2]
        assert plane.address.secret.encryption == "curve"
        assert plane.address.secret.text not in f"{plane.address!r} {plane.config!r}"
        in_clear = dataclasses.replace(plane.address, secret=Secret(plane.address.secret.text))
        with DataPlaneClient(in_clear) as stranger, pytest.raises(Unauthorized):
            stranger.list("t")
