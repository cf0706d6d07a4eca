"""Parked claims, samplers that fail, and what an asker is told: case by case, on a catalog with a hand-moved clock."""

from __future__ import annotations

from typing import Any

import pytest

from policies.catalog import Catalog
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest, WaitRequest
from policies.errors import CheckpointError, Refused, UnknownField
from policies.locations import FieldSchema, Publication, UnitLocation
from policies.sampler_registry import SamplerRegistry
from policies.samplers_sequential import Sequential
from policies.sampling import SEQUENTIAL, Candidate, Demand, Drawn, Find, SamplerSpec, groups, ranks, sampler, staleness


class Counting(Sequential):
    """Counts the draws that were tried."""

    tried = 0

    def draw(self, demand: Demand) -> Drawn | None:
        Counting.tried += 1
        return super().draw(demand)


class Faulty(Sequential):
    """Does something wrong at one place."""

    reads_tags = True

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _at(self, where: str) -> bool:
        if self.where == where:
            raise ZeroDivisionError("mine")
        return self.where == f"odd {where}"

    def check(self, demand: Demand) -> None:
        self._at("check")

    def offer(self, row: Candidate) -> None:
        self._at("offer")
        super().offer(row)

    def withdraw(self, row: Candidate) -> None:
        self._at("withdraw")
        super().withdraw(row)

    def retagged(self, row: Candidate) -> None:
        self._at("retagged")

    def draw(self, demand: Demand) -> Drawn | None:
        drawn = super().draw(demand)
        if drawn is None:
            return None
        self._at("draw")
        if self.where == "refused draw":
            raise Refused("not today")
        odd = {
            "foreign row": Drawn([Candidate("x", 99, None, {}), *drawn.rows[1:]]),
            "row twice": Drawn([drawn.rows[0]] * len(drawn.rows)),
            "wrong number": Drawn(drawn.rows[1:]),
            "untaken row": Drawn(drawn.rows, taken=drawn.rows[1:]),
            "odd parts": Drawn(drawn.rows, parts=[[0], [0]]),
            "no answer": "rows",
            "odd note": Drawn(drawn.rows, note=object()),
            "lost rows": Drawn(drawn.rows[1:], lost=1),
        }
        return odd.get(self.where, drawn)  # type: ignore[return-value]

    def give_back(self, demand: Demand, drawn: Drawn) -> list[Candidate]:
        self._at("give_back")
        return [Candidate("x", 99, None, {})]

    def shortfall(self, demand: Demand) -> str:
        self._at("shortfall")
        return "none"

    def state(self) -> Any:
        self._at("state")
        return object() if self.where == "odd state" else None

    def restore(self, state: Any, find: Find) -> None:
        self._at("restore")


REGISTRY = SamplerRegistry({"counting": Counting, "faulty": Faulty})


class Plane:
    """A catalog whose rows, claims and blocks are numbered."""

    def __init__(self, registry: SamplerRegistry = REGISTRY) -> None:
        self.catalog = Catalog(False, registry)
        self.catalog.register_unit("u0", UnitLocation("tcp://u0"))
        self.numbers = 0

    def put(self, *keys: str, partition: str = "train", tags: dict[str, Any] | None = None) -> list[ClaimAnswer]:
        self.numbers += 1
        fields = {"ids": FieldSchema("int64", (3,))}
        number = self.numbers
        given = None if tags is None else tuple(tags for _ in keys)
        publication = Publication.of(f"b{number}", "u0", number, partition, keys, fields, given)
        return list(self.catalog.publish(publication, 0.0).woken)

    def claim(
        self, name: str, count: int, spec: SamplerSpec = SEQUENTIAL, deadline: float = 0.0, **terms: Any
    ) -> ClaimAnswer | None:
        partition, task = terms.pop("partition", "train"), terms.pop("task", "actor")
        request = ClaimRequest(name, partition, task, ("ids",), count, deadline, spec, **terms)
        return self.catalog.claim(request, 0.0)

    def keys(self, count: int, spec: SamplerSpec = SEQUENTIAL, **terms: Any) -> tuple[str, ...]:
        self.numbers += 1
        answer = self.claim(f"c{self.numbers}", count, spec, **terms)
        assert answer is not None
        return answer.keys


# Parked claims.


def test_equal_demands_that_wait_are_tried_once_for_all_of_them() -> None:
    """A thousand claims of 8 rows are parked; each row that comes costs one draw until 8 are there."""
    plane, counting = Plane(), sampler("counting")
    for i in range(1000):
        assert plane.claim(f"c{i}", 8, counting, 9.0) is None
    Counting.tried = 0
    woken = [answer.claim_id for i in range(16) for answer in plane.put(f"k{i}")]
    assert woken == ["c0", "c1"]
    assert Counting.tried == 16 + 2, "one try a row, and one more after each claim that was met"


def test_a_watch_that_did_not_change_is_not_tried() -> None:
    plane = Plane()
    assert plane.claim("waits", 2, sampler("counting"), 9.0, task="other") is None
    plane.put("a")
    Counting.tried = 0
    assert plane.keys(1) == ("a",)
    plane.catalog.tag("train", ["a"], [{"n": 1}])
    assert plane.catalog.woken("train", 0.0) == ()
    assert Counting.tried == 0


def test_claims_of_several_watches_are_met_in_the_order_of_parking() -> None:
    plane = Plane()
    plane.claim("groups", 2, groups(2), 9.0)
    plane.claim("late", 1, SEQUENTIAL, 9.0)
    plane.claim("first", 1, sampler("counting"), 9.0, task="critic")
    woken = plane.put("a", "b", tags={"group": "g"})
    assert [(answer.claim_id, answer.keys) for answer in woken] == [("groups", ("a", "b")), ("first", ("a",))]
    assert [answer.claim_id for answer in plane.put("c")] == ["late"]


def test_a_parked_rank_is_woken_by_the_rank_that_draws_its_round() -> None:
    """Also where it never could be met alone: it waits for a round of another size, and is told so."""
    plane = Plane()
    plane.put("a", "b", "c", "d")
    assert plane.claim("r1", 3, ranks(2), 9.0, rank=1) is None
    assert plane.keys(2, ranks(2), rank=0) == ("a", "b")
    (refused,) = plane.catalog.woken("train", 0.0)
    assert refused.claim_id == "r1" and "all ranks must ask for a round in the same way" in str(refused.error)
    assert plane.keys(2, ranks(2), rank=1) == ("c", "d")


def test_a_tag_or_a_clear_may_complete_a_claim() -> None:
    plane = Plane()
    plane.put("a", "b", tags={"version": 3})
    plane.claim("tagged", 2, groups(2), 9.0)
    plane.catalog.tag("train", ["a", "b"], [{"group": "g"}] * 2)
    assert [answer.claim_id for answer in plane.catalog.woken("train", 0.0)] == ["tagged"]
    plane.put("old", tags={"group": "h", "version": 1})
    plane.put("c", "d", tags={"group": "h", "version": 3})
    plane.claim("cleared", 2, staleness(of=groups(2)), 9.0, oldest_version=3)
    plane.catalog.clear("train", ["old"])
    (answer,) = plane.catalog.woken("train", 0.0)
    assert answer.keys == ("c", "d")


def test_a_put_of_tags_alone_may_complete_a_claim() -> None:
    plane = Plane()
    plane.put("a", "b")
    plane.claim("tagged", 2, groups(2), 9.0)
    tags = ({"group": "g"}, {"group": "g"})
    publication = Publication.of("tags", "u0", 99, "train", ("a", "b"), {}, tags)
    assert [answer.keys for answer in plane.catalog.publish(publication, 0.0).woken] == [("a", "b")]


# What an asker is told.


def test_a_claim_on_a_misspelt_partition_is_told_so() -> None:
    plane = Plane()
    plane.put("a")
    plane.put("b", partition="staging")
    answer = plane.claim("c", 1, partition="trian")
    assert answer is not None and answer.timed_out
    assert answer.found == (
        "1 rows asked for; 0 are ready; no row has ever come to partition 'trian', rows have come to 'train', 'staging'"
    )
    assert plane.claim("p", 1, deadline=5.0, partition="trian") is None
    assert [late.found for late in plane.catalog.expire(5.0)] == [answer.found]


def test_a_claim_on_a_misspelt_field_is_told_so() -> None:
    plane = Plane()
    plane.put("a")
    answer = plane.catalog.claim(ClaimRequest("c", "train", "actor", ("idz",), 1, 0.0), 0.0)
    assert answer is not None
    assert answer.found.endswith("no row of the partition has ever had a value in ['idz'], its fields are 'ids'")


def test_a_wait_in_vain_names_the_keys() -> None:
    plane = Plane()
    plane.put("k0")
    keys = tuple(f"k{i}" for i in range(6))
    assert plane.catalog.wait(WaitRequest("w", "train", keys, ("ids",), 5.0), 0.0) is None
    (late,) = plane.catalog.expire(5.0)
    assert late.found == "'k1', 'k2', 'k3' and 2 more of 6 keys lack them"


def test_a_refused_claim_begins_nothing() -> None:
    plane = Plane()
    for spec, terms in ((groups(2), {}), (sampler("nosuch"), {}), (ranks(2), {}), (SEQUENTIAL, {"rank": 1})):
        with pytest.raises(Refused):
            plane.claim("c", 3, spec, 9.0, **terms)
    assert plane.catalog.describe()["partitions"] == {}
    plane.catalog.create_partition("strict", {"ids": "int64"})
    with pytest.raises(UnknownField):
        plane.catalog.claim(ClaimRequest("c", "strict", "t", ("other",), 1, 0.0), 0.0)
    assert plane.catalog.describe()["partitions"]["strict"]["tasks"] == {}


# Samplers that fail.


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("offer", "failed in offer: ZeroDivisionError: mine"),
        ("withdraw", "failed in withdraw: ZeroDivisionError: mine"),
        ("retagged", "failed in retagged: ZeroDivisionError: mine"),
        ("draw", "failed in draw: ZeroDivisionError: mine"),
        ("check", "failed in check: ZeroDivisionError: mine"),
        ("foreign row", "took key 'x', which it was not offered"),
        ("row twice", "gave or skipped a row twice"),
        ("wrong number", "gave 1 rows, 0 of them lost, where 2 were asked for"),
        ("lost rows", "gave 1 rows, 1 of them lost, where 2 were asked for"),
        ("untaken row", "gave key 'a', which it had not taken"),
        ("odd parts", "do not name each of 2 rows once"),
        ("no answer", "failed in draw: AttributeError"),
        ("odd note", "failed in draw: WireError"),
    ],
)
def test_a_failing_sampler_costs_its_own_claims_only(where: str, says: str) -> None:
    plane, faulty = Plane(), sampler("faulty", where=where)
    if where != "check":
        assert plane.claim("parked", 2, faulty, 9.0) is None
    woken = plane.put("gone")
    plane.catalog.clear("train", ["gone"])
    woken += [*plane.catalog.woken("train", 0.0), *plane.put("a")]
    plane.catalog.tag("train", ["a"], [{"n": 2}])
    woken += [*plane.catalog.woken("train", 0.0), *plane.put("b")]
    if where != "check":
        assert [answer.claim_id for answer in woken] == ["parked"]
        assert says in str(woken[0].error) and "'faulty' of task 'actor'" in str(woken[0].error)
    with pytest.raises(Refused, match="claims are refused until the task is reset" if where != "check" else says):
        plane.claim("again", 2, faulty)
    assert plane.keys(1) == ("a",)
    assert plane.keys(2, task="critic") == ("a", "b")
    assert plane.catalog.reset_task("train", "actor", 0.0) == []
    assert plane.keys(2) == ("a", "b")


def test_a_sampler_may_refuse_one_claim_and_go_on() -> None:
    plane = Plane()
    plane.put("a")
    with pytest.raises(Refused, match="'faulty' of task 'actor': not today"):
        plane.claim("c", 1, sampler("faulty", where="refused draw"))
    assert not plane.keys(2, sampler("faulty", where="refused draw"))


def test_what_a_failed_sampler_took_stays_taken_until_the_reset() -> None:
    """It alone knows to whom else it promised the rows."""
    for where in ("give_back", "nowhere"):
        plane, faulty = Plane(), sampler("faulty", where=where)
        plane.put("a")
        assert plane.keys(1, faulty) == ("a",)
        assert plane.catalog.give_back(f"c{plane.numbers}", 0.0) == ()
        assert plane.keys(1) == ()
        plane.catalog.reset_task("train", "actor", 0.0)
        assert plane.keys(1) == ("a",)


def test_a_sampler_that_cannot_explain_itself_still_times_out() -> None:
    answer = Plane().claim("c", 1, sampler("faulty", where="shortfall"))
    assert answer is not None and answer.timed_out
    assert answer.found.startswith("sampler 'faulty' cannot say why: ZeroDivisionError: mine")


@pytest.mark.parametrize("where", ["state", "odd state"])
def test_a_state_that_is_no_plain_data_stops_the_save_and_says_whose_it_is(where: str) -> None:
    plane = Plane()
    plane.put("a")
    plane.keys(1, sampler("faulty", where=where))
    with pytest.raises(CheckpointError, match="'faulty' of task 'actor' in partition 'train' cannot be saved"):
        take_snapshot(plane.catalog)


def test_a_snapshot_is_restored_with_its_samplers_or_not_at_all() -> None:
    plane = Plane()
    plane.put("a", "b")
    plane.keys(1, sampler("faulty", where="restore"))
    saved, blocks = take_snapshot(plane.catalog), {1: "u0"}
    for registry, says in ((SamplerRegistry(), "no sampler 'faulty'"), (REGISTRY, "ZeroDivisionError: mine")):
        with pytest.raises(CheckpointError, match=f"(?s)task 'actor'.*{says}.*launch the plane with the samplers"):
            restore_snapshot(saved, blocks, False, registry)


def test_a_failed_sampler_is_still_failed_after_a_restart() -> None:
    plane = Plane()
    plane.put("a")
    with pytest.raises(Refused, match="failed in draw"):
        plane.keys(1, sampler("faulty", where="draw"))
    plane.catalog = restore_snapshot(take_snapshot(plane.catalog), {1: "u0"}, False, REGISTRY)
    with pytest.raises(Refused, match="failed in draw"):
        plane.keys(1, sampler("faulty", where="draw"))
    assert plane.keys(1) == ("a",)


def test_an_answer_asked_for_again_after_a_restart_is_the_same_and_can_be_given_back() -> None:
    plane = Plane()
    plane.put("a", "b", tags={"version": 1})
    plane.put("c", tags={"version": 0})
    first = plane.claim("once", 2, staleness(), oldest_version=1)
    plane.catalog = restore_snapshot(take_snapshot(plane.catalog), {1: "u0", 2: "u0"}, False, REGISTRY)
    assert first is not None and first.skipped == (("c", "version 0 is older than 1"),)
    assert plane.claim("once", 2, staleness(), oldest_version=1) == first
    plane.catalog.give_back("once", 0.0)
    assert plane.keys(3) == ("a", "b", "c")
