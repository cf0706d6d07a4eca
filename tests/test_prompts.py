"""The prompts: enough of them, all different, and with characters of several bytes."""

from __future__ import annotations

import unicodedata

from recipes.prefix_recovery.prompts import load_prompts


def test_there_are_at_least_32_different_prompts() -> None:
    prompts = load_prompts()
    assert len(prompts) >= 32
    assert len(set(prompts)) == len(prompts)
    assert all(prompt == prompt.strip() and prompt for prompt in prompts)


def test_many_scripts_occur() -> None:
    names = {unicodedata.name(c, "").split()[0] for prompt in load_prompts() for c in prompt if c.isalpha()}
    assert {"LATIN", "GREEK", "CJK", "ARABIC", "DEVANAGARI", "THAI", "HANGUL", "CYRILLIC", "HEBREW"} <= names


def test_the_first_eight_hold_emoji_and_other_scripts() -> None:
    """A default run has characters of three and four bytes in at least two of its prompts."""
    first = load_prompts()[:8]
    assert sum(any(ord(c) > 0x7FF for c in prompt) for prompt in first) >= 2
    assert any(ord(c) > 0xFFFF for prompt in first for c in prompt)
