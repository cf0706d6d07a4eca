"""Text from token bytes, whatever the grouping; ids outside the vocabulary are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engines.tiny import vocabulary
from policies.errors import EngineError


@given(st.text(max_size=30))
def test_text_comes_back_from_its_bytes(text: str) -> None:
    """Encode puts the begin token first; special tokens add no text."""
    ids = vocabulary().encode(text)
    assert vocabulary().decode([*ids, 257]) == text


def test_broken_characters_become_replacement_characters() -> None:
    assert vocabulary().decode([65, 0xF0, 0x9F, 66]) == "A\ufffdB"


@pytest.mark.parametrize("bad", [-1, 258, 1 << 40])
def test_an_id_outside_is_an_error_that_names_it(bad: int) -> None:
    with pytest.raises(EngineError, match=rf"token id {bad} at index 1 .*0\.\.257"):
        vocabulary().decode([65, bad])
