"""Digests of chains and the verification of what was read."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies import chain as chains
from policies.calls import CallIdentity
from policies.chain import CHUNK_FIELDS, Chain, ChainDigest, ChainRefusal, chunk_wishes, unread_chain, verify_chain
from policies.errors import (
    KeyCleared,
    KeyCorrupt,
    KeyMissing,
    RegraftError,
    RemoteError,
    RequestTimeout,
    Unreachable,
)
from policies.receipts import Continuation
from tests.generated_tokens import chain, request

OLD = CallIdentity("r0", "c0", 0)
NEW = OLD.next_attempt()
Chunk = dict[str, NDArray[Any]]


def split(whole: Chain, cuts: list[int]) -> list[Chunk]:
    bounds = [0, *sorted(cuts), len(whole)]
    return [{name: getattr(whole, name)[a:b] for name in CHUNK_FIELDS} for a, b in itertools.pairwise(bounds)]


def continuation(whole: Chain, chunks: int, keys: tuple[str, ...] | None = None) -> Continuation:
    keys = keys or tuple(OLD.chunk_key(i) for i in range(chunks))
    return Continuation(request(NEW), keys, len(whole), ChainDigest.of(whole).hexdigest())


def refused(answer: Chain | ChainRefusal) -> str:
    assert isinstance(answer, ChainRefusal), "a chain that is not what was cut was accepted"
    assert answer.cause
    return answer.reason


cut_points = st.lists(st.integers(0, 20), max_size=5)


@given(cut_points)
def test_a_digest_does_not_depend_on_the_split(cuts: list[int]) -> None:
    digest = ChainDigest()
    for part in split(chain(20), cuts):
        digest.update(part)
    assert (digest.hexdigest(), digest.tokens) == (ChainDigest.of(chain(20)).hexdigest(), 20)


@given(st.sampled_from(CHUNK_FIELDS), st.integers(0, 19))
def test_a_digest_covers_every_value_of_every_field(name: str, place: int) -> None:
    other = chain(20)
    getattr(other, name)[place] += 1
    assert ChainDigest.of(other).hexdigest() != ChainDigest.of(chain(20)).hexdigest()


def test_a_copy_goes_on_from_there_on_its_own() -> None:
    first = ChainDigest.of(chain(5))
    twin = first.copy()
    twin.update({name: getattr(chain(3), name) for name in CHUNK_FIELDS})
    assert first.hexdigest() == ChainDigest.of(chain(5)).hexdigest() != twin.hexdigest()


@given(cut_points)
def test_what_was_cut_verifies_however_it_was_split(cuts: list[int]) -> None:
    chunks = split(chain(20), cuts)
    whole = verify_chain(continuation(chain(20), len(chunks)), chunks, 0)
    assert isinstance(whole, Chain)
    assert whole.ids.tolist() == list(range(20))


@given(st.sampled_from(CHUNK_FIELDS), st.integers(0, 19))
def test_one_changed_value_is_refused(name: str, place: int) -> None:
    damaged = chain(20)
    getattr(damaged, name)[place] += 1
    assert refused(verify_chain(continuation(chain(20), 1), split(damaged, []), 5)) == chains.WRONG_DIGEST


def test_a_gap_in_the_indices_is_a_put_that_failed() -> None:
    keys = (OLD.chunk_key(0), OLD.chunk_key(3), NEW.chunk_key(4))
    assert isinstance(verify_chain(continuation(chain(9), 3, keys), split(chain(9), [2, 5]), 0), Chain)


@pytest.mark.parametrize(
    "keys",
    [
        (OLD.chunk_key(1), OLD.chunk_key(0)),
        (OLD.chunk_key(0), OLD.chunk_key(0)),
        (NEW.chunk_key(0), OLD.chunk_key(1)),
        (OLD.chunk_key(0), CallIdentity("r0", "c1").chunk_key(1)),
        (OLD.chunk_key(0), NEW.next_attempt().chunk_key(1)),
        (OLD.chunk_key(0), f"{OLD}#x"),
        (OLD.chunk_key(0), "nonsense"),
    ],
)
def test_keys_of_another_call_or_out_of_order_are_refused(keys: tuple[str, ...]) -> None:
    asked = continuation(chain(4), 2, keys)
    assert refused(verify_chain(asked, split(chain(4), [2]), 0)) == chains.WRONG_IDENTITY


def test_every_other_disagreement_has_its_reason() -> None:
    whole, two = chain(4), split(chain(4), [2])
    short = [two[0], {**two[1], "logprobs": two[1]["logprobs"][:1]}]
    wide = [two[0], {**two[1], "ids": two[1]["ids"].astype(np.int64)}]
    lost = [two[0], {k: v for k, v in two[1].items() if k != "versions"}]
    asked = continuation(whole, 2)
    falling = Chain(whole.ids, whole.logprobs, np.array([1, 1, 0, 0], np.int32))
    assert refused(verify_chain(Continuation(request(NEW), (), 0, ""), [], 0)) == chains.NO_CHAIN
    assert refused(verify_chain(asked, two[:1], 0)) == chains.WRONG_COUNT
    assert refused(verify_chain(continuation(chain(5), 2), two, 0)) == chains.WRONG_COUNT
    assert refused(verify_chain(asked, short, 0)) == chains.LENGTHS_DISAGREE
    assert refused(verify_chain(asked, wide, 0)) == chains.WRONG_FIELDS
    assert refused(verify_chain(asked, lost, 0)) == chains.WRONG_FIELDS
    assert refused(verify_chain(continuation(falling, 2), split(falling, [2]), 5)) == chains.VERSIONS_DECREASE
    newer = chain(4, version=6)
    assert refused(verify_chain(continuation(newer, 2), split(newer, [2]), 5)) == chains.VERSION_TOO_NEW
    assert isinstance(verify_chain(continuation(newer, 2), split(newer, [2]), 6), Chain)


def routed(whole: Chain, cuts: list[int]) -> tuple[Continuation, list[Chunk]]:
    chunks = split(whole, cuts)
    for chunk, first in zip(chunks, [0, *sorted(cuts)], strict=True):
        chunk["routes"] = whole.extras["routes"][first : first + len(chunk["ids"])]
    return dataclasses.replace(continuation(whole, len(chunks)), extras=("routes",)), chunks


@given(cut_points)
def test_extras_are_joined_however_they_were_split(cuts: list[int]) -> None:
    asked, chunks = routed(chain(20, layers=3), cuts)
    whole = verify_chain(asked, chunks, 0)
    assert isinstance(whole, Chain)
    assert whole.extras["routes"].tobytes() == chain(20, layers=3).extras["routes"].tobytes()


@given(st.integers(0, 19), st.integers(0, 2), st.integers(0, 1))
def test_one_changed_value_of_an_extra_is_refused(place: int, layer: int, expert: int) -> None:
    asked, chunks = routed(chain(20, layers=3), [])
    chunks[0]["routes"][place, layer, expert] ^= 1
    assert refused(verify_chain(asked, chunks, 0)) == chains.WRONG_DIGEST


def test_extras_that_are_gone_or_of_another_layout_are_refused() -> None:
    asked, chunks = routed(chain(20, layers=3), [10])
    reshaped = chunks[1]["routes"].reshape(10, 2, 3)
    for routes in (None, reshaped, reshaped.astype(np.uint8), np.array(3)):
        other = {**chunks[1], "routes": routes} if routes is not None else split(chain(20), [10])[1]
        assert refused(verify_chain(asked, [chunks[0], other], 0)) == chains.WRONG_FIELDS
    short = {**chunks[1], "routes": chunks[1]["routes"][:9]}
    assert refused(verify_chain(asked, [chunks[0], short], 0)) == chains.LENGTHS_DISAGREE
    both = [{**chunk, "routes": chunk["routes"].reshape(10, 2, 3)} for chunk in chunks]
    assert refused(verify_chain(asked, both, 0)) == chains.WRONG_DIGEST, "the same bytes in another shape"
    bare = dataclasses.replace(asked, extras=())
    assert refused(verify_chain(bare, chunks, 0)) == chains.WRONG_DIGEST, "a chain that lost its extras"


def test_a_digest_takes_extras_of_one_layout() -> None:
    digest, run = ChainDigest(), chain(4, layers=2)
    digest.update({name: getattr(run, name) for name in CHUNK_FIELDS} | {"routes": run.extras["routes"]})
    with pytest.raises(ValueError, match="extras of a chain changed"):
        digest.update({name: getattr(run, name) for name in CHUNK_FIELDS})
    with pytest.raises(ValueError, match="different lengths"):
        digest.update({**{name: getattr(run, name) for name in CHUNK_FIELDS}, "routes": run.extras["routes"][:3]})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyMissing("m"), chains.CHUNK_MISSING),
        (KeyCleared("m"), chains.CHUNK_CLEARED),
        (KeyCorrupt("m"), chains.CHUNK_CORRUPT),
        (Unreachable("m"), chains.CHUNK_UNREACHABLE),
        (RequestTimeout("m"), chains.CHUNK_UNREACHABLE),
        (RemoteError("m"), chains.CHUNK_UNREADABLE),
    ],
)
def test_a_chunk_that_could_not_be_read_is_a_refusal_with_its_reason(error: RegraftError, reason: str) -> None:
    refusal = unread_chain(error)
    assert refusal.reason == reason and type(error).__name__ in refusal.cause


def test_chunks_are_wished_for_with_their_sizes_and_the_head_of_a_longer_chain_will_be_wanted_again() -> None:
    wishes = chunk_wishes(continuation(chain(10), 3))
    assert [(wish.tokens, wish.nbytes, wish.again) for wish in wishes] == [
        (4, 48, True),
        (4, 48, False),
        (4, 48, False),
    ]
    assert [wish.again for wish in chunk_wishes(continuation(chain(10), 1))] == [False]
    assert chunk_wishes(Continuation(request(NEW), (), 0, "")) == ()
