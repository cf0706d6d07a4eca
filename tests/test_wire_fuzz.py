"""No message of any content, also from a peer with the secret, stops a server or changes what is stored elsewhere, and
each request that can be read is answered."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.codec import Message, decode_columns, decode_messages
from policies.errors import WireError
from policies.operations import CONTROLLER
from tests.fuzz_wire import Victim, hunt
from tests.wire_mutations import Frames, Recorded, record, spoil

frames = st.lists(st.binary(max_size=200), max_size=4)


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    return record(tmp_path_factory.mktemp("fuzz"))[0]


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Victim]:
    monkeypatch.chdir(tmp_path)  # a spoilt path of a checkpoint file is a path all the same
    victim = Victim()
    yield victim
    victim.close()


def test_every_operation_of_controller_and_unit_is_among_what_is_spoilt(tmp_path: Path) -> None:
    recorded, known = record(tmp_path)
    assert set(known) == {CONTROLLER, "unit"}
    for server, operations in known.items():
        assert {op for message in recorded if message.to == server for op in message.ops} == operations


@given(frames)
def test_any_frames_are_read_or_refused(sent: Frames) -> None:
    try:
        read = decode_messages([memoryview(frame) for frame in sent])
    except WireError:
        return
    assert all(isinstance(message, Message | WireError) for message in read)


@given(st.randoms(use_true_random=False), st.data())
@settings(max_examples=300)
def test_a_spoilt_message_is_read_or_refused(
    messages: list[Recorded], chance: random.Random, data: st.DataObject
) -> None:
    sent = spoil(chance, data.draw(st.sampled_from(messages)).frames)
    try:
        read = decode_messages([memoryview(frame) for frame in sent])
    except WireError:
        return
    for message in read:
        if isinstance(message, Message) and "columns" in message.body:
            try:
                decode_columns(message.body["columns"], message.buffers)
            except WireError:
                continue


def test_spoilt_messages_stop_no_server_and_change_nothing_and_each_that_can_be_read_is_answered(
    messages: list[Recorded], victim: Victim
) -> None:
    """Every recorded message, each spoilt in several ways, to the server it was meant for and to the other one."""
    chance = random.Random(7)
    for recorded in messages:
        for to in (CONTROLLER, "unit"):
            victim.suffer(to, [spoil(chance, recorded.frames) for _ in range(6)])
    victim.check()


@given(st.lists(frames, min_size=1, max_size=8))
@settings(max_examples=40)
def test_random_frames_stop_no_server_and_change_nothing(sent: list[Frames]) -> None:
    with Victim() as victim:
        for to in (CONTROLLER, "unit"):
            victim.suffer(to, sent)
        victim.check()


@pytest.mark.slow
def test_a_hunt_for_messages_that_hurt_finds_none() -> None:
    """Forty seconds of `tests.fuzz_wire`, another seed for each day of the year."""
    assert hunt(40, seed=time.localtime().tm_yday) > 1000


def test_the_check_sees_a_changed_row_and_a_missing_answer(victim: Victim) -> None:
    """What the tests above rely on."""
    victim.client.put("kept", ["k0"], {"ids": [np.arange(1)]})
    with pytest.raises(AssertionError, match="stored"):
        victim.check()
    with pytest.raises(AssertionError, match="unanswered"):
        victim.require_answers(victim.peers[CONTROLLER], Counter({5: 1}), seconds=0.2)
