"""How much a server has handed to the network for each peer, and when a peer is to wait for more.

The network layer says of a message when it was taken over by the peer's machine, but not for every message at a price
worth paying. So one message in every `MARK_BYTES` carries a mark; messages of one peer are taken in order, so a mark
that was taken vouches for all before it. Guarantee: `Backlogs.full` is true of a peer exactly when more than ``limit``
bytes, give or take `MARK_BYTES`, are on their way to it. Cost: one dict lookup per message, memory only for peers that
have something on the way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

MARK_BYTES = 256 << 10
_MOST_IDLE = 1024
"""Peers without a mark on the way that are remembered; what they may have on the way is less than one mark."""


class _Backlog:
    __slots__ = ("marks", "nbytes", "unmarked")

    def __init__(self) -> None:
        self.marks: deque[tuple[Callable[[], bool], int]] = deque()
        self.nbytes = self.unmarked = 0

    def settle(self) -> None:
        while self.marks and self.marks[0][0]():
            self.nbytes -= self.marks.popleft()[1]


class Backlogs:
    """``limit``: bytes on the way to one peer above which it has to wait."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: dict[bytes, _Backlog] = {}

    def mark_next(self, peer: bytes, nbytes: int) -> bool:
        """Whether a message of ``nbytes`` should carry a mark."""
        backlog = self._peers.get(peer)
        return nbytes + (0 if backlog is None else backlog.unmarked) >= MARK_BYTES

    def sent(self, peer: bytes, nbytes: int, taken: Callable[[], bool] | None = None) -> None:
        """A message has left; ``taken`` says from now on whether its mark was taken."""
        backlog = self._peers.get(peer)
        if backlog is None:
            if len(self._peers) >= _MOST_IDLE:
                self._forget_idle()
            backlog = self._peers[peer] = _Backlog()
        backlog.nbytes += nbytes
        backlog.unmarked += nbytes
        if taken is not None:
            backlog.marks.append((taken, backlog.unmarked))
            backlog.unmarked = 0

    def full(self, peer: bytes) -> bool:
        """Whether more than the limit is on the way to ``peer``."""
        return self.on_the_way(peer) > self._limit

    def on_the_way(self, peer: bytes) -> int:
        backlog = self._peers.get(peer)
        if backlog is None:
            return 0
        if backlog.nbytes > self._limit:
            backlog.settle()
        return backlog.nbytes

    def _forget_idle(self) -> None:
        for backlog in self._peers.values():
            backlog.settle()
        self._peers = {peer: backlog for peer, backlog in self._peers.items() if backlog.marks}
