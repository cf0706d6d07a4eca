"""The keys that wait to be read, oldest first, and how they become reads.

Guarantees: a read has the keys of one source, in their order, and breaks no limit unless it is a single key that breaks
it by itself; a key that does not fit waits, and those behind it with it, so that none is overtaken for ever.
Costs: O(1) per key and call, amortised; `oldest` and `whole` O(sources).
"""

from __future__ import annotations

from typing import NamedTuple

from policies.coalescing_events import Source


class Name(NamedTuple):
    """Of a row: what a key is worth depends on where it is read."""

    source: Source
    key: str


class Waiting(NamedTuple):
    """A queued key: since when, and the tokens and bytes that its row is taken to have."""

    since: float
    tokens: int
    nbytes: int


class _Line:
    """The waiting keys of one source, and what they are together."""

    __slots__ = ("keys", "nbytes", "tokens")

    def __init__(self) -> None:
        self.keys: dict[str, Waiting] = {}
        self.tokens = self.nbytes = 0


class ReadQueue:
    def __init__(self, max_keys: int, max_tokens: int, max_bytes: int) -> None:
        self._max_keys, self._max_tokens, self._max_bytes = max_keys, max_tokens, max_bytes
        self._lines: dict[Source, _Line] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, name: Name) -> bool:
        line = self._lines.get(name.source)
        return line is not None and name.key in line.keys

    def add(self, name: Name, waiting: Waiting) -> None:
        """At the end. The name is not in here yet."""
        line = self._lines.setdefault(name.source, _Line())
        line.keys[name.key] = waiting
        self._count(line, waiting, 1)

    def put_back(self, names: list[Name], waiting: list[Waiting]) -> None:
        """At the front, in this order. None of them is in here yet."""
        for source in {name.source for name in names}:
            line = self._lines.setdefault(source, _Line())
            back = {n.key: w for n, w in zip(names, waiting, strict=True) if n.source == source}
            line.keys = {**back, **line.keys}
            for entry in back.values():
                self._count(line, entry, 1)

    def remove(self, name: Name) -> None:
        line = self._lines[name.source]
        self._count(line, line.keys.pop(name.key), -1)
        if not line.keys:
            del self._lines[name.source]

    def oldest(self) -> float | None:
        """Since when the key waits that waits the longest."""
        return min((next(iter(line.keys.values())).since for line in self._lines.values()), default=None)

    def whole(self) -> Source | None:
        """A source of which a whole read has been gathered."""
        for source, line in self._lines.items():
            if len(line.keys) >= self._max_keys or line.tokens >= self._max_tokens or line.nbytes >= self._max_bytes:
                return source
        return None

    def take(self, source: Source | None = None) -> dict[Name, Waiting]:
        """The next read: from ``source``, or from that of the oldest key. The queue is not empty."""
        if source is None:
            source = min(self._lines, key=lambda s: next(iter(self._lines[s].keys.values())).since)
        line, taken, tokens, nbytes = self._lines[source], dict[Name, Waiting](), 0, 0
        for key, waiting in line.keys.items():
            tokens, nbytes = tokens + waiting.tokens, nbytes + waiting.nbytes
            over = len(taken) == self._max_keys or tokens > self._max_tokens or nbytes > self._max_bytes
            if over and taken:
                break
            taken[Name(source, key)] = waiting
        for name in taken:
            self.remove(name)
        return taken

    def _count(self, line: _Line, waiting: Waiting, sign: int) -> None:
        line.tokens += sign * waiting.tokens
        line.nbytes += sign * waiting.nbytes
        self._size += sign
