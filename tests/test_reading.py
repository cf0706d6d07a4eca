"""The rows of one get while they come in: what is told, when, and what is left for the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.answers import CLEARED, OK, Batch, Placed, Told
from policies.codec import Buffer, Message, encode_columns
from policies.columns import Column
from policies.errors import Unreachable
from policies.locations import Located, Read
from policies.reading import Reading

KEYS = ("a", "b", "c", "d")


def located(*reads: Read, fields: tuple[str, ...] = ("x",)) -> Located:
    return Located((OK,) * len(KEYS), {}, fields, reads)


def answer(field: str, values: list[int], bad: list[list[Any]] | None = None) -> Message:
    buffers: list[Buffer] = []
    columns = encode_columns({field: Column.dense(np.array(values, np.int64))}, buffers)
    return Message(0, "ok", {"parts": [{"bad": bad or [], "columns": columns}]}, buffers)


def rows(batch: Told) -> dict[str, dict[str, int]]:
    assert isinstance(batch, Batch)
    return {key: {name: int(value) for name, value in row.items()} for key, row in batch.rows()}


def test_the_rows_of_a_unit_are_told_when_it_answers_and_no_row_twice() -> None:
    told: list[Told] = []
    first, second = Read("u0", 0, ("x",), (0, 1), (0, 2)), Read("u1", 1, ("x",), (0, 1), (1, 3))
    reading = Reading(KEYS, located(first, second), told.append)
    reading.expect({"u0": [first], "u1": [second]})
    assert told == [Placed({"a": "u0", "c": "u0", "b": "u1", "d": "u1"})]
    reading.heard("u1", [second], answer("x", [1, 3]))
    assert rows(told[1]) == {"b": {"x": 1}, "d": {"x": 3}}
    reading.heard("u0", [first], Unreachable("gone"))
    assert isinstance(told[2], Batch) and set(told[2].errors()) == {"a", "c"} and "unit u0" in told[2].causes["a"]
    assert reading.rest().keys == ()


def test_a_row_whose_fields_lie_on_two_units_is_told_when_it_is_whole() -> None:
    told: list[Told] = []
    xs, ys = Read("u0", 0, ("x",), (0, 1, 2, 3), (0, 1, 2, 3)), Read("u1", 1, ("y",), (0, 1, 2, 3), (0, 1, 2, 3))
    reading = Reading(KEYS, located(xs, ys, fields=("x", "y")), told.append)
    reading.expect({"u0": [xs], "u1": [ys]})
    reading.heard("u0", [xs], answer("x", [0, 1, 2, 3]))
    assert len(told) == 1
    reading.heard("u1", [ys], answer("y", [4, 5, 6, 7]))
    assert rows(told[1]) == {key: {"x": n, "y": n + 4} for n, key in enumerate(KEYS)}


def test_a_row_that_may_have_moved_is_not_told_before_it_was_looked_for_again() -> None:
    told: list[Told] = []
    read = Read("u0", 0, ("x",), (0, 1, 2, 3), (0, 1, 2, 3))
    reading = Reading(KEYS, located(read), told.append)
    reading.expect({"u0": [read]})
    reading.heard("u0", [read], answer("x", [0, 2], [[1, CLEARED, "it moved"], [3, CLEARED, "it moved"]]))
    assert set(rows(told[1])) == {"a", "c"} and reading.rows_with(CLEARED).tolist() == [1, 3]
    reading.relocate(np.array([1, 3]), Located((OK, "missing"), {}, ("x",), ()))
    again = Read("u1", 7, ("x",), (0,), (1,))
    reading.expect({"u1": [again]})
    reading.heard("u1", [again], answer("x", [1]))
    assert rows(told[3]) == {"b": {"x": 1}}
    assert (reading.rest().keys, reading.rest().verdicts) == (("d",), (CLEARED,))


def test_without_a_listener_everything_is_left_for_the_end_in_the_order_asked() -> None:
    first, second = Read("u0", 0, ("x",), (0, 1), (3, 1)), Read("u1", 1, ("x",), (0, 1), (0, 2))
    reading = Reading(KEYS, located(first, second), None)
    reading.expect({"u0": [first], "u1": [second]})
    reading.heard("u0", [first], answer("x", [3, 1]))
    reading.heard("u1", [second], answer("x", [0, 2]))
    assert rows(reading.rest()) == {key: {"x": n} for n, key in enumerate(KEYS)}
