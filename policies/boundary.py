"""Where the text of a call may be cut, decided token by token.

Text may be cut after a token unless the cut would fall
- inside a character: the text ends in the first 1 to 3 bytes of a UTF-8 character whose other bytes may still come
  (bytes that can no longer become a character hold nothing back); or
- inside a stop string that may be starting: a proper prefix of one is the end of the text.

Working on bytes and not on decoded text means that a tail which is not text yet needs no special case, and that a
resumed call which is fed the bytes of its prefix is in the state of the call that was never cut. The state is the last
few bytes: max(3, longest stop string - 1). A token costs O(its bytes + total length of the stop strings).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_CHARACTER_TAIL: Final = 3

# Proper prefixes of well-formed characters (RFC 3629, section 4), at the end of the text.
_CHARACTER_START: Final = re.compile(
    rb"(?:[\xc2-\xf4]|\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]|\xed[\x80-\x9f]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]?|[\xf1-\xf3][\x80-\xbf]{1,2}|\xf4[\x80-\x8f][\x80-\xbf]?)\Z"
)


@dataclass(frozen=True, slots=True)
class Mark:
    """What is true of the text right after a token. ``cuttable``: it may be cut there. ``stopped``: a stop string
    was completed by this token's bytes, at their end or before it."""

    cuttable: bool
    stopped: bool


class Boundary:
    """Follows the text of one call. Feed it the bytes of every generated token in order, prefix included."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        """``stop``: the stop strings of the call. Raises `ValueError` when one of them is empty."""
        if "" in stop:
            raise ValueError("a stop string is empty and would stop every call at once; leave it out")
        self._stops = tuple(s.encode() for s in stop)
        self._starts = tuple({s[:n] for s in self._stops for n in range(1, len(s))})
        self._keep = max([_CHARACTER_TAIL, *(len(s) - 1 for s in self._stops)])
        self._tail = b""

    def feed(self, token: bytes) -> Mark:
        """Take the bytes of the next token (none for a special token) and say what holds after it."""
        old, text = len(self._tail), self._tail + token
        stopped = any(text.find(s, max(0, old - len(s) + 1)) >= 0 for s in self._stops)
        self._tail = text[-self._keep :]
        inside = _CHARACTER_START.search(text, max(0, len(text) - _CHARACTER_TAIL)) is not None
        return Mark(not (inside or text.endswith(self._starts)), stopped)
