"""The secret of a plane, and how connections prove that they have it.

A plane makes one random secret at launch and hands it to its actors and clients through Ray only. Every connection
proves it in ZeroMQ's handshake, before any message is accepted. Two ways, by configuration:

- ``none``: the secret is the password of a PLAIN handshake. It travels in clear: this keeps strangers out on a trusted
  network and protects against nobody who can read that network.
- ``curve``: all traffic is encrypted (CurveZMQ). The key pairs of both sides are derived from the secret, so that it
  stays the only thing to hand on: a server admits the one public key that belongs to it, and a client talks to nobody
  but the holder of the other. Whoever has the secret can play either side, as with a password.

A secret's ``repr`` does not show it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from policies.errors import ConfigError

USERNAME = b"regraft"
CURVE = "curve"
_SERVER, _CLIENT = b"regraft server", b"regraft client"


@dataclass(frozen=True, slots=True)
class Secret:
    """``text`` is the secret itself, ``encryption`` one of `policies.config.ENCRYPTIONS`."""

    text: str = field(repr=False)
    encryption: str = "none"


def new_secret(encryption: str = "none") -> Secret:
    """Raises `ConfigError` where the encryption is not to be had."""
    if encryption == CURVE and not zmq.has(CURVE):
        raise ConfigError(
            "encryption is 'curve', which the installed libzmq was built without; install a pyzmq wheel from PyPI "
            "(they come with libsodium), or set encryption to 'none'",
            field="encryption",
        )
    return Secret(secrets.token_hex(32), encryption)


def present(socket: zmq.Socket[bytes], secret: Secret) -> None:
    """Make a connecting socket prove that it has the secret."""
    if secret.encryption == CURVE:
        private = _private_key(secret, _CLIENT)
        socket.setsockopt(zmq.CURVE_SECRETKEY, private)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(private))
        socket.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(_private_key(secret, _SERVER)))
    else:
        socket.setsockopt(zmq.PLAIN_USERNAME, USERNAME)
        socket.setsockopt(zmq.PLAIN_PASSWORD, secret.text.encode())


def require(socket: zmq.Socket[bytes], secret: Secret) -> None:
    """Make a binding socket demand the proof of those who connect; its context's `Doorkeeper` judges it."""
    if secret.encryption == CURVE:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, _private_key(secret, _SERVER))
    else:
        socket.setsockopt(zmq.PLAIN_SERVER, 1)


def _private_key(secret: Secret, side: bytes) -> bytes:
    """Any 32 bytes are a Curve25519 private key; these can be had from the secret only."""
    return z85.encode(hashlib.blake2b(side, key=secret.text.encode()[:64], digest_size=32).digest())


class Doorkeeper:
    """Answers ZeroMQ's authentication requests (RFC 27, ZAP) for one context.

    ``refused`` counts the connections that were turned away.
    """

    def __init__(self, secret: Secret) -> None:
        if secret.encryption == CURVE:
            self._mechanism = b"CURVE"
            self._proof = [z85.decode(zmq.curve_public(_private_key(secret, _CLIENT)))]
        else:
            self._mechanism, self._proof = b"PLAIN", [USERNAME, secret.text.encode()]
        self.refused = 0

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The ZAP reply to a ZAP request: status 200 for the right secret, 400 for anything else."""
        version, request_id, mechanism, *credentials = (*frames[:2], *frames[5:])
        welcome = (
            mechanism == self._mechanism
            and len(credentials) == len(self._proof)
            and all(map(hmac.compare_digest, credentials, self._proof))
        )
        if not welcome:
            self.refused += 1
        status, text = (b"200", b"welcome") if welcome else (b"400", b"wrong or missing secret")
        return [version, request_id, status, text, b"", b""]
