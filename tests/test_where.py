"""Filters over tags."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import Refused
from policies.where import predicate

ORDERED = {"<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b}


@given(st.integers(-3, 3), st.integers(-3, 3), st.sampled_from(["==", "!=", *ORDERED]))
def test_a_comparison_says_what_it_says_of_the_values(found: int, asked: int, op: str) -> None:
    expected = {"==": found == asked, "!=": found != asked}.get(op)
    if expected is None:
        expected = ORDERED[op](found, asked)
    assert predicate({"version": {"op": op, "value": asked}})({"version": found}) is expected


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 1)),
)
def test_a_row_matches_when_every_condition_holds(where: dict[str, int], tags: dict[str, int]) -> None:
    assert predicate(where)(tags) == all(tag in tags and tags[tag] == value for tag, value in where.items())


def test_no_filter_matches_every_row() -> None:
    assert predicate(None)({}) and predicate({})({"a": 1})


@pytest.mark.parametrize("op", ["==", "!=", "<", "in"])
def test_a_row_without_the_tag_matches_nothing(op: str) -> None:
    assert not predicate({"a": {"op": op, "value": [1]}})({"b": 1})


def test_values_without_an_order_are_neither_less_nor_greater() -> None:
    assert not predicate({"a": {"op": "<", "value": 3}})({"a": "x"})
    assert not predicate({"a": {"op": ">=", "value": 3}})({"a": "x"})


def test_in_looks_in_the_list() -> None:
    matches = predicate({"status": {"op": "in", "value": ["running", "pending"]}})
    assert matches({"status": "pending"}) and not matches({"status": "done"})


def test_a_mapping_without_op_is_compared_as_a_value() -> None:
    assert predicate({"a": {"x": 1}})({"a": {"x": 1}})
    assert predicate({"a": {"op": "==", "value": {"op": 1}}})({"a": {"op": 1}})


NONSENSE = [
    {"op": "~", "value": 1},
    {"op": "<"},
    {"op": ["<"], "value": 1},
    {"op": "in", "value": 3},
    {"op": "==", "value": 1, "x": 2},
]


@pytest.mark.parametrize("wanted", NONSENSE)
def test_a_filter_that_means_nothing_is_refused_by_its_tag(wanted: dict[str, object]) -> None:
    with pytest.raises(Refused, match="'version'"):
        predicate({"version": wanted})
