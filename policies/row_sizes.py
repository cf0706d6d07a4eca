"""How many bytes a row is likely to have: what is known of it, and what rows of its source had so far.

A row whose tokens are known is taken to have as many bytes a token as those read before it, and never fewer bytes than
it is known to have. A row of which nothing is known counts as the mean of its source, and as nothing before anything
was read.
Cost: O(1).
"""

from __future__ import annotations

from policies.coalescing_events import Source, Wish


class _Seen:
    __slots__ = ("nbytes", "rows", "token_bytes", "tokens")

    def __init__(self) -> None:
        self.rows = self.nbytes = 0
        self.tokens = self.token_bytes = 0  # of the rows whose tokens were known


class RowSizes:
    def __init__(self) -> None:
        self._seen: dict[Source, _Seen] = {}

    def note(self, source: Source, tokens: int, nbytes: int) -> None:
        """A row was read; ``tokens`` 0: not known."""
        seen = self._seen.setdefault(source, _Seen())
        seen.rows += 1
        seen.nbytes += nbytes
        if tokens:
            seen.tokens += tokens
            seen.token_bytes += nbytes

    def expected(self, source: Source, wish: Wish) -> int:
        seen = self._seen.get(source)
        if seen is None:
            return wish.nbytes
        if wish.tokens and seen.tokens:
            return max(wish.nbytes, wish.tokens * seen.token_bytes // seen.tokens)
        return max(wish.nbytes, seen.nbytes // seen.rows)
