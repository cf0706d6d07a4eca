"""Each sampler's defining property, and what a spec may say. Their answers row by row are compared with naive ones in
`tests.test_catalog_model`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.catalog import Catalog
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest
from policies.errors import Refused
from policies.locations import FieldSchema, Publication, UnitLocation
from policies.sampler_registry import SHIPPED, SamplerRegistry
from policies.samplers_balanced import level_rounds, lightest_first
from policies.sampling import (
    SEQUENTIAL,
    Candidate,
    Demand,
    Drawn,
    Sampler,
    SamplerSpec,
    balanced,
    groups,
    ranks,
    sampler,
    sequential,
    staleness,
)

Tags = Mapping[str, Any]
Row = tuple[str, Tags, int]
"""Key, tags, length of ``ids``."""

names = st.sampled_from(["g0", "g1", "g2", "g3"])
lengths = st.integers(0, 50)


class Table:
    """A catalog with one partition, as its claims see it. Every claim is an attempt."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self._numbers = itertools.count()
        self.catalog = Catalog(False)
        self.catalog.register_unit("u0", UnitLocation("tcp://u0"))
        self.put(rows)

    def put(self, rows: Sequence[Row]) -> None:
        for key, tags, length in rows:
            number = next(self._numbers)
            fields = {"ids": FieldSchema("int64", (-1,), np.array([length], np.int64))}
            publication = Publication.of(f"b{number}", "u0", number, "train", (key,), fields, (tags,))
            self.catalog.publish(publication, 0.0)

    def claim(self, count: int, spec: SamplerSpec = SEQUENTIAL, task: str = "actor", **terms: Any) -> ClaimAnswer:
        claim_id = f"c{next(self._numbers)}"
        request = ClaimRequest(claim_id, "train", task, ("ids",), count, 0.0, spec, **terms)
        answer = self.catalog.claim(request, 0.0)
        assert answer is not None
        return answer

    def restart(self) -> None:
        plain = take_snapshot(self.catalog)
        self.catalog = restore_snapshot(plain, dict.fromkeys(range(1000), "u0"), False)
        self.catalog.register_unit("u0", UnitLocation("tcp://u0"))


def rows_of(group_names: Sequence[str], versions: Sequence[int] = (), sizes: Sequence[int] = ()) -> list[Row]:
    """Row i has key ``r<i>``, its group, and its version and length where there are such (else 0 and 1)."""
    return [
        (
            f"r{i}",
            {"group": name, "version": versions[i] if i < len(versions) else 0},
            sizes[i] if i < len(sizes) else 1,
        )
        for i, name in enumerate(group_names)
    ]


def drain(table: Table, count: int, spec: SamplerSpec, **terms: Any) -> list[ClaimAnswer]:
    """Claims until one is not met."""
    answers: list[ClaimAnswer] = []
    while (answer := table.claim(count, spec, **terms)).keys:
        answers.append(answer)
    return answers


# Groups.


@given(st.lists(names, max_size=30), st.integers(1, 4), st.integers(1, 2))
def test_groups_are_never_partial_and_all_whole_ones_are_given_oldest_first(
    group_names: list[str], size: int, each: int
) -> None:
    rows = rows_of(group_names)
    tag = {key: tags["group"] for key, tags, _ in rows}
    given = [key for answer in drain(Table(rows), size * each, groups(size)) for key in answer.keys]
    groups_given = [given[i : i + size] for i in range(0, len(given), size)]
    assert all(len({tag[key] for key in group}) == 1 for group in groups_given)
    assert len(set(given)) == len(given)
    whole = sum(group_names.count(name) // size for name in set(group_names))
    assert len(groups_given) == whole // each * each
    first = [int(group[0][1:]) for group in groups_given]
    assert first == sorted(first)


def test_a_group_is_whole_when_its_last_sibling_comes_and_is_one_no_more_when_one_goes() -> None:
    table = Table(rows_of(["a", "b", "a", "b"]))
    assert not table.claim(3, groups(3), task="early").keys
    table.put([("r4", {"group": "a"}, 1)])
    table.catalog.clear("train", ["r0"])
    assert not table.claim(3, groups(3), task="early").keys
    table.put([("r5", {"group": "b"}, 1)])
    assert table.claim(3, groups(3), task="early").keys == ("r1", "r3", "r5")
    assert not table.claim(3, groups(3), task="early").keys
    table.catalog.tag("train", ["r2"], [{"group": "c"}])
    table.put([("r6", {"group": "a"}, 1)])
    assert not table.claim(3, groups(3), task="early").keys
    table.catalog.tag("train", ["r2"], [{"group": "a"}])
    assert table.claim(3, groups(3), task="early").keys == ("r2", "r4", "r6")


def test_an_incomplete_group_says_what_is_there() -> None:
    table = Table([*rows_of(["a"] * 4 + ["b"] * 3 + ["c"]), ("odd", {}, 1)])
    found = table.claim(8, groups(4)).found
    assert found == (
        "2 whole groups of 4 asked for; 1 are ready, 2 incomplete groups hold 4 rows, and 1 rows have no tag 'group' "
        "that names one"
    )
    with pytest.raises(Refused, match=r"'groups'.*6 rows.*groups of 4.*multiple of 4"):
        table.claim(6, groups(4))


# Ranks.


@given(
    st.permutations([rank for rank in range(3) for _ in range(3)]),
    st.sampled_from(["same", "disjoint"]),
    st.sampled_from([SEQUENTIAL, groups(2), staleness(of=groups(2))]),
    st.lists(lengths, min_size=36, max_size=36),
    st.sampled_from([None, "ids"]),
    st.booleans(),
)
def test_what_a_rank_gets_does_not_depend_on_the_order_of_asking_nor_on_a_restart(
    asking: list[int], mode: str, of: SamplerSpec, sizes: list[int], balance: str | None, restarts: bool
) -> None:
    spec = ranks(3, mode, balance if mode == "disjoint" else None, of)
    terms = {"oldest_version": 0.0} if of.name == "staleness" else {}

    def assign(order: Sequence[int], restart: bool) -> dict[int, list[tuple[str, ...]]]:
        table, got = Table(rows_of([f"g{i // 2}" for i in range(36)], sizes=sizes)), dict[int, list[tuple[str, ...]]]()
        for rank in order:
            got.setdefault(rank, []).append(table.claim(4, spec, rank=rank, **terms).keys)
            if restart:
                table.restart()
        return got

    got = assign(asking, restarts)
    assert got == assign([0, 1, 2] * 3, False)
    batches = [batch for rank in range(3) for batch in got[rank]]
    assert all(len(batch) == 4 for batch in batches)
    if mode == "same":
        assert got[0] == got[1] == got[2]
    else:
        assert len({key for batch in batches for key in batch}) == 36
    if of is not SEQUENTIAL:
        assert all(int(batch[i][1:]) // 2 == int(batch[i + 1][1:]) // 2 for batch in batches for i in (0, 2))


def test_a_rank_whose_claim_is_given_back_gets_the_same_batch_again() -> None:
    table = Table(rows_of(["g"] * 8))
    first = table.claim(2, ranks(2), rank=0)
    assert table.claim(2, ranks(2), rank=0).keys == ("r4", "r5")
    assert table.catalog.give_back(first.claim_id, 0.0) == ()
    table.restart()
    assert table.claim(2, ranks(2), rank=1).keys == ("r2", "r3")
    assert table.claim(2, ranks(2), rank=0).keys == first.keys
    assert table.claim(2, ranks(2), rank=1).keys == ("r6", "r7")
    assert table.catalog.consumed("train", "actor").rows == 8


def test_a_row_cleared_before_a_rank_asked_is_reported_and_not_replaced() -> None:
    table = Table(rows_of(["g"] * 4))
    assert table.claim(2, ranks(2, "same"), rank=0).keys == ("r0", "r1")
    table.catalog.clear("train", ["r1"])
    table.put([("r1", {}, 1)])
    late = table.claim(2, ranks(2, "same"), rank=1)
    assert late.keys == ("r0",)
    assert late.skipped == (("r1", "cleared before rank 1 asked for its batch 0"),)


def test_ranks_must_ask_alike_and_within_their_world() -> None:
    table = Table(rows_of(["g"] * 8))
    table.claim(2, ranks(2), rank=0)
    with pytest.raises(Refused, match=r"rank 1 asked for 3 rows, but its batch 0.*is one of 2 rows"):
        table.claim(3, ranks(2), rank=1)
    assert table.claim(2, ranks(2), rank=1).keys == ("r2", "r3")
    for rank in (None, 2, -1):
        with pytest.raises(Refused, match="rank must be 0 to 1"):
            table.claim(2, ranks(2), rank=rank)
    with pytest.raises(Refused, match="its sampler knows no ranks"):
        table.claim(2, rank=0)


# Balance.


@given(st.lists(lengths, min_size=1, max_size=40), st.integers(1, 6))
def test_lightest_first_covers_all_rows_within_its_bounds(sizes: list[int], shares: int) -> None:
    split = lightest_first(sizes, shares)
    assert sorted(index for share in split for index in share) == list(range(len(sizes)))
    weights = [sum(sizes[index] for index in share) for share in split]
    assert max(weights) - min(weights) <= max(sizes)
    least = max(max(sizes), -(-sum(sizes) // shares))
    assert max(weights) <= sum(sizes) / shares + max(sizes) * (1 - 1 / shares) and max(weights) >= least
    assert len(sizes) < shares or all(split)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(2, 3))
def test_lightest_first_is_as_near_to_the_best_split_as_graham_says(sizes: list[int], shares: int) -> None:
    best = min(
        max(sum(size for size, at in zip(sizes, places, strict=True) if at == share) for share in range(shares))
        for places in itertools.product(range(shares), repeat=len(sizes))
    )
    heaviest = max(sum(sizes[index] for index in share) for share in lightest_first(sizes, shares))
    assert 3 * shares * heaviest <= (4 * shares - 1) * best


@given(st.integers(1, 6), st.data())
def test_level_rounds_deals_equal_numbers_within_the_spread_of_lengths(shares: int, data: st.DataObject) -> None:
    rounds = data.draw(st.integers(1, 8))
    sizes = data.draw(st.lists(lengths, min_size=shares * rounds, max_size=shares * rounds))
    split = level_rounds(sizes, shares)
    assert sorted(index for share in split for index in share) == list(range(len(sizes)))
    assert {len(share) for share in split} == {rounds}
    weights = [sum(sizes[index] for index in share) for share in split]
    assert max(weights) - min(weights) <= max(sizes) - min(sizes)


def test_micro_batches_name_the_rows_of_the_claim_and_reach_into_ranks() -> None:
    sizes = [100, 1, 50, 50, 1, 1, 99, 2]
    table = Table(rows_of(["g"] * 8, sizes=sizes))
    answer = table.claim(8, balanced(2, "ids"), task="whole")
    weights = [sum(sizes[int(answer.keys[index][1:])] for index in part) for part in answer.parts]
    assert weights == [152, 152]
    spec = balanced(2, "ids", of=ranks(2, balance="ids", of=groups(2)))
    table = Table(rows_of([f"g{i // 2}" for i in range(8)], sizes=sizes))
    of_ranks = []
    for rank in (1, 0):
        mine = table.claim(4, spec, rank=rank)
        assert sorted(sum(mine.parts, ())) == [0, 1, 2, 3]
        of_ranks.append(sum(sizes[int(key[1:])] for key in mine.keys))
    assert of_ranks == [103, 201], "pairs of 101, 100, 2 and 101 dealt in two rounds"


def test_a_field_to_balance_must_be_among_those_of_the_claim() -> None:
    table = Table(rows_of(["g"] * 4))
    with pytest.raises(Refused, match=r"reads the lengths of \['lp'\]; name them among the claim's fields"):
        table.claim(4, balanced(2, "lp"))
    with pytest.raises(Refused, match="1 rows asked for in 2 micro-batches"):
        table.claim(1, balanced(2, "ids"))


# Staleness.


@given(
    st.lists(st.tuples(names, st.integers(0, 4)), max_size=30),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), max_size=12),
    st.integers(0, 30),
)
def test_an_old_row_is_never_given_and_is_reported_once_with_its_siblings(
    rows: list[tuple[str, int]], size: int, bounds: list[int], later: int
) -> None:
    """Rows come in two portions, so that siblings of skipped groups are late."""
    spec = staleness(of=groups(size))
    table = Table(rows_of([name for name, _ in rows[:later]], [version for _, version in rows]))
    given, skipped = list[str](), list[str]()
    for step, bound in enumerate(bounds):
        if step == len(bounds) // 2:
            table.put(rows_of([name for name, _ in rows], [version for _, version in rows])[later:])
        answer = table.claim(size, spec, oldest_version=bound)
        assert all(rows[int(key[1:])][1] >= bound for key in answer.keys)
        assert answer.keys or not answer.skipped
        given += answer.keys
        skipped += [key for key, _ in answer.skipped]
    assert len(set(given + skipped)) == len(given) + len(skipped)
    assert table.catalog.claim(ClaimRequest("n", "train", "t", ("ids",), 1, 0.0), 0.0) is not None
    assert len(given) + len(skipped) == table.catalog.consumed("train", "actor").rows


def test_a_stale_sibling_takes_its_group_with_it_also_those_that_come_later() -> None:
    table = Table(rows_of(["a", "a", "b", "b", "b"], [4, 3, 4, 4, 4]))
    spec = staleness(of=groups(3))
    met = table.claim(3, spec, oldest_version=4)
    assert met.keys == ("r2", "r3", "r4")
    assert met.skipped == (
        ("r0", "a sibling in its group 'a' has version 3, older than 4"),
        ("r1", "version 3 is older than 4"),
    )
    table.restart()
    table.put([("late", {"group": "a", "version": 9}, 1)])
    table.put([(f"c{i}", {"group": "c", "version": 4}, 1) for i in range(3)])
    table.restart()
    again = table.claim(3, spec, oldest_version=4)
    assert again.keys == ("c0", "c1", "c2")
    assert again.skipped == (("late", "its group 'a' was skipped before"),)


def test_a_claim_that_is_not_met_has_skipped_nothing() -> None:
    table = Table(rows_of(["a", "a"], [1, 2]))
    assert not table.claim(2, staleness(), oldest_version=2).keys
    assert table.claim(2, staleness(), oldest_version=1).keys == ("r0", "r1")
    assert table.claim(1, staleness(), oldest_version=1).found == (
        "1 rows asked for; 0 are ready; 0 rows are older than version 1 or belong to such"
    )


def test_what_was_skipped_in_an_answer_that_was_lost_is_reported_again() -> None:
    table = Table(rows_of(["a", "b"], [1, 2]))
    lost = table.claim(1, staleness(), oldest_version=2)
    assert (lost.keys, [key for key, _ in lost.skipped]) == (("r1",), ["r0"])
    table.catalog.give_back(lost.claim_id, 0.0)
    again = table.claim(1, staleness(), oldest_version=2)
    assert (again.keys, again.skipped) == (lost.keys, lost.skipped)


def test_a_row_without_a_version_waits_for_one() -> None:
    table = Table([("a", {}, 1), ("b", {"version": "new"}, 1), ("c", {"version": 3}, 1)])
    assert table.claim(1, staleness(), oldest_version=3).keys == ("c",)
    assert table.claim(1, staleness(), oldest_version=3).found.endswith("2 rows have no number in tag 'version'")
    table.catalog.tag("train", ["a"], [{"version": 4}])
    assert table.claim(1, staleness(), oldest_version=3).keys == ("a",)
    for bound in (None, float("nan")):
        with pytest.raises(Refused, match="oldest_version must be"):
            table.claim(1, staleness(), oldest_version=bound)
    with pytest.raises(Refused, match="its sampler bounds none"):
        table.claim(1, oldest_version=3)


# Restarts.


SHIPPED_SPECS: list[tuple[SamplerSpec, dict[str, Any]]] = [
    (sequential(), {}),
    (groups(4), {}),
    (ranks(2, of=groups(4)), {"rank": 1}),
    (ranks(2, "same"), {"rank": 0}),
    (balanced(2, "ids"), {}),
    (balanced(2, "ids", of=groups(4)), {}),
    (staleness(), {"oldest_version": 1}),
    (staleness(of=groups(4)), {"oldest_version": 1}),
]


@pytest.mark.parametrize(
    ("spec", "terms"), SHIPPED_SPECS, ids=[f"{i}-{s.name}" for i, (s, _) in enumerate(SHIPPED_SPECS)]
)
@pytest.mark.parametrize("moment", [0, 1, 2])
def test_finished_groups_are_consumed_after_a_restart_as_without(
    spec: SamplerSpec, terms: dict[str, Any], moment: int
) -> None:
    """6 finished groups, 2 of which a sequential reader of another task has half consumed, and one that is stale."""

    def consume(restart_after: int | None) -> list[tuple[tuple[str, ...], tuple[tuple[str, str], ...]]]:
        order = [f"g{(5 * i) % 8}" for i in range(32)]
        table = Table(rows_of(order, [0 if name == "g3" else 1 for name in order], [1 + i % 7 for i in range(32)]))
        assert len(table.claim(6, task="other").keys) == 6
        answers = []
        for step in range(4):
            if step == restart_after:
                table.restart()
            answer = table.claim(4, spec, **terms)
            answers.append((answer.keys, answer.skipped))
        return answers

    assert consume(moment) == consume(None)
    assert all(keys for keys, _ in consume(None))


# Specs.


@pytest.mark.parametrize("spec", [spec for spec, _ in SHIPPED_SPECS])
def test_a_spec_is_plain_data_and_comes_back(spec: SamplerSpec) -> None:
    assert SamplerSpec.from_plain(spec.to_plain()) == spec
    assert type(SamplerRegistry().build(spec)) is SHIPPED[spec.name]
    assert groups(8).to_plain() == {"name": "groups", "size": 8, "tag": "group"}


@pytest.mark.parametrize(
    "plain", [None, "groups", {}, {"name": 3}, {"name": "groups", "size": [1]}, {"name": "x", 3: 1}]
)
def test_what_is_no_spec_is_refused(plain: Any) -> None:
    with pytest.raises(Refused):
        SamplerSpec.from_plain(plain)


def test_a_spec_that_goes_on_for_ever_is_refused() -> None:
    deep: dict[str, Any] = {"name": "ranks"}
    deep["of"] = deep
    with pytest.raises(Refused, match="at most 8 deep"):
        SamplerSpec.from_plain(deep)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (sampler("nosuch"), "no sampler 'nosuch'; this plane has 'sequential', 'groups'"),
        (sampler("groups", sise=8), "'groups' has no setting 'sise'; it has 'size', 'tag'"),
        (sampler("groups"), "'groups' needs 'size'; it has 'size', 'tag'"),
        (sampler("sequential", of=groups(2)), "'sequential' wraps no other sampler"),
        (groups(0), "'groups': size must be .* not 0"),
        (sampler("groups", size=True), "size must be .* not True"),
        (sampler("groups", size=2, tag=3), "tag must be .* not 3"),
        (ranks(0), "world_size must be .* not 0"),
        (ranks(2, "each"), "mode must be one of 'disjoint', 'same', not 'each'"),
        (ranks(2, "same", "ids"), "balance must be the name of a field, and mode 'disjoint'"),
        (ranks(2, of=ranks(2)), "ranks cannot be made of ranks"),
        (staleness(of=balanced(2, "ids", of=ranks(2))), "staleness cannot be outside of ranks"),
        (balanced(0, "ids"), "parts must be .* not 0"),
        (sampler("balanced", parts=2, field=1), "field must be .* not 1"),
        (sampler("staleness", tag=1), "tag must be .* not 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(spec: SamplerSpec, says: str) -> None:
    with pytest.raises(Refused, match=says):
        SamplerRegistry().build(spec)


class Newest(Sampler):
    """A user's own: newest first, at most ``most`` at a time."""

    def __init__(self, most: int) -> None:
        if most == 13:
            raise ValueError("unlucky")
        self.most = most
        self.rows: dict[Candidate, None] = {}

    def offer(self, row: Candidate) -> None:
        self.rows[row] = None

    def withdraw(self, row: Candidate) -> None:
        del self.rows[row]

    def draw(self, demand: Demand) -> Drawn | None:
        if demand.count > min(self.most, len(self.rows)):
            return None
        rows = sorted(self.rows, key=lambda row: -row.arrival)[: demand.count]
        for row in rows:
            del self.rows[row]
        return Drawn(rows)

    def shortfall(self, demand: Demand) -> str:
        return f"at most {self.most}"


def test_a_users_sampler_is_named_by_its_registration() -> None:
    registry = SamplerRegistry({"newest": Newest})
    assert isinstance(registry.build(sampler("newest", most=3)), Newest)
    wrapped = registry.build(balanced(2, "ids", of=sampler("newest", most=3)))
    assert wrapped.fields == {"ids"}
    with pytest.raises(Refused, match=r"'newest' could not be made with .*ValueError: unlucky"):
        registry.build(sampler("newest", most=13))
    for name, cls in {"groups": Newest, "mine": int, "abstract": Sampler}.items():
        with pytest.raises(Refused, match=f"'{name}'"):
            SamplerRegistry({name: cls})  # type: ignore[dict-item]
