"""The secret of a plane and the PLAIN credentials made from it.

A plane makes one random secret at launch and hands it to its actors and clients through Ray only. Every connection
presents it in ZeroMQ's PLAIN handshake, before any message is accepted. PLAIN sends the secret in clear: it keeps
strangers out on a trusted network and protects against nobody who can read that network.
"""

from __future__ import annotations

import hmac
import secrets

import zmq

USERNAME = b"regraft"


def new_secret() -> str:
    return secrets.token_hex(32)


def present(socket: zmq.Socket[bytes], secret: str) -> None:
    """Make a connecting socket present the secret."""
    socket.setsockopt(zmq.PLAIN_USERNAME, USERNAME)
    socket.setsockopt(zmq.PLAIN_PASSWORD, secret.encode())


class Doorkeeper:
    """Answers ZeroMQ's authentication requests (RFC 27, ZAP) for one context.

    ``refused`` counts the connections that were turned away.
    """

    def __init__(self, secret: str) -> None:
        self._password = secret.encode()
        self.refused = 0

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The ZAP reply to a ZAP request: status 200 for the right secret, 400 for anything else."""
        version, request_id, mechanism, *credentials = (*frames[:2], *frames[5:])
        welcome = (
            mechanism == b"PLAIN"
            and len(credentials) == 2
            and hmac.compare_digest(credentials[0], USERNAME)
            and hmac.compare_digest(credentials[1], self._password)
        )
        if not welcome:
            self.refused += 1
        status, text = (b"200", b"welcome") if welcome else (b"400", b"wrong or missing secret")
        return [version, request_id, status, text, b"", b""]
