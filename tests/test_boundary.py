"""Where text may be cut, against a definition that looks at the whole text every time."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policies.boundary import Boundary, Mark


def _character_starts() -> frozenset[bytes]:
    """Every proper prefix of the UTF-8 form of every character."""
    points = [p for p in range(0x80, 0x110000) if p % 64 == 0 and not 0xD800 <= p < 0xE000]
    return frozenset(chr(p).encode()[:n] for p in points for n in range(1, len(chr(p).encode())))


STARTS = _character_starts()


def naive(text: bytes, new: int, stops: tuple[str, ...]) -> Mark:
    """The definition of `Mark` for a text whose last ``new`` bytes came with the last token."""
    encoded = [s.encode() for s in stops]
    inside = any(text[-n:] in STARTS for n in (1, 2, 3) if n <= len(text))
    starting = any(text.endswith(s[:n]) for s in encoded for n in range(1, len(s)))
    ends = range(len(text) - new + 1, len(text) + 1)
    stopped = any(text[:end].endswith(s) for s in encoded for end in ends)
    return Mark(not (inside or starting), stopped)


fragments = st.sampled_from(["a", "b", "</", "do", "ne>", "é", "अ", "ำ", "🌶", "ok", " "]).map(str.encode)
raw = st.one_of(fragments, st.binary(max_size=5))
stop_sets = st.lists(st.text("ab</done>é🌶", min_size=1, max_size=6), max_size=3).map(tuple)


@st.composite
def tokens(draw: st.DrawFn) -> list[bytes]:
    """A byte string split into tokens anywhere, also inside characters; some tokens are empty."""
    text = b"".join(draw(st.lists(raw, max_size=12)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=300)
@given(tokens(), stop_sets)
@example([b"\xf0", b"\x9f", b"\x8c", b"\xb6", b" ok"], ())
@example([b"</", b"do", b"ne>x", b" more"], ("</done>",))
@example([b"</done", b">x"], ("</done>",))
@example([b"\xed", b"\xa0", b"\xf4", b"\x90", b"\xe0\x80"], ())
def test_every_mark_is_that_of_the_definition(parts: list[bytes], stops: tuple[str, ...]) -> None:
    """After every token the bounded state says what the whole text says."""
    boundary, text = Boundary(stops), b""
    for part in parts:
        text += part
        assert boundary.feed(part) == naive(text, len(part), stops)


@settings(max_examples=100)
@given(tokens(), stop_sets, st.data())
def test_the_split_into_tokens_does_not_matter(parts: list[bytes], stops: tuple[str, ...], data: st.DataObject) -> None:
    """Cuttable after a prefix is a property of its text: one token or many give the same state from there on."""
    cut = data.draw(st.integers(0, len(parts)))
    one, many = Boundary(stops), Boundary(stops)
    one.feed(b"".join(parts[:cut]))
    for part in parts[:cut]:
        many.feed(part)
    assert [one.feed(p) for p in parts[cut:]] == [many.feed(p) for p in parts[cut:]]


def test_a_character_of_four_bytes_holds_the_cut_until_it_is_whole() -> None:
    boundary = Boundary()
    assert [boundary.feed(bytes([b])).cuttable for b in "🌶".encode()] == [False, False, False, True]


def test_a_token_with_the_end_of_one_character_and_a_whole_other_is_cuttable() -> None:
    boundary, chili = Boundary(), "🌶".encode()
    assert not boundary.feed(chili[:2]).cuttable
    assert boundary.feed(chili[2:] + "ำ".encode()).cuttable


def test_invalid_bytes_do_not_hold_for_ever() -> None:
    boundary = Boundary()
    assert not boundary.feed(b"\xe0").cuttable
    assert boundary.feed(b"\x80").cuttable
    assert boundary.feed(b"\xff").cuttable


def test_a_stop_string_is_seen_across_tokens_and_inside_one() -> None:
    boundary = Boundary(("</done>",))
    assert [boundary.feed(t) for t in (b"so </", b"do", b"ne>x", b" more")] == [
        Mark(False, False),
        Mark(False, False),
        Mark(True, True),
        Mark(True, False),
    ]


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Boundary(("a", ""))
