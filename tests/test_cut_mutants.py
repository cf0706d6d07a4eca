"""The test of the test: faults planted into the policies of a cut, each of which the state machine must find."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from policies import capture, capture_table, cut
from policies.batching import Batching
from policies.capture import CallCapture
from policies.capture_table import CaptureTable
from policies.cleanup import Cleanup
from policies.cut import CutTransaction
from policies.receipts import CUT_ERROR, DURABLE_PREFIX, failure
from tests.cut_machine import Cuts

SEARCH = settings(max_examples=3000, stateful_step_count=40, phases=[Phase.generate], database=None)
Plant = Callable[[pytest.MonkeyPatch], None]


def replacing(owner: Any, name: str, mutant: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, mutant)


def around(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """The mutant is made from what it replaces."""
    return replacing(owner, name, make(getattr(owner, name)))


def seal_all(self: Any, flight: Any, ack: Any, now: float) -> None:
    for row, key, digest in zip(flight.rows, flight.keys, flight.sent.digests, strict=True):
        self._stored.append(cut._Stored(row, key, digest, None))


def one_spoils_all(original: Any) -> Any:
    def validate(self: Any, flight: Any, ack: Any, now: float) -> None:
        original(self, flight, ack, now)
        if any(stored.fault is not None for stored in self._stored):
            wrong = (stored._replace(fault="one row was wrong") for stored in self._stored)
            self._stored = type(self._stored)(wrong)

    return validate


def tokens_dropped(original: Any) -> Any:
    def roll_back(self: Any, frozen: Any) -> None:
        original(self, frozen)
        self._drop_front(frozen.tokens)

    return roll_back


def never_rolled_back(self: Any, row: Any, reason: str, cause: str, now: float) -> None:
    self._answers[row.identity] = failure(row.identity, reason, cause)


def advertised(original: Any) -> Any:
    def fail(self: Any, row: Any, reason: str, cause: str, now: float) -> None:
        original(self, row, reason, cause, now)
        answer = self._answers[row.identity]
        if answer.reason == CUT_ERROR:
            keys = (row.identity.chunk_key(0),)
            self._answers[row.identity] = replace(answer, disposition=DURABLE_PREFIX, keys=keys, reason=None)

    return fail


def no_deadline_after_packing(original: Any) -> Any:
    def begin_put(self: Any, number: int, sent: Any, now: float) -> Any:
        return original(self, number, sent, -math.inf)

    return begin_put


def retries_go_on(original: Any) -> Any:
    def ending(self: Any, now: float) -> Any:
        return None if any(flight.alone for flight in self._flights.values()) else original(self, now)

    return ending


def again_and_again(original: Any) -> Any:
    def fail_batch(self: Any, flight: Any, cause: str, now: float) -> None:
        flight.alone = False
        original(self, flight, cause, now)

    return fail_batch


def key_given_twice(original: Any) -> Any:
    def new_key(self: Any) -> Any:
        key = original(self)
        self._next_index -= 1
        return key

    return new_key


def tail_cut(original: Any) -> Any:
    def freeze(self: Any) -> Any:
        self._cut_at = self._length
        return original(self)

    return freeze


def one_too_few(original: Any) -> Any:
    return lambda self, count: original(self, count - 1)


def old_digest(original: Any) -> Any:
    return lambda self, frozen, key, digest: original(self, frozen, key, frozen.before)


def whole_too_soon(original: Any) -> Any:
    return lambda capture: replace(original(capture), finish_reason=capture.finish_reason)


def out_of_order(original: Any) -> Any:
    def receipt(self: Any, now: float) -> Any:
        made = original(self, now)
        return replace(made, acknowledgements=made.acknowledgements[::-1])

    return receipt


def chunks_leak(original: Any) -> Any:
    return lambda self, identity, now, inherited=(): replace(original(self, identity, now, inherited), unneeded=())


def inheritance_cleared(original: Any) -> Any:
    return lambda self, identity, now, inherited=(): original(self, identity, now, ())


def no_doubt(original: Any) -> Any:
    return lambda self, keys, in_doubt: original(self, keys, False)


def found_nothing_so_it_is_gone(self: Any, batch: Any, removed: int, now: float) -> None:
    self._cleared += len(batch.keys)


def one_layout_for_all(original: Any) -> Any:
    class Blind:
        layout = None

        def __init__(self, row: Any) -> None:
            self.row, self.tokens, self.nbytes = row, row.tokens, row.nbytes

    def add(self: Any, row: Any) -> Any:
        batch = original(self, Blind(row))
        return None if batch is None else tuple(blind.row for blind in batch)

    return add


def unbounded(original: Any) -> Any:
    return lambda self, max_rows, max_tokens, max_bytes: original(self, max_rows, max_tokens, 1 << 40)


def uneven_extras_pass(extras: Any, tokens: int) -> None:
    return None


def standing_everywhere(patch: pytest.MonkeyPatch) -> None:
    mutant = whole_too_soon(capture_table.standing)
    for module in (capture_table, cut):
        patch.setattr(module, "standing", mutant)


MUTANTS: dict[str, Plant] = {
    "sealed before the acknowledgement is validated": replacing(CutTransaction, "_validate", seal_all),
    "one bad row fails its batch": around(CutTransaction, "_validate", one_spoils_all),
    "a roll-back loses the tokens": around(CallCapture, "roll_back", tokens_dropped),
    "no roll-back at all": replacing(CutTransaction, "_fail", never_rolled_back),
    "a key is advertised after a failed seal": around(CutTransaction, "_fail", advertised),
    "the deadline is checked only between batches": around(CutTransaction, "_begin_put", no_deadline_after_packing),
    "retries go on after the deadline": around(CutTransaction, "_ending", retries_go_on),
    "a row is tried for ever": around(CutTransaction, "_fail_batch", again_and_again),
    "what a failed put wrote is left": replacing(CutTransaction, "_throw_away", lambda *_: None),
    "a key is given to two puts": around(CallCapture, "new_key", key_given_twice),
    "the held-back tail is cut": around(CallCapture, "freeze", tail_cut),
    "a sealed token stays live": around(CallCapture, "_drop_front", one_too_few),
    "the digest is that of the chain before": around(CallCapture, "seal", old_digest),
    "a poisoned call is sealed": replacing(CallCapture, "holds", lambda *_: True),
    "a call with a live tail is said to be whole": standing_everywhere,
    "the receipt has another order": around(CutTransaction, "_receipt", out_of_order),
    "chunks of a superseded attempt are forgotten": around(CaptureTable, "admit", chunks_leak),
    "the chain that a replacement goes on from is cleared": around(CaptureTable, "admit", inheritance_cleared),
    "a put without an answer is taken for one that failed": around(CutTransaction, "_throw_away", no_doubt),
    "a clear that found nothing settles a put in doubt": replacing(Cleanup, "_succeeded", found_nothing_so_it_is_gone),
    "rows of different layouts share a put": around(Batching, "add", one_layout_for_all),
    "bytes are not limited": around(Batching, "__init__", unbounded),
    "extras of another length are taken": replacing(capture, "extras_fault", uneven_extras_pass),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_machine_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine ends with, an assertion of its own or an error that the fault led to, it ends."""
    MUTANTS[name](monkeypatch)
    with pytest.raises(Exception):  # noqa: B017
        run_state_machine_as_test(Cuts, settings=SEARCH)
