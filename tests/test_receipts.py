"""Inventories bind their calls, receipts survive their plain form, continuations fit their requests."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.calls import CallIdentity, GenerationRequest
from policies.receipts import (
    DURABLE_FAILURE,
    DURABLE_PREFIX,
    Acknowledgement,
    Continuation,
    Inventory,
    Receipt,
    ReceiptCache,
    failure,
    merged_numbers,
)

ids = st.text(st.characters(exclude_characters="/@#", codec="utf-8"), min_size=1, max_size=8)
identities = st.builds(CallIdentity, ids, ids, st.integers(0, 9))


@given(st.lists(identities, max_size=6), st.lists(identities, max_size=6))
def test_a_digest_binds_the_calls_and_their_order(one: list[CallIdentity], other: list[CallIdentity]) -> None:
    assert (Inventory.of("k", one).digest == Inventory.of("k", other).digest) == (one == other)


@given(identities, identities)
def test_two_calls_never_share_a_key(one: CallIdentity, other: CallIdentity) -> None:
    assert (str(one) == str(other)) == (one == other)
    assert (one.chunk_key(1) == other.chunk_key(1)) == (one == other)
    same_call = (one.rollout_id, one.call_id) == (other.rollout_id, other.call_id)
    assert (one.row_key == other.row_key) == same_call


@pytest.mark.parametrize(
    "parts", [("a/b", "c", 0), ("a", "b@c", 0), ("a", "#", 0), ("", "c", 0), ("a", "b", -1), ("a", "\ud800", 0)]
)
def test_ids_that_make_no_key_are_refused(parts: tuple[str, str, int]) -> None:
    with pytest.raises(ValueError, match=r"must not be empty|begins at 0|UTF-8"):
        CallIdentity(*parts)


@given(st.lists(identities, max_size=4, unique=True), st.data())
def test_receipts_survive_msgpack(calls: list[CallIdentity], data: st.DataObject) -> None:
    acknowledgements = tuple(
        Acknowledgement(call, DURABLE_PREFIX, (call.chunk_key(0),), data.draw(st.integers(1, 99)), "d", extras=("x",))
        if data.draw(st.booleans())
        else Acknowledgement(call, DURABLE_FAILURE, reason="no_tokens", cause="not started")
        for call in calls
    )
    receipt = Receipt("k", Inventory.of("k", calls).digest, acknowledgements, {"puts": 2.0})
    assert Receipt.from_plain(msgpack.unpackb(msgpack.packb(receipt.to_plain()))) == receipt


def request(call: str = "c0") -> GenerationRequest:
    return GenerationRequest(CallIdentity("r0", call), (1, 2), max_tokens=32)


def prefix(tokens: int, finish_reason: str | None = None, keys: tuple[str, ...] = ("r0/c0@a0#0",)) -> Acknowledgement:
    return Acknowledgement(CallIdentity("r0", "c0"), DURABLE_PREFIX, keys, tokens, "d", finish_reason)


@pytest.mark.parametrize(
    ("tokens", "finish_reason", "left", "whole"),
    [(20, None, 12, None), (32, None, 0, "length"), (20, "stop", 12, "stop")],
)
def test_the_budget_counts_what_was_restored(
    tokens: int, finish_reason: str | None, left: int, whole: str | None
) -> None:
    continuation = Continuation.of(prefix(tokens, finish_reason), request())
    assert (continuation.remaining_max_tokens, continuation.whole_reason) == (left, whole)


@pytest.mark.parametrize(("tokens", "least", "most"), [(0, 20, 32), (5, 15, 27), (20, 0, 12), (25, 0, 7), (40, 0, 0)])
def test_what_is_left_of_the_limits_is_never_less_than_nothing_nor_upside_down(
    tokens: int, least: int, most: int
) -> None:
    continuation = Continuation.of(prefix(tokens), replace(request(), min_tokens=20))
    assert (continuation.remaining_min_tokens, continuation.remaining_max_tokens) == (least, most)


def test_an_acknowledgement_of_another_call_or_of_a_stored_row_is_no_continuation() -> None:
    with pytest.raises(ValueError, match="r0/c0@a0, the request of call r0/c1@a0"):
        Continuation.of(prefix(5), request("c1"))
    with pytest.raises(ValueError, match="its row is stored"):
        Continuation.of(prefix(5, "stop", keys=()), request())


def test_numbers_of_one_cut_at_several_coordinators() -> None:
    receipts = [
        Receipt("k", "d", (), {"puts": 1.0, "write_s": 0.5, "largest_put_bytes": 10.0, "decode_before_per_s": 5.0}),
        Receipt("k", "d", (), {"puts": 2.0, "write_s": 0.2, "largest_put_bytes": 30.0, "decode_before_per_s": 6.0}),
        Receipt("k", "d", (), {"failed_no_tokens": 1.0}),
    ]
    assert merged_numbers(receipts) == {
        "puts": 3.0, "write_s": 0.5, "largest_put_bytes": 30.0, "failed_no_tokens": 1.0, "decode_before_per_s": 11.0,
    }  # fmt: skip


@given(st.lists(st.integers(0, 5), max_size=12), st.integers(0, 8))
def test_receipts_are_kept_up_to_a_number_of_acknowledgements(sizes: list[int], capacity: int) -> None:
    cache, inventories = ReceiptCache(capacity), []
    for number, size in enumerate(sizes):
        calls = tuple(CallIdentity("r", f"c{i}") for i in range(size))
        inventories.append(Inventory.of(f"k{number}", calls))
        answers = tuple(failure(call, "no_tokens", "not started") for call in calls)
        cache.add(Receipt(f"k{number}", inventories[-1].digest, answers))
    kept = [size for size, inventory in zip(sizes, inventories, strict=True) if cache.get(inventory) is not None]
    assert kept == sizes[len(sizes) - len(kept) :], "the newest stay"
    assert len(kept) == len(cache) and (sum(kept) <= capacity or len(kept) == 1)
    more = sizes[len(sizes) - len(kept) - 1 :]
    assert len(kept) == len(sizes) or sum(more) > capacity, "no receipt goes while there is room"
