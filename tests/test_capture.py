"""The state of a call: what it holds, and how that may change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.calls import CallIdentity, Tokens
from policies.capture import CallCapture, State
from policies.chain import CHUNK_FIELDS, Chain, ChainDigest
from policies.chunks import Frozen
from tests.generated_tokens import chain, tokens

CALL = CallIdentity("r0", "c0")


class OneCall(RuleBasedStateMachine):
    """Sealed chunks and the next chunk, joined, are a prefix of exactly what the engine produced (invariant 7), and end
    only where the text may be cut (invariant 8)."""

    @initialize(adopted=st.integers(0, 5), layers=st.integers(0, 2))
    def start(self, adopted: int, layers: int) -> None:
        self.layers = layers
        self.capture = CallCapture(CALL.next_attempt())
        self.flags = [True] * adopted
        self.sealed = list(range(adopted))
        self.frozen: Frozen | None = None
        if adopted:
            self.capture.adopt((CALL.chunk_key(0), CALL.chunk_key(2)), chain(adopted, layers=layers))

    @precondition(lambda self: self.capture.finish_reason is None)
    @rule(flags=st.lists(st.booleans(), max_size=100))
    def observe(self, flags: list[bool]) -> None:
        self.capture.observe(tokens(len(self.flags), len(flags), cuttable=flags, layers=self.layers))
        self.flags += flags

    @rule()
    def end(self) -> None:
        self.capture.end("stop")

    @precondition(lambda self: self.frozen is None)
    @rule()
    def freeze(self) -> None:
        self.frozen = self.capture.freeze() if self.capture.cuttable_tokens else None
        end = len(self.sealed) + (self.frozen.tokens if self.frozen else 0)
        cuttable = [i + 1 for i, flag in enumerate(self.flags) if flag and i >= len(self.sealed)]
        whole = self.capture.finish_reason is not None
        assert end == (len(self.flags) if whole else max(cuttable, default=len(self.sealed)))
        assert self.frozen is None or self.frozen.start == len(self.sealed)

    @precondition(lambda self: self.frozen is not None)
    @rule()
    def seal(self) -> None:
        assert self.frozen is not None
        self.sealed += self.frozen.parts["ids"].tolist()
        if self.layers:
            assert self.frozen.parts["routes"][:, -1, 1].tolist() == self.frozen.parts["ids"].tolist()
        self.capture.seal(self.frozen, self.capture.new_key(), self.frozen.digest())
        self.frozen = None

    @precondition(lambda self: self.frozen is not None)
    @rule()
    def roll_back(self) -> None:
        assert self.frozen is not None
        self.capture.roll_back(self.frozen)
        self.frozen = None

    @invariant()
    def nothing_lost_or_doubled(self) -> None:
        assert self.sealed == list(range(len(self.sealed)))
        assert self.capture.sealed_tokens + self.capture.live_tokens == len(self.flags)
        assert self.capture.digest() == ChainDigest.of(chain(len(self.sealed), layers=self.layers)).hexdigest()
        assert len(set(self.capture.keys)) == len(self.capture.keys)

    def teardown(self) -> None:
        if not hasattr(self, "capture"):
            return
        if self.frozen is not None:
            self.capture.roll_back(self.frozen)
        evidence = self.capture.finish("stop")
        whole = chain(len(self.flags), layers=self.layers)
        assert (evidence.tokens, evidence.digest) == (len(self.flags), ChainDigest.of(whole).hexdigest())


TestOneCall = OneCall.TestCase


def bad_deltas() -> dict[str, Tokens]:
    good = tokens(0, 3)
    return {
        "logprobs shorter": replace(good, logprobs=good.logprobs[:2]),
        "cuttable longer": replace(good, cuttable=np.ones(4, bool)),
        "placeholder id": replace(good, ids=np.array([11, 12, -1], np.int32)),
        "id outside the vocabulary": replace(good, ids=np.array([11, 12, 100], np.int32)),
        "ids that are no integers": replace(good, ids=np.zeros(3, np.float32)),
        "two dimensions": replace(good, ids=np.zeros((3, 1), np.int32)),
        "versions decrease": replace(good, versions=np.array([1, 1, 0], np.int32)),
        "routes of the whole call": replace(good, extras={"routes": np.zeros((5, 2, 2), np.int16)}),
        "routes without the last token's": replace(good, extras={"routes": np.zeros((2, 2, 2), np.int16)}),
        "routes from now on": replace(good, extras={"routes": np.zeros((3, 2, 2), np.int16)}),
        "an extra of objects": replace(good, extras={"routes": np.array([None] * 3)}),
        "an extra without a token dimension": replace(good, extras={"routes": np.array(3)}),
        "an extra named like a field": replace(good, extras={"ids": np.zeros(3, np.int32)}),
    }


@pytest.mark.parametrize("name", bad_deltas())
@pytest.mark.parametrize("frozen", [False, True])
def test_a_delta_that_makes_no_sense_poisons_its_call(name: str, frozen: bool) -> None:
    capture = CallCapture(CALL, vocab_size=100)
    capture.observe(tokens(0, 2))
    chunk = capture.freeze() if frozen else None
    capture.observe(bad_deltas()[name])
    assert capture.state is State.POISONED and capture.cause
    assert chunk is None or not capture.holds(chunk)
    capture.observe(tokens(2, 2))
    with pytest.raises(ValueError, match="cannot freeze"):
        capture.freeze()


def test_a_call_with_nothing_cuttable_is_not_frozen() -> None:
    capture = CallCapture(CALL)
    capture.observe(tokens(0, 2, cuttable=False))
    assert capture.cuttable_tokens == 0
    with pytest.raises(ValueError, match="nothing that could be cut"):
        capture.freeze()
    assert capture.state is State.LIVE


def test_tokens_after_the_end_poison() -> None:
    capture = CallCapture(CALL)
    capture.observe(tokens(0, 2))
    capture.end("length")
    capture.observe(tokens(2, 0))
    assert capture.state is State.LIVE
    capture.observe(tokens(2, 1))
    assert capture.state is State.POISONED


@pytest.mark.parametrize("reason", ["abort", "error", ""])
def test_an_odd_end_is_no_completion(reason: str) -> None:
    """The engine aborts a call that was to be kept: it is no complete answer, and its tail stays live."""
    capture = CallCapture(CALL)
    capture.observe(tokens(0, 2, cuttable=[True, False]))
    assert not capture.end(reason)
    assert capture.finish_reason is None and capture.cause
    assert capture.freeze().tokens == 1


def test_what_was_handed_out_does_not_change_when_more_is_generated() -> None:
    capture = CallCapture(CALL)
    capture.observe(tokens(0, 3))
    frozen = capture.freeze()
    for place in range(3, 500):
        capture.observe(tokens(place, 1))
    assert frozen.parts["ids"].tolist() == [0, 1, 2]
    capture.seal(frozen, capture.new_key(), frozen.digest())
    assert frozen.parts["ids"].tolist() == [0, 1, 2]


def test_a_key_is_never_given_twice() -> None:
    capture = CallCapture(CALL.next_attempt())
    capture.adopt((CALL.chunk_key(0), CALL.chunk_key(4)), chain(3))
    assert [capture.new_key() for _ in range(3)] == [CALL.next_attempt().chunk_key(i) for i in (5, 6, 7)]


@pytest.mark.parametrize("keys", [(), ("r0/c0@a0#x",), ("r0/c1@a0#0",)])
def test_only_keys_of_the_call_are_adopted(keys: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="no chain"):
        CallCapture(CALL).adopt(keys, chain(3))


def test_a_chunk_is_sealed_once_and_only_while_it_is_frozen() -> None:
    capture = CallCapture(CALL)
    capture.observe(tokens(0, 3))
    first = capture.freeze()
    capture.roll_back(first)
    again = capture.freeze()
    for stale in (first, Frozen(CALL, 0, again.parts, (), ChainDigest())):
        with pytest.raises(ValueError, match="not frozen with the chunk"):
            capture.seal(stale, "k", stale.digest())
    capture.seal(again, capture.new_key(), again.digest())
    with pytest.raises(ValueError, match="not frozen with the chunk"):
        capture.seal(again, "k", again.digest())


@pytest.mark.parametrize(
    ("before", "after"), [(2, 0), (0, 2), (2, 3)], ids=["routes are gone", "routes are new", "another model"]
)
@pytest.mark.parametrize("adopted", [False, True])
def test_a_call_whose_extras_change_is_poisoned(before: int, after: int, adopted: bool) -> None:
    capture = CallCapture(CALL.next_attempt())
    if adopted:
        capture.adopt((CALL.chunk_key(0),), chain(3, layers=before))
    else:
        capture.observe(tokens(0, 3, layers=before))
    capture.observe(tokens(3, 1, layers=after))
    assert capture.state is State.POISONED and "extras changed" in capture.cause


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "bool"])
@pytest.mark.parametrize("trailing", [(), (8,), (48, 8), (2, 3, 4), (0,)])
def test_extras_may_have_any_trailing_shape(dtype: str, trailing: tuple[int, ...]) -> None:
    capture = CallCapture(CALL)
    made = np.arange(7 * max(1, int(np.prod(trailing)))).astype(dtype)
    made = np.resize(made, (7, *trailing))
    for start, count in ((0, 3), (3, 0), (3, 4)):
        run = tokens(start, count)
        capture.observe(replace(run, extras={"x": made[start : start + count]}))
    frozen = capture.freeze()
    assert frozen.parts["x"].dtype == dtype and np.array_equal(frozen.parts["x"], made)
    assert frozen.nbytes == sum(array.nbytes for array in frozen.parts.values())
    capture.seal(frozen, capture.new_key(), frozen.digest())
    assert capture.extras == ("x",)


def test_an_adopted_chain_with_a_newer_version_than_the_next_token_poisons() -> None:
    capture = CallCapture(CALL)
    capture.adopt((CALL.chunk_key(0),), Chain(*(getattr(chain(3, version=4), name) for name in CHUNK_FIELDS)))
    capture.observe(tokens(3, 1, version=3))
    assert capture.state is State.POISONED
