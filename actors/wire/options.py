"""Socket options that both sides of the wire share."""

from __future__ import annotations

import zmq

_PROBE_AFTER_S, _PROBE_EVERY_S, _PROBES = 15, 5, 3
_STUCK_MS = 60_000


def watch_for_lost_hosts(socket: zmq.Socket[bytes]) -> None:
    """Break a connection whose other machine has gone without a word (after 30 s), or whose other side has not taken
    a byte of what is due to it for a minute. libzmq then lets go of what it held for it.

    The kernel does this, so neither a large message on a slow network nor a busy peer is taken for a lost one; ZeroMQ's
    own heartbeats queue behind messages and would do so.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _PROBE_AFTER_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _PROBE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, _STUCK_MS)
