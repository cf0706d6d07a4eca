"""What goes wrong between a client and its plane: odd input, lost messages, callers and peers that leave or freeze.

Each test ends in a result or a named error; none may hang.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import zmq

from actors.client import AsyncDataPlaneClient, DataPlaneClient, PlaneAddress
from actors.storage_unit import StorageUnit
from actors.wire.loop import Loop
from actors.wire.secret import Doorkeeper, Secret, present, require
from policies.checksums import block_checksum
from policies.codec import encode_columns
from policies.columns import Column
from policies.errors import Refused, RegraftError, RequestTimeout, Unreachable, WireError
from policies.locations import UnitLocation
from policies.operations import Ask
from tests.plane_in_process import HOST, InProcessPlane, in_process_plane
from tests.test_client import held_bytes, wait_until

ROOT = Path(__file__).resolve().parent.parent
ONE = {"x": np.arange(1)}


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane(timeout=3.0) as running:
        yield running


@pytest.fixture
def client(plane: InProcessPlane) -> DataPlaneClient:
    return plane.client()


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda c: c.put("t", "ab", {"x": np.arange(2)}), Refused, "keys must be a list of strings"),
        (lambda c: c.clear("t", "ab"), Refused, "keys must be a list"),
        (lambda c: c.get("t", ["a"], "x"), Refused, "fields must be a list"),
        (lambda c: c.claim("t", "k", "ids", 1), Refused, "fields must be a list"),
        (lambda c: c.put("t", [1], ONE), Refused, "key must be a string, not int"),
        (lambda c: c.put("t", [None], ONE), Refused, "not NoneType"),
        (lambda c: c.get("t", [b"a"]), Refused, "not bytes"),
        (lambda c: c.put("t", ["a"], {1: np.arange(1)}), Refused, "field must be a string"),
        (lambda c: c.put(None, ["a"], ONE), Refused, "partition must be a string"),
        (lambda c: c.put("t", ["\ud800"], ONE), WireError, "no message can carry"),
        (lambda c: c.claim("t", "k", ["x"], 1 << 70), WireError, "no message can carry"),
        (lambda c: c.list("t", {"a": object()}), WireError, "no message can carry"),
        (lambda c: c.claim("t", "k", ["x"], -1), Refused, "at least 1"),
        (lambda c: c.claim("t", "k", [], 1), Refused, "named no field"),
        (lambda c: c.claim("t", "k", ["x"], 1, timeout=math.nan), Refused, "timeout of nan"),
        (lambda c: c.claim("t", "k", ["x"], 1, timeout=-1), Refused, "timeout of -1"),
        (lambda c: c.wait("t", ["a"], ["x"], timeout="soon"), Refused, "timeout of 'soon'"),
        (lambda c: c.get("t", ["a"], timeout=math.nan), Refused, "timeout of nan"),
        (lambda c: c.get("t", ["a"], timeout=0), RequestTimeout, "0 s passed"),
        (lambda c: c.put("t", [], {"x": np.zeros((0, 3))}), Refused, "without keys"),
        (lambda c: c.tag("t", ["a"], [{"score": np.float32(1)}]), Refused, "tags of key 'a'.*float32"),
        (lambda c: c.put("t", ["a"], ONE, tags=[{"span": (1, 2)}]), Refused, "tags of key 'a'.*tuple"),
        (lambda c: c.put("t", ["a"], ONE, tags=[{(1, 2): 3}]), Refused, "tags of key 'a'.*tuple"),
        (lambda c: c.put("t", ["a"], ONE, tags=[3]), Refused, "must be a mapping or None, not 3"),
        (lambda c: c.put("t", ["a"], ONE, tags=[{"deep": nested(500)}]), Refused, "64 deep"),
        (lambda c: c.put("t", ["a"], {"x": [nested(100_000)]}), WireError, "field 'x'.*64 deep"),
        (lambda c: c.put("t", ["a"], {"x": [1 << 80]}), WireError, "field 'x'.*msgpack"),
        (lambda c: c.put("t", ["a"], {"x": ["\ud800"]}), WireError, "field 'x'.*msgpack"),
    ],
)  # fmt: skip
def test_odd_input_is_refused_in_words_and_the_client_goes_on(
    client: DataPlaneClient, call: Callable[[DataPlaneClient], object], kind: type[RegraftError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        call(client)
    client.put("t", ["after"], ONE)
    assert client.list("t") == [("after", {})]


@pytest.mark.parametrize("key", ["", "a/b", "..", "\0", " ", "ключ🌶", "g7_s2_c0@a1#3", "k" * 3_000_000])
def test_any_text_is_a_key(client: DataPlaneClient, key: str) -> None:
    assert client.put("t", [key], ONE).keys == (key,)
    assert client.get("t", [key]).verdicts == ("ok",)
    assert list(client.claim("t", "actor", ["x"], 1)) == [key]
    assert client.clear("t", [key]) == 1


def test_nothing_asked_is_nothing_done(client: DataPlaneClient) -> None:
    client.put("t", ["a"], ONE)
    assert client.get("t", []).keys == () and client.clear("t", []) == 0
    client.wait("t", [], ["x"], timeout=0)
    client.tag("t", [], [])
    assert client.get("t", ["a"], []).columns == {}
    client.put("t", ["b"], {})
    assert client.list("t") == [("a", {}), ("b", {})]
    with pytest.raises(RequestTimeout):
        client.claim("t", "actor", ["x"], 2, timeout=0)


def test_a_claim_without_end_waits_and_wakes(plane: InProcessPlane, client: DataPlaneClient) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(plane.client().claim, "t", "actor", ["x"], 1, timeout=math.inf)
        wait_until(lambda: client.describe()["parked"] == 1)
        client.put("t", ["a"], ONE)
        assert list(waiting.result(10)) == ["a"]


@pytest.mark.parametrize("rows", [30, 100_000])
def test_arrays_of_any_layout_arrive_as_they_are(client: DataPlaneClient, rows: int) -> None:
    dense = np.arange(2.0 * rows).reshape(rows, 2)
    frozen = dense.copy()
    frozen.setflags(write=False)
    layouts = {"fortran": np.asfortranarray(dense), "frozen": frozen, "zero": np.broadcast_to(np.float64(7), (rows, 2))}
    layouts |= {"back": dense[::-1], "step": np.arange(4.0 * rows).reshape(rows, 4)[:, ::2]}
    keys = [f"k{i}" for i in range(rows)]
    client.put("t", keys, layouts)
    batch = client.get("t", keys)
    for name, sent in layouts.items():
        assert np.array_equal(batch[name].padded(), sent), name


def test_one_client_serves_many_threads(client: DataPlaneClient) -> None:
    def work(number: int) -> None:
        for i in range(20):
            key = f"{number}-{i}"
            client.put("t", [key], {"x": np.array([number])})
            assert int(client.get("t", [key])["x"][0]) == number
            assert client.clear("t", [key]) == 1

    with ThreadPoolExecutor(32) as pool:
        for done in [pool.submit(work, n) for n in range(32)]:
            done.result(60)
    assert client.list("t") == []


async def test_a_cancelled_claim_takes_no_rows(plane: InProcessPlane, client: DataPlaneClient) -> None:
    caller = AsyncDataPlaneClient(plane.address)
    doomed = asyncio.create_task(caller.claim("t", "actor", ["x"], 1, timeout=math.inf))
    await asyncio.sleep(0.1)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await asyncio.to_thread(wait_until, lambda: client.describe()["parked"] == 0)
    await caller.put("t", ["a"], ONE)
    assert list(await caller.claim("t", "actor", ["x"], 1, timeout=0)) == ["a"]
    await caller.close()


def test_rows_given_to_a_caller_that_has_left_go_to_the_next(plane: InProcessPlane, client: DataPlaneClient) -> None:
    """A claim is parked, its client goes without a word, and then its rows come."""
    leaving = plane.client()
    with ThreadPoolExecutor(1) as pool:
        parked = pool.submit(leaving.claim, "t", "actor", ["x"], 1, timeout=60)
        wait_until(lambda: client.describe()["parked"] == 1)
        leaving.close()
        assert isinstance(parked.exception(10), RegraftError)
        time.sleep(0.2)
        client.put("t", ["a"], ONE)
        assert list(client.claim("t", "actor", ["x"], 1, timeout=5)) == ["a"]
        assert client.describe()["answers_dropped"] == 1


def test_an_interrupted_caller_gives_back_what_it_waits_for(plane: InProcessPlane) -> None:
    script = """if True:
        import sys, numpy as np
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        with DataPlaneClient(PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10)) as client:
            try:
                print("waiting", flush=True)
                client.claim("t", "actor", ["x"], 1, timeout=float("inf"))
            except KeyboardInterrupt:
                client.put("t", ["a"], {"x": np.arange(1)})
                print(list(client.claim("t", "actor", ["x"], 1, timeout=0)))
    """
    with running(script, plane.address) as child:
        assert child.stdout is not None and child.stdout.readline() == "waiting\n"
        wait_until(lambda: plane.client().describe()["parked"] == 1)
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=20)[0] == "['a']\n"


@pytest.mark.parametrize("end", ["pass", "raise SystemExit(0)", "del client; gc.collect()"])
def test_a_client_never_holds_up_the_end_of_its_process(plane: InProcessPlane, end: str) -> None:
    script = f"""if True:
        import gc, sys, threading
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        client = DataPlaneClient(PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10))
        client.list("t")
        threading.Thread(target=lambda c=client: c.list("t"), daemon=True).start()
        {end}
    """
    with running(script, plane.address) as child:
        child.communicate(timeout=20)
        assert child.returncode == 0


def test_a_client_that_is_dropped_leaves_no_thread(plane: InProcessPlane) -> None:
    client = DataPlaneClient(plane.address)
    client.put("t", ["a"], ONE)
    thread = client._driver._loop.thread
    del client
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_descriptors_do_not_grow_with_requests(client: DataPlaneClient) -> None:
    """Fault: the 1024th socket."""
    client.put("t", ["a"], ONE)
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(lambda _: client.get("t", ["a"]), range(200)))
        before = len(list(Path("/proc/self/fd").iterdir()))
        list(pool.map(lambda _: client.get("t", ["a"]), range(1200)))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2


class Proxy:
    """Between a client and a plane: ``rule(direction, number)`` says how often message ``number`` is passed on."""

    def __init__(self, endpoint: str, secret: Secret, rule: Callable[[str, int], int]) -> None:
        self._loop, self.counts = Loop("proxy"), {"ask": 0, "answer": 0}
        self._keeper = Doorkeeper(secret)
        zap = self._loop.open(zmq.REP)
        zap.bind("inproc://zeromq.zap.01")
        front, back = self._loop.open(zmq.ROUTER), self._loop.open(zmq.DEALER)
        require(front, secret)
        present(back, secret)
        self.endpoint = f"tcp://{HOST}:{front.bind_to_random_port(f'tcp://{HOST}')}"
        back.connect(endpoint)
        peer: list[bytes] = []

        def pass_on(direction: str, to: zmq.Socket[bytes], frames: list[bytes]) -> None:
            self.counts[direction] += 1
            for _ in range(rule(direction, self.counts[direction])):
                to.send_multipart(frames)

        def from_client() -> None:
            identity, *frames = front.recv_multipart()
            peer[:] = [identity]
            pass_on("ask", back, frames)

        self._loop.read(zap, lambda: zap.send_multipart(self._keeper.answer(zap.recv_multipart())))
        self._loop.read(front, from_client)
        self._loop.read(back, lambda: pass_on("answer", front, [*peer, *back.recv_multipart()]))
        self._loop.start()

    def close(self) -> None:
        self._loop.stop()


@pytest.mark.parametrize("lost", ["ask", "answer"])
def test_a_lost_message_is_asked_again_and_applied_once(plane: InProcessPlane, lost: str) -> None:
    """Faults: one lost control message; a retry applies a write twice. The third message gets lost, each way."""
    proxy = Proxy(plane.address.endpoint, plane.secret, lambda way, n: int((way, n) != (lost, 3)))
    plane.client().put("t", [f"k{i}" for i in range(8)], {"x": np.arange(8)})
    with DataPlaneClient(PlaneAddress(proxy.endpoint, plane.secret, 2.0)) as client:
        assert len(client.claim("t", "actor", ["x"], 2)) == 2
        assert len(client.claim("t", "actor", ["x"], 2)) == 2
        assert len(client.claim("t", "actor", ["x"], 2, timeout=0.2)) == 2
        assert client.describe()["partitions"]["t"]["tasks"]["actor"]["claimed"] == 6
    proxy.close()


def test_an_answer_that_comes_twice_counts_once(plane: InProcessPlane) -> None:
    proxy = Proxy(plane.address.endpoint, plane.secret, lambda way, n: 2 if way == "answer" else 1)
    plane.client().put("t", ["a", "b"], {"x": np.arange(2)})
    with DataPlaneClient(PlaneAddress(proxy.endpoint, plane.secret, 5.0)) as client:
        assert [list(client.claim("t", "actor", ["x"], 1)) for _ in range(2)] == [["a"], ["b"]]
        assert client.get("t", ["b"]).verdicts == ("ok",)
    proxy.close()


def test_a_claim_whose_answer_never_comes_is_given_back(plane: InProcessPlane) -> None:
    """Both answers get lost; the caller hears of a timeout, and the rows go to the next."""
    proxy = Proxy(plane.address.endpoint, plane.secret, lambda way, n: int(way == "ask"))
    plane.client().put("t", ["a"], ONE)
    with DataPlaneClient(PlaneAddress(proxy.endpoint, plane.secret, 0.6)) as client, pytest.raises(RequestTimeout):
        client.claim("t", "actor", ["x"], 1, timeout=0)
    assert list(plane.client().claim("t", "actor", ["x"], 1, timeout=5)) == ["a"]
    proxy.close()


@pytest.fixture
def apart() -> Iterator[tuple[InProcessPlane, subprocess.Popen[str]]]:
    """A plane whose only unit is a process of its own, and that process."""
    script = """if True:
        import sys, time
        from actors.storage_unit import StorageUnit
        from actors.wire.secret import Secret
        from policies.config import PlaneConfig
        unit = StorageUnit("u0", 0, "127.0.0.1", Secret(sys.argv[2]), PlaneConfig())
        unit.connect(sys.argv[1])
        print(unit.location().endpoint, flush=True)
        time.sleep(600)
    """
    with in_process_plane(units=0, timeout=1.0) as plane, running(script, plane.address) as unit:
        assert unit.stdout is not None
        plane.controller.register_units({"u0": UnitLocation(unit.stdout.readline().strip())})
        yield plane, unit


def test_a_frozen_unit_ends_in_timeouts_and_what_it_held_arrives_whole_or_not_at_all(
    apart: tuple[InProcessPlane, subprocess.Popen[str]],
) -> None:
    """Fault: a buffer is reused in flight. The writer is told of a timeout, writes to its array, the unit wakes up."""
    plane, unit = apart
    client, rows = plane.client(), np.ones((4, 4 << 20), np.uint8)
    client.put("t", ["a"], ONE)
    freeze(unit)
    with pytest.raises(RequestTimeout, match="u0"):
        client.put("t", ["w", "x", "y", "z"], {"big": rows})
    with pytest.raises(Unreachable, match="u0"):
        client.get("t", ["a"])
    assert client.list("t") == [("a", {})], "the controller serves on"
    rows[:] = 2
    os.kill(unit.pid, signal.SIGCONT)
    client.put("t", ["b"], ONE, timeout=10)
    stored = client.get("t", ["w"], ["big"], partial=True, timeout=10)
    assert stored.verdicts == ("missing",) or (stored["big"][0] == 1).all()


def test_requests_queued_for_a_killed_unit_end_by_name(
    apart: tuple[InProcessPlane, subprocess.Popen[str]],
) -> None:
    plane, unit = apart
    client = plane.client()
    client.put("t", ["a"], ONE)
    freeze(unit)
    with ThreadPoolExecutor(8) as pool:
        puts = [pool.submit(client.put, "t", [f"q{i}"], ONE) for i in range(8)]
        time.sleep(0.1)
        os.kill(unit.pid, signal.SIGKILL)
        assert all(isinstance(put.exception(10), Unreachable) for put in puts)
    assert client.list("t") == [("a", {})]


def test_a_writer_killed_in_mid_put_leaves_whole_rows_or_none(plane: InProcessPlane) -> None:
    script = """if True:
        import sys, numpy as np
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        client = DataPlaneClient(PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10))
        print("writing", flush=True)
        for i in range(10**6):
            client.put("t", [f"{i}-{j}" for j in range(4)], {"x": np.full((4, 1 << 20), i % 256, np.uint8)})
            client.clear("t", [f"{i - 8}-{j}" for j in range(4)])
    """
    reader = plane.client()
    with running(script, plane.address) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == "writing\n"
        wait_until(lambda: len(reader.list("t")) >= 8)
        writer.kill()
        writer.wait(10)
    time.sleep(0.3)
    keys = [key for key, _ in reader.list("t")]
    for key, row in reader.get("t", keys, ["x"]).rows():
        assert (row["x"] == int(key.split("-")[0]) % 256).all()
    puts = {key.split("-")[0] for key in keys}
    assert {f"{put}-{j}" for put in puts for j in range(4)} >= set(keys)
    reader.clear("t", keys)
    wait_until(lambda: held_bytes(plane) == 0)


def test_a_new_client_is_heard_while_the_unit_is_busy(plane: InProcessPlane) -> None:
    """Fault: a restarted client is deaf while the server is busy."""
    with plane.client() as first:
        first.put("t", ["a"], ONE)
    for unit in plane.units.values():
        unit._loop.call_soon(lambda: time.sleep(0.5))
    second = plane.client()
    second.put("t", ["b"], ONE)
    assert second.list("t") == [("a", {}), ("b", {})]


def test_a_slow_unit_costs_readers_nothing_but_time(plane: InProcessPlane, client: DataPlaneClient) -> None:
    """Faults: readers while a clear is slow; high-water marks. Many gets wait for a unit that sleeps; none is lost."""
    client.put("t", [f"k{i}" for i in range(8)], {"x": np.zeros((8, 512), np.float32)})
    for unit in plane.units.values():
        for _ in range(20):
            unit._loop.call_soon(lambda: time.sleep(0.02))

    async def read_all() -> list[Any]:
        reader = AsyncDataPlaneClient(plane.address)
        batches = await asyncio.gather(*(reader.get("t", [f"k{i % 8}"], timeout=30) for i in range(2000)))
        await reader.close()
        return batches

    assert all(batch.verdicts == ("ok",) for batch in asyncio.run(read_all()))


def test_a_put_that_no_publish_can_carry_hurts_no_other(plane: InProcessPlane) -> None:
    """A peer that is no client of ours sends tags that a unit can read and the controller cannot be sent."""
    columns, buffers = {"x": Column.dense(np.arange(1))}, []  # type: ignore[var-annotated]
    body = {"batch_id": "poison", "partition": "t", "keys": ["p"], "columns": encode_columns(columns, buffers)}
    body |= {"tags": [{"deep": nested(1019)}], "checksum": block_checksum(columns)}
    with ThreadPoolExecutor(9) as pool:
        poison = pool.submit(plane.client().ask, [Ask("u0", "put", body, buffers)])
        puts = [pool.submit(plane.client().put, "t", [f"k{i}"], ONE) for i in range(8)]
        assert all(put.result(10) for put in puts)
        assert isinstance(poison.exception(10), WireError)


def test_a_unit_that_returns_at_its_address_is_spoken_to_again(plane: InProcessPlane, client: DataPlaneClient) -> None:
    """Fault: replies to a peer that came back under a new identity vanish."""
    client.put("t", ["a", "b"], {"x": np.arange(2)})
    port = plane.units["u1"].location().endpoint.rsplit(":", 1)[1]
    plane.units["u1"].close()
    returned = StorageUnit.__new__(StorageUnit)
    original = zmq.Socket.bind_to_random_port
    try:
        zmq.Socket.bind_to_random_port = lambda self, address: (self.bind(f"{address}:{port}"), int(port))[1]  # type: ignore[method-assign, assignment]
        returned.__init__("u1", 99, HOST, plane.secret, plane.config)  # type: ignore[misc]
    finally:
        zmq.Socket.bind_to_random_port = original  # type: ignore[method-assign]
    plane.units["u1"] = returned
    returned.connect(plane.address.endpoint)
    wait_until(lambda: client.put("t", ["again"], ONE, timeout=10).unit == "u1")
    acks = [client.put("t", [f"n{i}"], ONE, timeout=10) for i in range(10)]
    assert [ack.unit for ack in acks].count("u1") == 5


def freeze(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)


class running:
    """A child process with a script, the plane's endpoint and its secret; killed at the end."""

    def __init__(self, script: str, address: PlaneAddress) -> None:
        arguments = [sys.executable, "-c", script, address.endpoint, address.secret.text]
        self._child = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> subprocess.Popen[str]:
        return self._child

    def __exit__(self, *_: object) -> None:
        self._child.kill()
        self._child.communicate()
