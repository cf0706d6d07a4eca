"""Temperature, top-p and the draw, against definitions written out in full."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from policies.sampling_rule import draw, nucleus

logits_of = hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(-8, 8, width=32).map(lambda x: round(x, 1)))
chances = st.floats(0, 1, exclude_max=True)
temperatures = st.sampled_from([0.3, 0.7, 1.0, 1.7])
top_ps = st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0])


def naive_nucleus(weights: NDArray[np.float32], top_p: float) -> list[int]:
    """Most likely first, ties by lower id, until the mass is reached."""
    order = sorted(range(len(weights)), key=lambda i: (-float(weights[i]), i))
    total, mass, chosen = sum(float(w) for w in weights), 0.0, []
    for token in order:
        chosen.append(token)
        mass += float(weights[token])
        if mass >= top_p * total * (1 - 1e-12):
            break
    return sorted(chosen)


@settings(max_examples=150)
@given(logits_of, top_ps)
def test_nucleus_is_the_smallest_set_of_most_likely_tokens(logits: NDArray[np.float32], top_p: float) -> None:
    """Same set as the definition, up to one token at a mass that rounding puts on either side of the limit."""
    weights = np.exp(logits - logits.max())
    got, expected = set(nucleus(weights, top_p).tolist()), set(naive_nucleus(weights, top_p))
    assert got == expected or (len(got ^ expected) == 1 and abs(_mass(weights, got & expected) - top_p) < 1e-9)


def _mass(weights: NDArray[np.float32], ids: set[int]) -> float:
    return float(weights[sorted(ids)].sum(dtype=np.float64) / weights.sum(dtype=np.float64))


@settings(max_examples=150)
@given(logits_of, chances, temperatures, top_ps)
def test_draw_inverts_the_distribution_in_id_order(
    logits: NDArray[np.float32], chance: float, temperature: float, top_p: float
) -> None:
    """The drawn token is in the nucleus, and the mass of the nucleus before and through it encloses the chance."""
    token = draw(logits, chance, temperature, top_p).token
    weights = np.exp((logits - logits.max()) / np.float32(temperature)).astype(np.float64)
    ids = nucleus(weights.astype(np.float32), top_p) if top_p < 1 else np.arange(len(logits))
    assert token in ids
    total = weights[ids].sum()
    before, through = weights[ids[ids < token]].sum() / total, weights[ids[ids <= token]].sum() / total
    assert before - 1e-6 <= chance <= through + 1e-6


@settings(max_examples=80)
@given(logits_of, chances, temperatures, top_ps)
def test_logprob_is_the_raw_log_softmax(
    logits: NDArray[np.float32], chance: float, temperature: float, top_p: float
) -> None:
    """Neither temperature nor top-p nor a ban enters the logprob, and it is a float32."""
    drawn = draw(logits, chance, temperature, top_p)
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert drawn.logprob == pytest.approx(exact[drawn.token], abs=1e-5)
    assert np.float32(drawn.logprob) == drawn.logprob


@settings(max_examples=80)
@given(logits_of, chances, st.sampled_from([0.0, 1.0]), top_ps, st.data())
def test_banned_tokens_are_never_drawn(
    logits: NDArray[np.float32], chance: float, temperature: float, top_p: float, data: st.DataObject
) -> None:
    """A ban removes tokens from the draw and leaves the logprob of the drawn one alone."""
    banned = data.draw(st.sets(st.integers(0, len(logits) - 1), max_size=len(logits) - 1))
    drawn = draw(logits, chance, temperature, top_p, sorted(banned))
    assert drawn.token not in banned
    exact = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    assert drawn.logprob == pytest.approx(exact[drawn.token], abs=1e-5)


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert draw(np.array([1, 3, 3, 2], np.float32), 0.99, 0.0, 0.5).token == 1


def test_nucleus_ties_go_to_lower_ids() -> None:
    assert nucleus(np.ones(8, np.float32), 0.5).tolist() == [0, 1, 2, 3]


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(np.array([1, 2, 3, 4], np.float32))
    counts = np.bincount([draw(logits, (i + 0.5) / 1000, 1.0, 1.0).token for i in range(1000)])
    assert counts.tolist() == [100, 200, 300, 400]


def test_a_token_without_weight_is_not_drawn_at_the_end_of_the_range() -> None:
    """The last tokens underflow to weight 0; the largest chance still lands on one that has weight."""
    for scale in (1.0, 3.0, 7.0, 11.0):
        logits = np.append(np.log(np.arange(1, 1 + scale, dtype=np.float32)), np.float32([-200, -200]))
        assert draw(logits, 1 - 2.0**-53, 1.0, 1.0).token == scale - 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_an_error(bad: float) -> None:
    with pytest.raises(ValueError, match="damaged"):
        draw(np.array([0, bad, 1], np.float32), 0.5, 1.0, 1.0)


def test_banning_everything_is_an_error() -> None:
    with pytest.raises(ValueError, match="banned"):
        draw(np.zeros(2, np.float32), 0.5, 1.0, 1.0, (0, 1))
