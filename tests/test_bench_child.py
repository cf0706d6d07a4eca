"""A benchmark's processes: they answer in turn, their errors are heard, and none is left."""

from __future__ import annotations

import os
from collections.abc import Generator

import psutil
import pytest

from recipes.bench.child import Child
from recipes.bench.scenario import CheckFailed


def add_up(start: int) -> Generator[int, int, None]:
    total = start
    while True:
        total += yield total


def say_pid_then_die() -> Generator[int, object, None]:
    yield os.getpid()
    os._exit(7)


def fail() -> Generator[int, object, None]:
    raise ValueError("the port is taken")
    yield 0


def test_a_child_answers_each_request_in_turn() -> None:
    child = Child("adder", add_up, 5)
    try:
        assert (child.first, child.ask(2), child.ask(3)) == (5, 7, 10)
    finally:
        child.close()


def test_an_error_in_a_child_is_heard_with_its_last_words() -> None:
    with pytest.raises(CheckFailed, match="the port is taken"):
        Child("failing", fail)


def test_a_child_that_dies_is_named_and_leaves_nothing() -> None:
    child = Child("dying", say_pid_then_die)
    with pytest.raises(CheckFailed, match=r"the process dying died \(exit code 7\)"):
        child.ask()
    child.close()
    assert not psutil.pid_exists(child.first)
