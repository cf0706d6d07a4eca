"""The torch engine: what a call gets does not depend on its neighbours, nor on whether it was cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engines.contract import Engine
from actors.engines.registry import EngineSpec, build_engine
from policies.calls import CallIdentity, GenerationRequest, Tokens
from policies.errors import EngineError
from tests.engine_runs import Life, alone, collect, first, identical, joined, request, rest, resumed, run


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineSpec("tiny", {"rows": 4, "max_context": 512}))


@pytest.fixture(autouse=True)
def nothing_left(engine: Engine) -> None:
    assert engine.unfinished == 0


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, GenerationRequest]]:
    """Calls with the step in which each joins: more of them than rows, at times."""
    calls = []
    for name in range(draw(st.integers(2, 7))):
        prompt = draw(st.lists(st.integers(0, 257), min_size=1, max_size=20))
        sampling = draw(st.sampled_from([(0.0, 1.0), (1.0, 1.0), (0.7, 0.9)]))
        asked = request(str(name), prompt, draw(st.integers(1, 20)), seed=draw(st.integers(0, 99)))
        calls.append((draw(st.integers(0, 12)), _with_sampling(asked, *sampling)))
    return calls


def _with_sampling(asked: GenerationRequest, temperature: float, top_p: float) -> GenerationRequest:
    return request(
        asked.identity.call_id,
        asked.prompt_ids,
        asked.max_tokens,
        seed=asked.seed,
        temperature=temperature,
        top_p=top_p,
    )


@settings(max_examples=25, deadline=None)
@given(batches())
def test_a_call_is_bitwise_independent_of_its_batch(engine: Engine, calls: list[tuple[int, GenerationRequest]]) -> None:
    """Ids, logprobs and cut places of each call alone equal those among others, whenever they all joined."""
    lives: dict[CallIdentity, Life] = {}
    for step in range(13):
        for _, asked in (c for c in calls if c[0] == step):
            engine.start(asked)
        collect(engine, lives, steps=1)
    collect(engine, lives)
    for _, asked in calls:
        by_itself = alone(engine, asked)
        assert identical(by_itself.tokens, lives[asked.identity].tokens)
        assert by_itself.finish == lives[asked.identity].finish


def test_an_exact_resume_is_bit_identical_at_every_place(engine: Engine) -> None:
    """Cut after any number of tokens, also inside characters, and resumed: the rest is the rest of the uncut call."""
    asked = request("a", max_tokens=60, seed=5)
    uncut = alone(engine, asked)
    assert not uncut.tokens.cuttable.all(), "the example should have characters of several bytes"
    for place in range(1, len(uncut.ids)):
        again = resumed(engine, asked, first(uncut.tokens, place))
        assert identical(again.tokens, rest(uncut.tokens, place)), place
        assert again.finish == uncut.finish
        assert engine.decode([*uncut.ids[:place], *again.ids]) == engine.decode(uncut.ids)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 7), st.lists(st.integers(0, 25), min_size=1, max_size=3))
def test_calls_cut_and_resumed_together_end_as_uncut(engine: Engine, count: int, lives_of: list[int]) -> None:
    """All calls stop after some steps and go on in a next life, one to three times; some never got a row before."""
    asked = [request(str(i), (256,) * (1 + 3 * i), 40, seed=i) for i in range(count)]
    lives = {a.identity: Life() for a in asked}
    for steps in [*lives_of, None]:
        living = [a for a in asked if lives[a.identity].finish is None]
        for a in living:
            parts = lives[a.identity].parts
            engine.start(a, joined(parts) if parts else None)
        collect(engine, lives, steps)
        for a in living:
            assert engine.abort(a.identity) == (lives[a.identity].finish is None)
    for a in asked:
        assert identical(lives[a.identity].tokens, alone(engine, a).tokens)


def test_a_fast_resume_gives_the_same_tokens_and_close_logprobs(engine: Engine) -> None:
    asked = request("a", tuple(range(65, 105)), 40, seed=3)
    uncut = alone(engine, asked)
    for place in (1, 7, 20, 39):
        again = resumed(engine, asked, first(uncut.tokens, place), "fast")
        assert again.ids == uncut.ids[place:]
        assert np.abs(again.tokens.logprobs - uncut.tokens.logprobs[place:]).max() <= 1e-3


def test_a_fast_resume_leaves_its_neighbours_as_they_were(engine: Engine) -> None:
    cut, other = request("a", max_tokens=30, seed=3), request("b", max_tokens=30, seed=4)
    before, expected = alone(engine, cut), alone(engine, other)
    lives: dict[CallIdentity, Life] = {}
    engine.start(other)
    collect(engine, lives, steps=5)
    engine.start(cut, first(before.tokens, 10), "fast")
    collect(engine, lives)
    assert identical(lives[other.identity].tokens, expected.tokens)


def test_a_fast_resume_samples_in_its_first_step_and_an_exact_one_replays(engine: Engine) -> None:
    """41 known positions: one pass, or 11 tiles of 4 rows."""
    asked = request("a", (65,) * 31, 40, seed=3)
    prefix = first(alone(engine, asked).tokens, 10)
    for resume, steps in (("fast", 1), ("exact", 11)):
        engine.start(asked, prefix, resume)  # type: ignore[arg-type]
        assert [len(engine.step().calls) for _ in range(steps)] == [0] * (steps - 1) + [1]
        assert engine.abort(asked.identity)


def test_fast_without_a_prefix_is_exact(engine: Engine) -> None:
    """A call that is generated anew must equal its first life."""
    asked = request("a", seed=3)
    lives: dict[CallIdentity, Life] = {}
    engine.start(asked, None, "fast")
    collect(engine, lives)
    assert identical(lives[asked.identity].tokens, alone(engine, asked).tokens)


def test_an_empty_prefix_is_no_prefix(engine: Engine) -> None:
    asked = request("a", seed=3)
    uncut = alone(engine, asked)
    assert identical(resumed(engine, asked, first(uncut.tokens, 0), "fast").tokens, uncut.tokens)


def test_a_stop_string_is_found_wherever_the_call_was_cut(engine: Engine) -> None:
    """Half of the stop string before the cut still counts, and the call stops at the same token."""
    free = alone(engine, request("a", max_tokens=60, seed=5))
    at = next(i for i in range(20, 58) if all(b < 128 for b in free.ids[i : i + 3]))
    asked = request("a", max_tokens=60, seed=5, stop=(engine.decode(free.ids[at : at + 3]),))
    uncut = alone(engine, asked)
    assert uncut.finish == "stop"
    assert uncut.ids == free.ids[: at + 3]
    assert not uncut.tokens.cuttable[at] and not uncut.tokens.cuttable[at + 1] and uncut.tokens.cuttable[at + 2]
    for place in range(1, len(uncut.ids)):
        again = resumed(engine, asked, first(uncut.tokens, place))
        assert (again.ids, again.finish) == (uncut.ids[place:], "stop")


def test_max_tokens_counts_the_prefix(engine: Engine) -> None:
    asked = request("a", max_tokens=31, seed=1)
    uncut = alone(engine, asked)
    assert (len(uncut.ids), uncut.finish) == (31, "length")
    assert len(resumed(engine, asked, first(uncut.tokens, 30)).ids) == 1


def test_a_prefix_at_its_limit_is_refused(engine: Engine) -> None:
    asked = request("a", max_tokens=12, seed=1)
    uncut = alone(engine, asked)
    with pytest.raises(EngineError, match=r"12 tokens.*'length'"):
        engine.start(asked, uncut.tokens)
    assert engine.unfinished == 0


def test_calls_beyond_the_rows_wait_in_order(engine: Engine) -> None:
    """Of 7 calls on 4 rows, 4 are active; the others begin in the order in which they came."""
    for i in range(7):
        engine.start(request(str(i), (256,), 5, seed=i, min_tokens=5))
    seen: list[str] = []
    while engine.unfinished:
        delta = engine.step()
        assert len(delta.calls) <= 4
        seen += [c.call_id for c in delta.calls if c.call_id not in seen]
    assert seen == [str(i) for i in range(7)]


def test_filling_a_long_prompt_takes_no_step_from_calls_that_decode(engine: Engine) -> None:
    """The decoding calls get a token in every step, and the long prompt is filled with the rows they leave."""
    short = [request(str(i), (256,), 60, seed=i, min_tokens=60) for i in range(3)]
    for asked in short:
        engine.start(asked)
    engine.step()
    engine.start(request("long", (65,) * 40, 1))
    for step in range(40):
        calls = {c.call_id for c in engine.step().calls}
        assert calls == {"0", "1", "2"} if step < 39 else calls == {"0", "1", "2", "long"}
    for asked in short:
        assert engine.abort(asked.identity)


def test_abort_forgets_active_and_waiting_calls_only(engine: Engine) -> None:
    asked = [request(str(i), max_tokens=8, seed=i, min_tokens=8) for i in range(6)]
    for a in asked:
        engine.start(a)
    lives: dict[CallIdentity, Life] = {}
    collect(engine, lives, steps=4)
    assert engine.abort(asked[0].identity) and engine.abort(asked[5].identity)
    assert not engine.abort(asked[0].identity)
    assert not engine.abort(CallIdentity("r", "never"))
    before = len(lives[asked[0].identity].parts)
    collect(engine, lives)
    assert len(lives[asked[0].identity].parts) == before
    assert asked[5].identity not in lives
    assert {lives[a.identity].finish for a in asked[1:5]} == {"length"}
    engine.start(asked[0])
    assert engine.abort(asked[0].identity)


def test_each_token_carries_the_version_that_made_it(engine: Engine) -> None:
    asked = request("a", (256,), 6, seed=2, min_tokens=6)
    engine.start(asked)
    lives: dict[CallIdentity, Life] = {}
    for version in (3, 7):
        engine.weight_version = version
        collect(engine, lives, steps=3)
    engine.weight_version = 0
    assert lives[asked.identity].tokens.versions.tolist() == [3, 3, 3, 7, 7, 7]


def test_step_without_calls_reports_nothing(engine: Engine) -> None:
    delta = engine.step()
    assert (delta.calls, delta.tokens, dict(delta.finished)) == ((), (), {})


def test_context_limit_is_said_with_numbers(engine: Engine) -> None:
    with pytest.raises(EngineError, match=r"513 positions \(500 prompt \+ 13 max_tokens\).*512"):
        engine.start(request("a", (65,) * 500, 13))
    engine.start(request("a", (65,) * 500, 12))
    assert engine.abort(CallIdentity("r", "a"))


def test_an_active_identity_is_refused_and_its_next_attempt_is_not(engine: Engine) -> None:
    asked = request("a")
    engine.start(asked)
    with pytest.raises(EngineError, match="r/a@a0 is already active"):
        engine.start(asked)
    following = GenerationRequest(asked.identity.next_attempt(), asked.prompt_ids, asked.max_tokens)
    engine.start(following)
    assert engine.abort(asked.identity) and engine.abort(following.identity)


@pytest.mark.parametrize("bad", [-1, 258])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, bad: int) -> None:
    """Placeholders (-1) included, in prompts and in prefixes."""
    with pytest.raises(EngineError, match=rf"prompt of call r/a@a0: token id {bad} at index 1 .*0\.\.257"):
        engine.start(request("a", (65, bad)))
    prefix = Tokens(
        np.array([65, 66, bad], np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), np.ones(3, np.bool_)
    )
    with pytest.raises(EngineError, match=rf"prefix of call r/a@a0: token id {bad} at index 2"):
        engine.start(request("a"), prefix)
    assert engine.unfinished == 0


def test_results_do_not_depend_on_where_a_call_sits_among_many(engine: Engine) -> None:
    """The same call first, last and queued behind others."""
    asked = request("x", max_tokens=15, seed=8)
    expected = alone(engine, asked).tokens
    others = [request(str(i), (65 + i, 66), 10 + i, seed=i) for i in range(6)]
    for place in (0, 3, 6):
        lives = run(engine, [*others[:place], asked, *others[place:]])
        assert identical(lives[asked.identity].tokens, expected)
