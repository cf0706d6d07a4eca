"""What the torch engine must know of a tokenizer: the bytes of every token, the tokens that end a call, and how a
message becomes a prompt.

Text is made from bytes and from nothing else, so the text of a call is the same however its tokens were grouped into
steps, chunks or lives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.errors import EngineError


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """``token_bytes[id]`` are the bytes a token adds to the text (none for a special token); ``end_ids`` end a call;
    ``encode`` turns a user's message into prompt ids, chat template applied."""

    token_bytes: tuple[bytes, ...]
    end_ids: tuple[int, ...]
    encode: Callable[[str], tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.token_bytes)

    def check(self, ids: Sequence[int], what: str) -> None:
        """`EngineError` when one of ``ids`` is outside the vocabulary; ``what`` says whose ids they are."""
        if ids and (min(ids) < 0 or max(ids) >= len(self)):
            index, token = next((i, t) for i, t in enumerate(ids) if not 0 <= t < len(self))
            raise EngineError(
                f"{what}: token id {token} at index {index} is outside the vocabulary 0..{len(self) - 1}; "
                f"were the ids made with another tokenizer?"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        self.check(ids, "decode")
        return b"".join(self.token_bytes[i] for i in ids).decode("utf-8", "replace")
