"""The test of the test: faults planted into the policies of reads, each of which the state machine must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from policies import coalescing, unit_watch
from policies.coalescing import Coalescing
from policies.coalescing_events import Answer, GetPlaced, Left
from policies.read_queue import Name, ReadQueue
from policies.row_cache import RowCache
from policies.unit_watch import UnitWatch
from tests import test_coalescing
from tests.coalescing_machine import Reads

SEARCH = settings(max_examples=1000, stateful_step_count=50, phases=[Phase.generate], database=None)
Plant = Callable[[pytest.MonkeyPatch], None]


def replacing(owner: Any, name: str, mutant: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, mutant)


def around(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """The mutant is made from what it replaces."""
    return replacing(owner, name, make(getattr(owner, name)))


def leaving_takes_the_key(original: Any) -> Any:
    def drop(self: Any, number: int) -> None:
        caller = self._callers.get(number)
        original(self, number)
        for key in caller.pending if caller is not None else ():
            name = Name(caller.source, key)
            if name in self._queue:
                self._queue.remove(name)

    return drop


def leaving_is_forgotten(original: Any) -> Any:
    return lambda self, event: [] if isinstance(event, Left) else original(self, event)


def queue_is_not_cleaned(self: Any, number: int) -> None:
    caller = self._callers.pop(number, None)
    for key in caller.pending if caller is not None else ():
        row = self._rows.get(Name(caller.source, key))
        if row is not None:
            del row.wanters[number]


def tried_twice(original: Any) -> Any:
    def lose(self: Any, number: int, flight: Any, unit: Any, errors: Any, now: float) -> None:
        for key in errors:
            self._rows[Name(flight.source, key)].tried = False
        original(self, number, flight, unit, errors, now)

    return lose


def second_half_lost(original: Any) -> Any:
    def lose(self: Any, number: int, flight: Any, unit: Any, errors: Any, now: float) -> None:
        before = len(self._again)
        original(self, number, flight, unit, errors, now)
        if len(self._again) == before + 2:
            self._again.pop()

    return lose


def rows_in_arrival_order(self: Any, number: int, caller: Any, key: str, row: Any) -> None:
    caller.rows[key] = row
    caller.pending.discard(key)
    if not caller.pending and not caller.unadmitted:
        del self._callers[number]
        self._out.append(Answer(number, tuple(caller.rows.values())))


def answered_too_early(self: Any, number: int, caller: Any, key: str, row: Any) -> None:
    caller.rows[key] = row
    caller.pending.discard(key)
    if not caller.pending:
        self._callers.pop(number, None)
        self._out.append(Answer(number, tuple([caller.rows.get(k, row) for k in caller.keys])))


def first_wanter_only(original: Any) -> Any:
    def deliver(self: Any, name: Name, row: Any) -> None:
        wanted = self._rows[name]
        wanted.wanters = dict(list(wanted.wanters.items())[:1])
        original(self, name, row)

    return deliver


def error_for_all(original: Any) -> Any:
    def refuse(self: Any, name: Name, error: Any) -> None:
        original(self, name, error)
        for number in [n for n, caller in self._callers.items() if caller.pending][:1]:
            self._drop(number)
            self._out.append(Answer(number, error=error))

    return refuse


def error_told_once(original: Any) -> Any:
    def refuse(self: Any, name: Name, error: Any) -> None:
        wanted = self._rows.get(name)
        for number in list(wanted.wanters)[1:] if wanted is not None else ():
            self._drop(number)
        original(self, name, error)

    return refuse


def not_shared_in_flight(original: Any) -> Any:
    def start(self: Any, source: Any, names: Any, *rest: Any, **more: Any) -> None:
        original(self, source, names, *rest, **more)
        for name in names[:1]:
            self._rows.pop(name, None)

    return start


def one_too_many(original: Any) -> Any:
    def build(self: Any, max_keys: int, max_tokens: int, max_bytes: int) -> None:
        original(self, max_keys + 1, max_tokens, max_bytes)

    return build


def no_limit_of(which: int) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def build(self: Any, *limits: int) -> None:
            original(self, *(1_000_000 if i == which else limit for i, limit in enumerate(limits)))

        return build

    return make


def sources_mixed(original: Any) -> Any:
    return lambda self, name: next((row for other, row in self._rows.items() if other.key == name.key), None)


def put_back_twice(original: Any) -> Any:
    def put_back(self: Any, names: Any, waiting: Any) -> None:
        original(self, names, waiting)
        self._size += len(names)

    return put_back


def slot_too_many(original: Any) -> Any:
    return lambda self, now: original(self, now) - 1


def no_timer(original: Any) -> Any:
    return lambda self, now: None


def close_without_answers(original: Any) -> Any:
    def close(self: Any) -> None:
        self._closed = True

    return close


def never_admitted_again(original: Any) -> Any:
    def admit(self: Any, now: float) -> None:
        if len(self._backlog) > 1 and len(self._queue) >= self._config.max_waiting:
            self._backlog.pop()
        original(self, now)

    return admit


def placement_ignored(original: Any) -> Any:
    return lambda self, event: [] if isinstance(event, GetPlaced) else original(self, event)


def never_avoided(self: Any, now: float, slow_s: float) -> frozenset[str]:
    return frozenset()


def held_for_ever(original: Any) -> Any:
    def release(self: Any, now: float) -> None:
        for unit in list(self._held):
            if self._units.down(unit) is None:
                return
        original(self, now)

    return release


def never_down(original: Any) -> Any:
    def failed(self: Any, unit: str, read: int, next_read: int, *rest: Any) -> None:
        original(self, unit, read, next_read, *rest)
        self._units[unit].struck = None

    return failed


def down_at_the_first_failure(original: Any) -> Any:
    def failed(self: Any, unit: str, read: int, next_read: int, *rest: Any) -> None:
        original(self, unit, read, -1, *rest)
        original(self, unit, read, -1, *rest)

    return failed


def never_back(original: Any) -> Any:
    def probed(self: Any, unit: str, read: int, back: bool, now: float) -> None:
        original(self, unit, read, False, now)

    return probed


def back_whatever_the_probe_says(original: Any) -> Any:
    def probed(self: Any, unit: str, read: int, back: bool, now: float) -> None:
        original(self, unit, read, True, now)

    return probed


def probed_without_a_pause(original: Any) -> Any:
    def failed(self: Any, unit: str, read: int, next_read: int, error: Any, row: Any, now: float) -> None:
        original(self, unit, read, next_read, error, row, now)
        if self._units[unit].down is not None:
            self._units[unit].down.next_probe = now

    return failed


def answers_do_not_heal(original: Any) -> Any:
    def answered(self: Any, unit: str, read: int, now: float) -> None:
        struck = self._units[unit].struck if unit in self._units else None
        original(self, unit, read, now)
        self._units[unit].struck = struck

    return answered


def cached_under_the_wrong_name(original: Any) -> Any:
    return lambda self, name, row: original(self, Name(name.source, "k1"), row)


MUTANTS: dict[str, Plant] = {
    "a caller who leaves takes the key from others": around(Coalescing, "_drop", leaving_takes_the_key),
    "a caller who leaves is answered": around(Coalescing, "handle", leaving_is_forgotten),
    "a key that nobody wants is read": replacing(Coalescing, "_drop", queue_is_not_cleaned),
    "half of what failed is never tried again": around(Coalescing, "_lose", second_half_lost),
    "rows come in the order of their arrival": replacing(Coalescing, "_give", rows_in_arrival_order),
    "a caller is answered before all was asked for": replacing(Coalescing, "_give", answered_too_early),
    "only the first who wants a key gets it": around(Coalescing, "_deliver", first_wanter_only),
    "a bad key fails another caller": around(Coalescing, "_refuse", error_for_all),
    "only the first who wants a bad key hears of it": around(Coalescing, "_refuse", error_told_once),
    "a key in flight is not shared": around(Coalescing, "_start", not_shared_in_flight),
    "one key too many in a read": around(ReadQueue, "__init__", one_too_many),
    "no limit of tokens": around(ReadQueue, "__init__", no_limit_of(1)),
    "no limit of bytes": around(ReadQueue, "__init__", no_limit_of(2)),
    "a row of one source is cached for all": around(RowCache, "get", sources_mixed),
    "a row is cached under another key": around(RowCache, "add", cached_under_the_wrong_name),
    "what comes back is counted twice": around(ReadQueue, "put_back", put_back_twice),
    "one read too many at once": around(Coalescing, "_busy", slot_too_many),
    "no timer is set": around(Coalescing, "_due", no_timer),
    "closing answers nobody": around(Coalescing, "_close", close_without_answers),
    "who waits for room is forgotten": around(Coalescing, "_admit", never_admitted_again),
    "where keys are is not heard": around(Coalescing, "handle", placement_ignored),
    "units that are silent or down are asked": replacing(UnitWatch, "avoided", never_avoided),
    "the keys of a silent unit are never released": around(Coalescing, "_release", held_for_ever),
    "a unit never goes down": around(UnitWatch, "failed", never_down),
    "a unit is down at its first failure": around(UnitWatch, "failed", down_at_the_first_failure),
    "a unit that was down is never asked again": around(UnitWatch, "probed", never_back),
    "a probe that failed brings its unit back": around(UnitWatch, "probed", back_whatever_the_probe_says),
    "a probe leaves at once": around(UnitWatch, "failed", probed_without_a_pause),
    "one slow read is silence": replacing(unit_watch, "SILENT_READS", 1),
    "silence is never noticed": replacing(unit_watch, "SILENT_READS", 100),
    "what waits has the patience of a read's deadline": replacing(coalescing, "PATIENCE_S", 30.0),
}

RARE: dict[str, tuple[Plant, Callable[[], None]]] = {
    "a key is tried again and again": (
        around(Coalescing, "_lose", tried_twice),
        lambda: test_coalescing.test_a_read_that_fails_whole_is_tried_once_more(9, [4, 5]),
    ),
    "an answer does not make up for a failure": (
        around(UnitWatch, "answered", answers_do_not_heal),
        test_coalescing.test_an_answer_makes_up_for_a_failure,
    ),
}
"""Faults that the machine finds as well, though after a longer search, each with the example that names it."""


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever way it fails, assertions of the machine or errors of the mutant's own, it must not pass."""
    MUTANTS[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017
        run_state_machine_as_test(Reads, settings=SEARCH)


@pytest.mark.parametrize("name", RARE)
def test_an_example_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, example = RARE[name]
    example()
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        example()
