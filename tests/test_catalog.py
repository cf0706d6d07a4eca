"""The catalog, case by case: faults that users of such systems have met, and what the model test cannot reach."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import catalog as catalog_module
from policies.catalog import Catalog, Published
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest, WaitRequest
from policies.deadlines import deadline_after
from policies.errors import CheckpointDamaged, CheckpointError, DtypeConflict, Refused, UnknownField, UnknownPartition
from policies.locations import FieldSchema, Publication, UnitLocation
from policies.samplers_sequential import Sequential

IDS = {"ids": FieldSchema("int64", (50,))}
BOTH = {**IDS, "lp": FieldSchema("float32", (50,))}
blocks = itertools.count()


def open_catalog(strict: bool = False) -> Catalog:
    catalog = Catalog(strict)
    catalog.register_unit("u0", UnitLocation("tcp://u0"))
    return catalog


def publication(
    keys: Sequence[str],
    fields: Mapping[str, FieldSchema] = IDS,
    tags: tuple[Mapping[str, Any] | None, ...] | None = None,
    partition: str = "train",
    batch_id: str = "",
) -> Publication:
    block = next(blocks)
    return Publication.of(batch_id or f"b{block}", "u0", block, partition, tuple(keys), fields, tags)


def put(catalog: Catalog, keys: Sequence[str], fields: Mapping[str, FieldSchema] = IDS, now: float = 0.0) -> Published:
    return catalog.publish(publication(keys, fields), now)


def claim(
    catalog: Catalog, count: int, deadline: float = 0.0, task: str = "actor", now: float = 0.0
) -> ClaimAnswer | None:
    return catalog.claim(ClaimRequest(f"c{next(blocks)}", "train", task, ("ids",), count, deadline), now)


def claimed(catalog: Catalog, count: int) -> tuple[str, ...]:
    answer = claim(catalog, count)
    assert answer is not None
    return answer.keys


# Clearing.


def test_a_cleared_row_is_offered_to_nobody_before_any_unit_was_told() -> None:
    catalog = open_catalog()
    keys = [f"g0_s{i}_c0" for i in range(8)]
    put(catalog, keys)
    late = claim(catalog, 9, task="critic")
    assert late is not None and late.timed_out
    cleared = catalog.clear("train", keys)
    assert claimed(catalog, 8) == ()
    assert catalog.locate("train", keys, ["ids"]).verdicts == ("missing",) * 8
    ((_, positions),) = cleared.frees["u0"]
    assert sorted(positions) == list(range(8))


def test_a_cleared_row_that_a_watch_still_holds_is_passed_over() -> None:
    catalog = open_catalog()
    assert claimed(catalog, 1) == ()
    put(catalog, ["a", "b", "c"])
    catalog.clear("train", ["a"])
    assert claimed(catalog, 2) == ("b", "c")


def test_a_watch_forgets_rows_that_go_by_unclaimed() -> None:
    """Rows that come and are cleared a thousand times leave nothing behind."""
    catalog = open_catalog()
    assert claimed(catalog, 1) == ()
    for _ in range(1000):
        put(catalog, ["a"])
        catalog.clear("train", ["a"])
    (watch,) = catalog.partitions["train"].consumers.tasks["actor"].watches.values()
    assert isinstance(watch.sampler, Sequential)
    assert watch.available == 0 and len(watch.sampler.heap) <= 65


def test_a_late_publish_wakes_neither_the_cleared_row_nor_its_successor() -> None:
    catalog = open_catalog()
    first = publication(["g0_s0_c0"], batch_id="late")
    catalog.publish(first, 0.0)
    catalog.clear("train", ["g0_s0_c0"])
    catalog.tag("train", ["g1_s0_c0"], [{"status": "reserved"}], create=True)
    again = catalog.publish(first, 1.0)
    assert (again.applied, dict(again.frees)) == (False, {})
    assert claimed(catalog, 1) == ()
    assert catalog.list_keys("train") == [("g1_s0_c0", {"status": "reserved"})]
    assert catalog.describe()["repeated_batches"] == 1


def test_clearing_a_mixed_list_clears_what_is_there_and_reports_the_rest() -> None:
    catalog = open_catalog()
    put(catalog, ["g0_s0_c0", "g0_s1_c0"])
    mixed = ["g0_s0_c0", "nosuch", "g0_s1_c0"]
    first, second = catalog.clear("train", mixed), catalog.clear("train", mixed)
    assert (first.removed, first.unknown) == (2, ("nosuch",))
    assert (second.removed, second.unknown, dict(second.frees)) == (0, tuple(mixed), {})
    assert [catalog.drop_partition(p).removed for p in ("train", "nosuch_part", "staging")] == [0, 0, 0]


def test_a_failed_removal_done_again_leaves_no_row_without_an_owner() -> None:
    catalog = open_catalog()
    for _ in range(4):
        put(catalog, ["g7_s0_c0", "g7_s1_c0"])
        catalog.clear("train", ["g7_s0_c0"])
        catalog.clear("train", ["g7_s0_c0", "g7_s1_c0"])
    assert catalog.describe()["blocks"] == {"u0": {"blocks": 0, "rows": 0}}
    assert catalog.list_keys("train") == []


@given(st.lists(st.sampled_from(["produce", "consume", "clean"]), max_size=60))
def test_every_row_is_consumed_or_ready_and_never_both(steps: list[str]) -> None:
    catalog, seen, produced = open_catalog(), list[str](), 0
    for step in steps:
        if step == "produce":
            put(catalog, [f"k{produced}", f"k{produced + 1}"])
            produced += 2
        elif step == "consume":
            seen += claimed(catalog, 3)
        else:
            catalog.clear("train", seen)
        tasks = catalog.describe()["partitions"].get("train", {"tasks": {}})["tasks"]
        ready = tasks["actor"]["watches"][0]["available"] if "actor" in tasks else produced
        assert len(seen) + ready == produced
    assert seen == [f"k{i}" for i in range(len(seen))]


# Publishing.


def test_tags_alone_change_no_field_no_readiness_and_no_consumption() -> None:
    catalog = open_catalog()
    put(catalog, ["g0_s0_c0"], BOTH)
    assert claimed(catalog, 1) == ("g0_s0_c0",)
    before = catalog.locate("train", ["g0_s0_c0"], None)
    only_tags = publication(["g0_s0_c0"], {}, ({"status": "pending"},))
    published = catalog.publish(only_tags, 0.0)
    after = catalog.locate("train", ["g0_s0_c0"], None)
    assert (after.fields, after.reads[0][:3]) == (before.fields, before.reads[0][:3])
    assert catalog.tags("train", ["g0_s0_c0"]) == [{"status": "pending"}]
    assert claimed(catalog, 1) == ()
    assert published.frees["u0"] == [(only_tags.block, [0])]


@pytest.mark.parametrize("dtype", ["float32", "bool", "int64", "float64"])
def test_a_scalar_field_has_the_scalar_shape_however_it_was_put(dtype: str) -> None:
    catalog = open_catalog()
    score = {"score": FieldSchema(dtype, ())}
    put(catalog, [f"g{i}" for i in range(8)], score)
    for i in range(8, 16):
        put(catalog, [f"g{i}"], score)
    field = catalog.describe()["partitions"]["train"]["fields"]["score"]
    assert (field["dtype"], field["shape"], field["rows"]) == (dtype, [], 16)


def test_a_dense_and_a_jagged_put_of_one_length_agree() -> None:
    catalog = open_catalog()
    put(catalog, ["a"], {"ids": FieldSchema("int64", (5,))})
    put(catalog, ["b", "c"], {"ids": FieldSchema("int64", (-1,), np.array([5, 5]))})
    assert catalog.describe()["partitions"]["train"]["fields"]["ids"]["shape"] == [5]


def test_a_refused_batch_changes_nothing_and_says_key_field_found_and_came() -> None:
    catalog = open_catalog()
    put(catalog, ["g0"], BOTH)
    before = take_snapshot(catalog)
    with pytest.raises(DtypeConflict) as raised:
        put(catalog, ["g1", "g0"], {"new": IDS["ids"], "lp": FieldSchema("int32", (50,))})
    assert raised.value.details == {"field": "lp", "key": "g1", "found": "float32", "came": "int32"}
    for word in ("train", "lp", "g1", "float32", "int32"):
        assert word in raised.value.message
    assert {**take_snapshot(catalog), "batches": before["batches"]} == before


def test_a_refused_first_batch_makes_no_partition() -> None:
    catalog = open_catalog()
    with pytest.raises(Refused, match=r"'lp'.*unknown dtype 'object'"):
        put(catalog, ["g0"], {"lp": FieldSchema("object", ())})
    assert catalog.describe()["partitions"] == {}


def test_a_refused_batch_is_refused_again_even_when_it_would_be_right_now() -> None:
    catalog = open_catalog(strict=True)
    batch = publication(["g0"])
    with pytest.raises(UnknownPartition):
        catalog.publish(batch, 0.0)
    catalog.create_partition("train")
    with pytest.raises(UnknownPartition):
        catalog.publish(batch, 0.0)


def test_unknown_units_used_blocks_and_wrong_sizes_are_refused() -> None:
    catalog = open_catalog()
    put(catalog, ["a"])
    used = next(iter(catalog.blocks.blocks())).id
    for bad, what in [
        (Publication.of("x1", "nosuch", 10**9, "train", ("b",), IDS), "registered"),
        (Publication.of("x2", "u0", used, "train", ("b",), IDS), "published before"),
        (Publication.of("x3", "u0", 10**9, "train", ("b",), IDS, ()), "0 tags"),
        (Publication.of("x4", "u0", 10**9, "train", (), IDS), "without keys"),
        (
            Publication.of("x5", "u0", 10**9, "train", ("b",), {"ids": FieldSchema("int64", (-1,), np.array([1, 2]))}),
            "ids",
        ),
    ]:
        with pytest.raises(Refused, match=what):
            catalog.publish(bad, 0.0)


def test_batch_ids_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "REMEMBERED_BATCHES", 3)
    catalog = open_catalog()
    for i in range(9):
        put(catalog, [f"k{i}"])
    assert len(catalog.batches) == 3


def test_declared_fields_are_all_there_is() -> None:
    catalog = open_catalog()
    catalog.create_partition("train", {"ids": "int64"}, expected_rows=2)
    with pytest.raises(UnknownField, match="'lp'"):
        put(catalog, ["a"], BOTH)
    put(catalog, ["a"])
    assert not catalog.produced("train").complete
    put(catalog, ["b"])
    assert catalog.produced("train").complete and not catalog.consumed("train", "actor").complete
    with pytest.raises(Refused, match="exists"):
        catalog.create_partition("train", {"ids": "int32"})


# Waiting.


def test_a_claim_short_of_one_row_is_parked_and_woken_by_that_row_alone() -> None:
    catalog = open_catalog()
    put(catalog, [f"k{i}" for i in range(31)])
    assert claim(catalog, 32, deadline=30.0) is None
    assert len(catalog.list_keys("train")) == 31
    (answer,) = put(catalog, ["k31"], now=0.2).woken
    assert answer.keys == tuple(f"k{i}" for i in range(32))
    assert (catalog.next_deadline(), catalog.expire(31.0)) == (None, [])


def test_a_large_parked_claim_stands_in_nobodys_way() -> None:
    catalog = open_catalog()
    assert claim(catalog, 100, deadline=9.0) is None
    assert claim(catalog, 2, deadline=9.0) is None
    assert [len(answer.keys) for answer in put(catalog, ["a", "b"]).woken] == [2]
    assert catalog.cancel("nosuch") is False


def test_a_parked_claim_that_leaves_lets_the_others_of_its_watch_be_woken() -> None:
    catalog = open_catalog()
    assert catalog.claim(ClaimRequest("small", "train", "actor", ("ids",), 1, 9.0), 0.0) is None
    assert claim(catalog, 2, deadline=9.0) is None
    assert catalog.cancel("small")
    assert [answer.keys for answer in put(catalog, ["a", "b"]).woken] == [("a", "b")]


def test_each_parked_request_times_out_alone() -> None:
    catalog = open_catalog()
    for name, deadline in (("late", 5.0), ("soon", 1.0)):
        assert catalog.claim(ClaimRequest(name, "train", "actor", ("ids",), 1, deadline), 0.0) is None
    assert catalog.next_deadline() == 1.0
    assert catalog.expire(1.0) == [ClaimAnswer("soon", timed_out=True)]
    assert [a.claim_id for a in put(catalog, ["a"], now=2.0).woken] == ["late"]


def test_a_publish_after_its_deadline_gives_a_claim_nothing() -> None:
    catalog = open_catalog()
    assert claim(catalog, 1, deadline=1.0) is None
    assert put(catalog, ["a"], now=1.0).woken == ()
    (answer,) = catalog.expire(1.0)
    assert answer.timed_out and claimed(catalog, 1) == ("a",)


def test_a_row_whose_field_is_put_again_is_offered_once() -> None:
    catalog = open_catalog()
    assert claimed(catalog, 1) == ()
    put(catalog, ["a"])
    put(catalog, ["a"], BOTH)
    assert claimed(catalog, 2) == ()
    assert claimed(catalog, 1) == ("a",)
    put(catalog, ["a"])
    assert claimed(catalog, 1) == ()


def test_a_task_that_asks_for_several_sets_of_fields_is_given_a_row_once() -> None:
    catalog = open_catalog()
    both = ClaimRequest("both", "train", "actor", ("lp", "ids"), 2, 9.0)
    assert catalog.claim(both, 0.0) is None
    put(catalog, ["a"])
    assert claimed(catalog, 1) == ("a",)
    assert put(catalog, ["a"], BOTH).woken == ()
    assert put(catalog, ["b"], BOTH).woken == ()
    assert [answer.keys for answer in put(catalog, ["c"], BOTH).woken] == [("b", "c")]
    assert claimed(catalog, 1) == ()


def test_a_wait_whose_key_is_cleared_meanwhile_waits_for_it_again() -> None:
    catalog = open_catalog()
    assert catalog.wait(WaitRequest("w", "train", ("a", "b", "a"), ("ids",), 9.0), 0.0) is None
    assert put(catalog, ["a"]).woken == ()
    catalog.clear("train", ["a"])
    assert put(catalog, ["b"]).woken == ()
    assert put(catalog, ["a"]).woken == (ClaimAnswer("w", ("a", "b", "a")),)


def test_readers_name_a_field_and_ask_for_a_row() -> None:
    catalog = open_catalog()
    with pytest.raises(Refused, match="no field"):
        catalog.claim(ClaimRequest("c", "train", "actor", (), 1, 0.0), 0.0)
    with pytest.raises(Refused, match="at least 1"):
        claim(catalog, 0)
    assert catalog.describe()["partitions"] == {}


# Snapshots.


def test_a_snapshot_falls_between_writes_so_a_ready_field_always_has_a_place() -> None:
    catalog = open_catalog()
    keys = [f"k{i}" for i in range(100)]
    put(catalog, keys)
    put(catalog, keys, {"score": FieldSchema("float32", ())})
    catalog.clear("train", keys[:10])
    units = {block.id: "u1" for block in catalog.blocks.blocks()}
    restored = restore_snapshot(take_snapshot(catalog), units, strict=False)
    located = restored.locate("train", keys, ["ids", "score"])
    assert located.verdicts == ("missing",) * 10 + ("ok",) * 90
    assert [(read.unit, read.fields, len(read.rows)) for read in located.reads] == [
        ("u1", ("ids",), 90), ("u1", ("score",), 90)
    ]  # fmt: skip
    with pytest.raises(DtypeConflict):
        restored.register_unit("u0", UnitLocation("tcp://u0"))
        put(restored, ["k200"], {"score": FieldSchema("float64", ())})


def test_more_fields_than_a_word_has_bits_survive_a_snapshot() -> None:
    catalog = open_catalog()
    fields = {f"f{i}": FieldSchema("int64", ()) for i in range(100)}
    put(catalog, ["a"], fields)
    restored = restore_snapshot(
        take_snapshot(catalog), {block.id: "u0" for block in catalog.blocks.blocks()}, strict=False
    )
    assert restored.locate("train", ["a"], None).fields == tuple(fields)


def test_a_snapshot_that_cannot_be_used_is_a_checkpoint_error() -> None:
    catalog = open_catalog()
    put(catalog, ["a"])
    plain = take_snapshot(catalog)
    with pytest.raises(CheckpointDamaged, match="no unit has loaded"):
        restore_snapshot(plain, {}, strict=False)
    with pytest.raises(CheckpointError, match="version 9"):
        restore_snapshot({**plain, "version": 9}, {}, strict=False)
    with pytest.raises(CheckpointDamaged):
        restore_snapshot({"version": 1}, {}, strict=False)


# Askers that leave.


def test_what_was_given_to_an_asker_that_left_is_offered_again_in_its_order() -> None:
    """Also to a claim that is parked now, and to the task's readers of other fields; to nobody twice."""
    catalog = open_catalog()
    put(catalog, ["a", "b", "c"], BOTH)
    lost = catalog.claim(ClaimRequest("lost", "train", "actor", ("ids",), 2, 0.0), 0.0)
    assert lost is not None and lost.keys == ("a", "b")
    catalog.claim(ClaimRequest("parked", "train", "actor", ("ids", "lp"), 2, 9.0), 0.0)
    (woken,) = catalog.give_back("lost", 1.0)
    assert (woken.claim_id, woken.keys) == ("parked", ("a", "b"))
    assert catalog.give_back("lost", 1.0) == ()
    assert claimed(catalog, 1) == ("c",) and claimed(catalog, 1) == ()
    assert catalog.consumed("train", "actor").rows == 3


def test_a_parked_asker_that_left_is_woken_by_nothing() -> None:
    catalog = open_catalog()
    assert catalog.claim(ClaimRequest("gone", "train", "actor", ("ids",), 1, 9.0), 0.0) is None
    assert catalog.wait(WaitRequest("w", "train", ("a",), ("ids",), 9.0), 0.0) is None
    assert catalog.give_back("gone", 1.0) == ()
    assert catalog.give_back("w", 1.0) == ()
    assert catalog.next_deadline() is None
    assert put(catalog, ["a"]).woken == ()
    assert claimed(catalog, 1) == ("a",)


@pytest.mark.parametrize("late", ["unclaimed", "claimed again", "after a reset", "after a drop"])
def test_giving_back_a_row_that_was_cleared_or_unclaimed_changes_nothing(late: str) -> None:
    """The key may be another row's by now, and that row another claim's."""
    catalog = open_catalog()
    put(catalog, ["a"])
    catalog.claim(ClaimRequest("c", "train", "actor", ("ids",), 1, 0.0), 0.0)
    if late == "after a reset":
        catalog.reset_task("train", "actor", 0.0)
    elif late == "after a drop":
        catalog.drop_partition("train")
        put(catalog, ["a"])
    else:
        catalog.clear("train", ["a"])
        put(catalog, ["a"])
    if late != "unclaimed":
        assert claimed(catalog, 1) == ("a",)
    assert catalog.give_back("c", 1.0) == ()
    assert claimed(catalog, 1) == (("a",) if late == "unclaimed" else ())


def test_a_deadline_that_is_no_time_is_refused() -> None:
    assert deadline_after(3.0, 2.0) == 5.0 and deadline_after(3.0, float("inf")) == float("inf")
    with pytest.raises(Refused, match="NaN"):
        deadline_after(3.0, float("nan"))
