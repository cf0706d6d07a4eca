"""When a call of the torch engine ends and where it may be cut, with logits that force a given token stream."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.active_call import ActiveCall
from actors.engines.vocabulary import Vocabulary
from policies.calls import Tokens
from policies.counter_random import uniform
from policies.errors import EngineError
from tests.engine_runs import first, joined, request

CHILI = "🌶".encode()
WORDS = (
    b"",
    b"Hello",
    b" ok",
    b"</",
    b"do",
    b"ne>",
    b"ne>x",
    b" more",
    *(bytes([b]) for b in CHILI),
    CHILI[2:] + "ำ".encode(),
)
END, OK, MORE = 0, 2, 7
VOCABULARY = Vocabulary(WORDS, (END,), lambda text: (1,))


def say(call: ActiveCall, script: list[int]) -> list[Tokens]:
    """Sample the tokens of ``script`` one after the other, until the call ends."""
    made = []
    for token in script:
        logits = np.zeros(len(WORDS), np.float32)
        logits[token] = 50
        made.append(call.sample(logits, version=1))
        if call.finish_reason is not None:
            break
    return made


def cut_and_resumed(script: list[int], place: int, **limits: object) -> tuple[list[int], str | None]:
    """Ids and finish reason of the script when the call was cut after ``place`` tokens."""
    asked = request("a", (1,), **limits)  # type: ignore[arg-type]
    prefix = joined(say(ActiveCall(asked, None, VOCABULARY, False), script[:place]))
    call = ActiveCall(asked, prefix, VOCABULARY, False)
    made = joined(say(call, script[place:]))
    return [*prefix.ids.tolist(), *made.ids.tolist()], call.finish_reason


@pytest.mark.parametrize("end", [5, 6])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_stop_string_that_spans_the_cut_stops_the_call(end: int, place: int) -> None:
    """``</ do ne> more``, and with a token that holds more than the end of the stop string: all of it is kept."""
    ids, reason = cut_and_resumed([OK, 3, 4, end, MORE], place, stop=("</done>",))
    assert (ids, reason) == ([OK, 3, 4, end], "stop")


def test_the_text_may_not_be_cut_where_a_stop_string_may_be_starting() -> None:
    made = joined(say(ActiveCall(request("a", (1,), stop=("</done>",)), None, VOCABULARY, False), [OK, 3, 4, MORE]))
    assert made.cuttable.tolist() == [True, False, False, True]


@pytest.mark.parametrize("place", range(1, 7))
def test_a_cut_inside_a_character_changes_nothing(place: int) -> None:
    """Four bytes of one character one per token, then the end of one together with the whole of another."""
    script = [8, 9, 10, 11, 8, 9, 12]
    ids, reason = cut_and_resumed(script, place, max_tokens=7)
    assert (ids, reason) == (script, "length")
    assert VOCABULARY.decode(ids) == "🌶🌶ำ"
    uncut = joined(say(ActiveCall(request("a", (1,), max_tokens=7), None, VOCABULARY, False), script))
    assert uncut.cuttable.tolist() == [False, False, False, True, False, False, True]


def test_the_end_of_a_finished_call_is_cuttable_even_inside_a_character() -> None:
    made = joined(say(ActiveCall(request("a", (1,), max_tokens=2), None, VOCABULARY, False), [OK, 8]))
    assert made.cuttable.tolist() == [True, True]


@pytest.mark.parametrize("place", [25, 30])
def test_a_budget_of_40_over_two_lives_ends_at_the_end_token(place: int) -> None:
    """30 tokens and then an end token: 31 in all, reason ``stop``, whichever life made which."""
    ids, reason = cut_and_resumed([OK] * 30 + [END], place, max_tokens=40)
    assert (len(ids), reason) == (31, "stop")


def test_a_resumed_call_gets_only_what_is_left_of_its_budget() -> None:
    ids, reason = cut_and_resumed([OK] * 50, 20, max_tokens=32)
    assert (len(ids), reason) == (32, "length")
    with pytest.raises(EngineError, match=r"32 tokens.*'length'"):
        cut_and_resumed([OK] * 50, 32, max_tokens=32)


@settings(max_examples=60)
@given(st.integers(0, 6), st.integers(0, 8))
def test_min_tokens_bans_end_tokens_and_counts_the_prefix(min_tokens: int, place: int) -> None:
    """A call that wants to end at once ends exactly one token after its minimum, whenever it was cut."""
    asked = request("a", (1,), max_tokens=10, min_tokens=min_tokens)
    call = ActiveCall(asked, None, VOCABULARY, False)
    made = joined(say(call, [END] * 10))
    assert (len(made), call.finish_reason) == (min_tokens + 1, "stop")
    if place < len(made):
        again = ActiveCall(asked, first(made, place), VOCABULARY, False)
        assert len(say(again, [END] * 10)) == len(made) - place


def test_a_stop_string_before_min_tokens_is_passed_over() -> None:
    call = ActiveCall(request("a", (1,), min_tokens=4, stop=("ok",)), None, VOCABULARY, False)
    assert len(say(call, [OK, OK, MORE, MORE, MORE, OK, MORE])) == 6
    assert call.finish_reason == "stop"


def test_the_logprob_counts_banned_tokens() -> None:
    """It describes the model: an end token with half of the mass halves the others also while it is banned."""
    logits = np.full(len(WORDS), -100, np.float32)
    logits[[END, OK]] = 3
    made = ActiveCall(request("a", (1,), min_tokens=1), None, VOCABULARY, False).sample(logits, 1)
    assert made.ids.tolist() == [OK]
    assert made.logprobs[0] == pytest.approx(np.log(0.5), abs=1e-6)


@pytest.mark.parametrize("script", [[OK, END], [3, 4, 5]])
def test_a_prefix_that_has_ended_is_refused(script: list[int]) -> None:
    count = len(script)
    prefix = Tokens(
        np.array([*script, OK], np.int32), np.zeros(count + 1, np.float32), np.zeros(count + 1, np.int32),
        np.ones(count + 1, np.bool_),
    )  # fmt: skip
    with pytest.raises(EngineError, match=rf"'stop' at token {count} "):
        ActiveCall(request("a", (1,), stop=("</done>",)), prefix, VOCABULARY, False)


@settings(max_examples=30)
@given(st.integers(0, 1 << 64), st.integers(1, 30), st.integers(0, 5))
def test_the_chance_at_a_position_depends_on_seed_and_position(seed: int, prompt: int, place: int) -> None:
    """Equal logits turn the chance into an id: position counts generated tokens, neither prompt nor life matters."""
    asked = request("a", (1,) * prompt, 6, seed=seed, min_tokens=6)
    flat = np.zeros(len(WORDS), np.float32)
    flat[END] = -np.inf
    call = ActiveCall(asked, None, VOCABULARY, False)
    made = joined([call.sample(flat, 1) for _ in range(6)])
    expected = [1 + int(uniform(seed, position) * (len(WORDS) - 1)) for position in range(6)]
    assert made.ids.tolist() == expected
    again = ActiveCall(asked, first(made, place), VOCABULARY, False)
    assert [int(again.sample(flat, 1).ids[0]) for _ in range(6 - place)] == expected[place:]


def test_types_and_lengths_of_a_token_are_those_of_the_contract() -> None:
    made = say(ActiveCall(request("a", (1,)), None, VOCABULARY, False), [OK])[0]
    columns = (made.ids, made.logprobs, made.versions, made.cuttable)
    assert [c.dtype for c in columns] == [np.int32, np.float32, np.int32, np.bool_]
    assert [c.shape for c in columns] == [(1,)] * 4


@pytest.mark.parametrize(("limits", "said"), [({"seed": -1}, "seed -1"), ({"stop": ("",)}, "stop string is empty")])
def test_impossible_requests_are_engine_errors(limits: dict[str, object], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        ActiveCall(request("a", (1,), **limits), None, VOCABULARY, False)  # type: ignore[arg-type]
