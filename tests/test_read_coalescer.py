"""The shell around coalescing: tasks, futures and a timer over a plane that misbehaves."""

from __future__ import annotations

import asyncio
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.read_coalescer import TURNS, ReadCoalescer
from policies.answers import CORRUPT, UNREACHABLE, Batch
from policies.calls import CallIdentity
from policies.chain import CHUNK_FIELDS, Chain, ChainDigest, ChainRefusal
from policies.config import CoalescerConfig
from policies.errors import (
    ClosedError,
    KeyCorrupt,
    KeyMissing,
    RegraftError,
    RemoteError,
    RequestTimeout,
    Unreachable,
)
from policies.receipts import Continuation
from tests.fake_plane import FakePlane
from tests.generated_tokens import chain, request, tokens

CALL = CallIdentity("g0", "c0")


def filled(count: int, gets: tuple[str, ...] = ()) -> FakePlane:
    """A plane with rows k0 .. of one token each: the row's own number."""
    plane = FakePlane(gets=gets)
    for number in range(count):
        run = tokens(number, 1)
        plane.rows[f"k{number}"] = {name: getattr(run, name) for name in CHUNK_FIELDS}
    return plane


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(row["ids"][0]) for row in rows]


def coalescer(plane: FakePlane, **knobs: Any) -> ReadCoalescer:
    return ReadCoalescer(plane, CoalescerConfig(**knobs))


async def ended(*reads: Any) -> list[Any]:
    return await asyncio.gather(*reads, return_exceptions=True)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6),
    st.lists(st.sampled_from(("ok", "fail")), max_size=6),
    st.sets(st.integers(0, 9), max_size=2),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=3),
    st.integers(1, 4),
)
@settings(max_examples=60)
def test_every_caller_gets_its_own_rows_or_its_own_error(
    asked: list[list[int]], script: list[str], bad: set[int], leaving: list[tuple[int, int]], max_keys: int
) -> None:
    """Invariant 9, whatever GETs fail, whatever keys are bad and whoever leaves at whatever turn."""

    async def scenario() -> None:
        plane = filled(10, tuple(script))
        plane.bad = {f"k{n}": CORRUPT for n in bad}
        reader = coalescer(plane, max_keys=max_keys, max_waiting=3)
        tasks = [asyncio.ensure_future(reader.read([f"k{n}" for n in keys])) for keys in asked]
        for turn in range(13):
            for index, at in leaving:
                if at == turn and index < len(tasks):
                    tasks[index].cancel()
            await asyncio.sleep(0)
        answers = await ended(*tasks)
        for index, (keys, answer) in enumerate(zip(asked, answers, strict=True)):
            if isinstance(answer, asyncio.CancelledError):
                assert index in {who for who, _ in leaving}
            elif isinstance(answer, KeyCorrupt):
                assert bad & set(keys)
            elif isinstance(answer, Unreachable):
                assert "fail" in script
            else:
                assert numbers(answer) == keys and not bad & set(keys)
        assert all(len(keys) <= max_keys and len(set(keys)) == len(keys) for keys in plane.get_keys)
        assert reader.statistics()["waiting"] == 0
        await reader.close()

    asyncio.run(scenario())


async def test_one_missing_key_and_an_unreachable_unit_fail_only_those_who_asked() -> None:
    """64 callers; key 17 was never sealed, a unit with six of the others is down."""
    plane = filled(64)
    del plane.rows["k17"]
    plane.bad = {f"k{n}": UNREACHABLE for n in (3, 4, 5, 30, 31, 32)}
    reader = coalescer(plane)
    answers = await ended(*(reader.read([f"k{n}"]) for n in range(64)))
    kinds = [type(answer) for answer in answers]
    assert (kinds.count(list), kinds.count(KeyMissing), kinds.count(Unreachable)) == (57, 1, 6)
    assert kinds[17] is KeyMissing and "u1" in str(answers[30])
    assert [len(keys) for keys in plane.get_keys] == [64, 3, 3], "what a unit failed to deliver is tried again once"


async def test_every_waiter_of_a_key_learns_the_real_error() -> None:
    reader = coalescer(FakePlane())
    answers = await ended(*(reader.read(["k0"]) for _ in range(8)))
    assert [type(answer) for answer in answers] == [KeyMissing] * 8
    assert all("k0" in str(answer) for answer in answers)
    assert len({id(answer) for answer in answers}) == 8


@pytest.mark.parametrize("turns", range(8))
async def test_the_first_asker_leaves_and_the_others_get_the_row(turns: int) -> None:
    """Cancelled before the read leaves, while it is out, and after it has come back."""
    plane = filled(1)
    reader = coalescer(plane)
    tasks = [asyncio.ensure_future(reader.read(["k0"])) for _ in range(5)]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks[0].cancel()
    answers = await ended(*tasks)
    assert [numbers(answer) for answer in answers[1:]] == [[0]] * 4
    assert len(plane.get_keys) == 1


@pytest.mark.parametrize("turns", range(8))
async def test_all_askers_leave_and_a_later_read_works(turns: int) -> None:
    reader = coalescer(filled(1))
    tasks = [asyncio.ensure_future(reader.read(["k0"])) for _ in range(5)]
    for _ in range(turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await ended(*tasks)
    assert numbers(await reader.read(["k0"])) == [0]
    assert reader.statistics()["waiting"] == 0


async def test_a_get_that_never_answers_fails_its_own_keys_at_its_deadline() -> None:
    plane = filled(3, ("hang",))
    reader = coalescer(plane, timeout_s=0.2)
    hung = asyncio.ensure_future(reader.read(["k0"]))
    await asyncio.sleep(0.01)
    assert numbers(await reader.read(["k1", "k2"])) == [1, 2]
    assert not hung.done()
    with pytest.raises(RequestTimeout, match="k0"):
        await hung
    assert reader.statistics()["in_flight"] == 0


async def test_what_one_caller_does_to_its_rows_no_other_sees() -> None:
    reader = coalescer(filled(1))
    first, second = await asyncio.gather(reader.read(["k0"]), reader.read(["k0"]))
    first[0]["extra"] = 1
    assert "extra" not in second[0]
    with pytest.raises(ValueError, match="read-only"):
        first[0]["ids"][0] = 7


async def test_a_plane_that_breaks_its_word_costs_only_the_read() -> None:
    class Broken(FakePlane):
        async def stream(self, *args: Any, **options: Any) -> Batch:
            raise KeyError("a bug")

    reader = coalescer(Broken())
    with pytest.raises(RemoteError, match="a bug"):
        await reader.read(["k0"])
    with pytest.raises(RemoteError):
        await reader.read(["k0"])


async def test_close_answers_everybody() -> None:
    plane = filled(2, ("hang",))
    reader = coalescer(plane)
    waiting = [asyncio.ensure_future(reader.read([f"k{n}"])) for n in range(2)]
    await asyncio.sleep(0)
    await reader.close()
    assert [type(answer) for answer in await ended(*waiting)] == [ClosedError] * 2
    with pytest.raises(ClosedError):
        await reader.read(["k0"])
    assert plane.closed


def staged(plane: FakePlane, cuts: tuple[int, ...], version: int = 0) -> Continuation:
    """A chain of ``cuts[-1]`` tokens in chunks that end at ``cuts``."""
    whole, start, keys = chain(cuts[-1], version), 0, []
    for index, end in enumerate(cuts):
        keys.append(CALL.chunk_key(index))
        plane.rows[keys[-1]] = {name: getattr(whole, name)[start:end] for name in CHUNK_FIELDS}
        start = end
    digest = ChainDigest.of(whole).hexdigest()
    return Continuation(request(CALL.next_attempt()), tuple(keys), cuts[-1], digest)


async def test_a_chain_comes_back_whole_and_crosses_a_process() -> None:
    plane = FakePlane()
    reader = coalescer(plane)
    answer = await reader.read_chain(staged(plane, (3, 8, 9)), 0)
    answer = pickle.loads(pickle.dumps(answer))
    assert isinstance(answer, Chain)
    assert answer.ids.tolist() == list(range(9)) and answer.versions.dtype == np.int32
    assert reader.statistics()["chains_restored"] == 1


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(CORRUPT, "chunk_corrupt"), (UNREACHABLE, "chunk_unreachable"), ("cleared", "chunk_cleared")],
)
async def test_a_chunk_that_cannot_be_read_is_a_counted_refusal(verdict: str, reason: str) -> None:
    plane = FakePlane()
    continuation = staged(plane, (3, 8))
    plane.bad[continuation.keys[1]] = verdict
    reader = coalescer(plane)
    answer = await reader.read_chain(continuation, 0)
    assert isinstance(answer, ChainRefusal)
    assert answer.reason == reason and continuation.keys[1] in answer.cause
    assert reader.statistics()[f"refused_{reason}"] == 1


async def test_a_missing_chunk_and_a_wrong_one_are_refused() -> None:
    plane = FakePlane()
    continuation = staged(plane, (3, 8))
    reader = coalescer(plane)
    plane.rows[continuation.keys[0]]["ids"] = np.array([7, 7, 7], np.int32)
    wrong = await reader.read_chain(continuation, 0)
    del plane.rows[continuation.keys[1]]
    missing = await reader.read_chain(continuation, 0)
    assert isinstance(wrong, ChainRefusal) and isinstance(missing, ChainRefusal)
    assert (wrong.reason, missing.reason) == ("wrong_digest", "chunk_missing")


async def test_an_empty_chain_is_refused_without_a_read() -> None:
    plane = FakePlane()
    answer = await coalescer(plane).read_chain(Continuation(request(CALL), (), 0, ""), 0)
    assert isinstance(answer, ChainRefusal) and answer.reason == "no_chain"
    assert plane.get_keys == []


def test_an_error_of_a_key_crosses_a_process() -> None:
    error = pickle.loads(pickle.dumps(KeyMissing("gone", key="k0")))
    assert isinstance(error, RegraftError) and error.details == {"key": "k0"}


async def test_earlier_turns_and_chunks_are_asked_for_together_and_shared() -> None:
    """Four siblings resume: each has a chunk of its own, all have the same two finished turns before it."""
    plane = filled(4)
    for key in ("g0/c0", "g0/c1"):
        plane.rows[key] = plane.rows["k0"]
    reader = coalescer(plane)
    siblings = range(4)
    turns = [reader.read(["g0/c0", "g0/c1"], TURNS) for _ in siblings]
    chunks = [reader.read([f"k{n}"]) for n in siblings]
    await asyncio.gather(*turns, *chunks)
    assert sorted(plane.get_keys) == [("g0/c0", "g0/c1"), ("k0", "k1", "k2", "k3")]
    assert sorted({partition for partition, _ in plane.sources}) == ["staging", "train"]
    assert reader.statistics()["shared"] == 6


async def test_siblings_that_share_the_head_of_their_chain_read_it_once() -> None:
    """The second attempt of a call goes on from chunks of the first."""
    plane = FakePlane()
    long = staged(plane, (3, 8, 9))
    reader = coalescer(plane)
    for _ in range(2):
        answer = await reader.read_chain(long, 0)
        assert isinstance(answer, Chain) and answer.ids.tolist() == list(range(9))
        with pytest.raises(ValueError, match="read-only"):
            (await reader.read(long.keys[:1]))[0]["ids"][0] = 7
    assert [keys[0] for keys in plane.get_keys] == [long.keys[0], long.keys[1]]
    assert reader.statistics()["cached"] == 3


async def test_a_chain_comes_back_with_its_extras() -> None:
    plane = FakePlane()
    plain = staged(plane, (3, 8))
    routes = np.arange(8 * 4, dtype=np.uint8).reshape(8, 2, 2)
    whole = replace(chain(8), extras={"routes": routes})
    for key, start, end in zip(plain.keys, (0, 3), (3, 8), strict=True):
        plane.rows[key]["routes"] = routes[start:end]
    continuation = replace(plain, digest=ChainDigest.of(whole).hexdigest(), extras=("routes",))
    answer = await coalescer(plane).read_chain(continuation, 0)
    assert isinstance(answer, Chain) and np.array_equal(answer.extras["routes"], routes)


async def test_one_get_that_never_answers_delays_only_its_own_key() -> None:
    """64 restores of one worker; the unit loses the read of one of them, and answers all others."""
    plane = filled(64, ("hang",))
    reader = coalescer(plane, timeout_s=0.3)
    hung = asyncio.ensure_future(reader.read(["k0"]))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(reader.read([f"k{n}"])) for n in range(1, 64)]
    assert numbers([row for (row,) in await asyncio.gather(*others)]) == list(range(1, 64))
    assert not hung.done()
    with pytest.raises(RequestTimeout):
        await hung


async def test_a_hanging_unit_delays_nobody_else_s_rows_of_the_same_read() -> None:
    plane = filled(64)
    plane.units = {f"k{n}": f"u{n % 4}" for n in range(64)}
    plane.hanging = {"u1"}
    reader = coalescer(plane, timeout_s=0.3)
    reads = [asyncio.ensure_future(reader.read([f"k{n}"])) for n in range(64)]
    well = [read for n, read in enumerate(reads) if n % 4 != 1]
    assert len(await asyncio.gather(*well)) == 48
    assert not any(read.done() for n, read in enumerate(reads) if n % 4 == 1)
    plane.hanging = set()
    lost = [read for n, read in enumerate(reads) if n % 4 == 1]
    assert numbers([row for (row,) in await asyncio.gather(*lost)]) == list(range(1, 64, 4)), "back before the retry"
    assert plane.unit_gets == {"u0": 1, "u1": 3, "u2": 1, "u3": 1}
    await reader.close()


async def test_a_unit_that_is_down_for_a_while_costs_a_counted_number_of_gets() -> None:
    """Restores go on all the time. Those on other units never fail; those on this one fail with its name, and succeed
    again after it is back."""
    plane = filled(64)
    plane.units = {f"k{n}": f"u{n % 4}" for n in range(64)}
    plane.hanging = {"u1"}
    reader = coalescer(plane, timeout_s=0.05, probe_after_s=0.1)
    failures, rounds = [], 0
    while len(failures) < 64:
        rounds += 1
        answers = await ended(*(reader.read([f"k{n}"]) for n in range(64)))
        assert all(isinstance(answer, list) for n, answer in enumerate(answers) if n % 4 != 1)
        failures += [answer for n, answer in enumerate(answers) if n % 4 == 1]
    assert all(isinstance(answer, Unreachable) and "u1" in str(answer) for answer in failures)
    statistics = reader.statistics()
    assert rounds == 4 and statistics["retried_keys"] == 16
    assert plane.unit_gets["u1"] - statistics["probes"] == 3, "one read, and the halves of it"
    plane.hanging = set()
    while isinstance((await ended(reader.read(["k1"])))[0], Unreachable):
        await asyncio.sleep(0.02)
    assert numbers(await reader.read(["k5"])) == [5]
    await reader.close()


def test_callers_of_several_loops_and_threads_are_answered_on_their_own() -> None:
    """A coalescer that lives on the loop of one thread, and one that was made where there is none."""

    def in_a_thread(reader: ReadCoalescer, numbers_asked: list[int], answers: dict[int, int]) -> threading.Thread:
        async def ask(number: int) -> None:
            (row,) = await reader.read([f"k{number}"])
            answers[number] = int(row["ids"][0])

        async def all_of_them() -> None:
            await asyncio.gather(*map(ask, numbers_asked))

        thread = threading.Thread(target=asyncio.run, args=(all_of_them(),))
        thread.start()
        return thread

    async def scenario(reader: ReadCoalescer, plane: FakePlane) -> None:
        answers: dict[int, int] = {}
        threads = [in_a_thread(reader, list(range(n, 40, 4)), answers) for n in range(4)]
        assert numbers(await reader.read(["k0", "k39"])) == [0, 39]
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert answers == {n: n for n in range(40)}
        statistics = await asyncio.to_thread(reader.statistics)
        assert statistics["in_flight"] == statistics["waiting"] == 0
        assert len(plane.get_keys) == statistics["gets"] < 40
        await reader.close()
        assert plane.closed
        with pytest.raises(ClosedError):
            await reader.read(["k0"])

    async def at_home() -> None:
        plane = filled(40)
        await scenario(coalescer(plane), plane)

    asyncio.run(at_home())
    plane = filled(40)
    asyncio.run(scenario(coalescer(plane), plane))


async def test_a_caller_of_another_loop_may_leave_at_any_moment() -> None:
    plane = filled(2, ("hang",))
    reader = coalescer(plane)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(["k0"]), 0.05)

    await asyncio.to_thread(asyncio.run, give_up())
    assert numbers(await reader.read(["k1"])) == [1]
    plane.gate.set()
    assert numbers(await reader.read(["k0"])) == [0]
    await reader.close()


def test_when_its_loop_ends_everybody_is_told() -> None:
    plane = filled(1, ("hang",))
    readers: list[ReadCoalescer] = []

    async def home() -> None:
        readers.append(coalescer(plane))
        while not plane.get_keys:
            await asyncio.sleep(0.01)

    async def elsewhere() -> None:
        while not readers:
            await asyncio.sleep(0.01)
        with pytest.raises(ClosedError, match="closed during the read"):
            await readers[0].read(["k0"])
        with pytest.raises(ClosedError):
            await readers[0].read(["k0"])

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(asyncio.run, elsewhere())
        asyncio.run(home())
        waiting.result()
