"""The questions that the recipe's calls ask, written for this project and kept in ``prompts.txt``.

Blocks of text, one empty line between them; a block may have several lines. The first eight invite long answers, so
that cuts fall while all of them are generating; many hold emoji or text in other scripts than Latin, so that characters
of several bytes occur in prompts and answers.
"""

from __future__ import annotations

from pathlib import Path


def load_prompts() -> tuple[str, ...]:
    """All prompts, in the order of the file."""
    text = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8")
    return tuple(block.strip() for block in text.split("\n\n") if block.strip())
