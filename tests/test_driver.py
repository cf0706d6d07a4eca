"""The driver of a client: units that fail, move and come back, and closing at any moment from anywhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from actors.client import DataPlaneClient, PlaneAddress
from actors.wire.secret import Secret
from policies.errors import ClosedError, RequestTimeout, Unreachable
from policies.operations import Ask
from tests.plane_in_process import InProcessPlane, in_process_plane
from tests.test_client import wait_until
from tests.test_client_faults import ONE, apart, freeze, running

__all__ = ["apart"]


@pytest.fixture
def plane() -> Iterator[InProcessPlane]:
    with in_process_plane(timeout=3.0) as running:
        yield running


@pytest.fixture
def client(plane: InProcessPlane) -> DataPlaneClient:
    return plane.client()


def units_of(client: DataPlaneClient, puts: int) -> set[str]:
    return {client.put("t", [f"k{i}"], ONE, timeout=10).unit for i in range(puts)}


def test_a_unit_at_a_new_address_is_found_by_its_reader(plane: InProcessPlane, client: DataPlaneClient) -> None:
    """Not by luck of the placement: the very request that fails at the old address succeeds at the new one."""
    assert units_of(client, 4) == {"u0", "u1"}
    plane.replace_unit("u1")
    (answer,) = client.ask([Ask("u1", "statistics")], timeout=10)
    assert answer.body["unit"] == "u1" and answer.body["blocks"] == 0
    wait_until(lambda: units_of(client, 4) == {"u0", "u1"})


def test_a_dead_unit_gets_no_new_rows_and_the_next_puts_succeed(plane: InProcessPlane, client: DataPlaneClient) -> None:
    assert units_of(client, 4) == {"u0", "u1"}
    plane.units["u1"].close()
    with pytest.raises(Unreachable, match="u1"):
        client.ask([Ask("u1", "statistics")], timeout=1)
    assert units_of(client, 20) == {"u0"}


def test_a_frozen_unit_gets_no_new_rows_until_it_wakes(
    apart: tuple[InProcessPlane, subprocess.Popen[str]],
) -> None:
    plane, frozen = apart
    unit = plane.make_unit("u1", 77)
    plane.units["u1"] = unit
    unit.connect(plane.address.endpoint)
    plane.controller.register_units({"u1": unit.location()})
    client = plane.client()
    wait_until(lambda: set(client.units()) == {"u0", "u1"})
    assert units_of(client, 4) == {"u0", "u1"}
    freeze(frozen)
    with pytest.raises(RequestTimeout, match="u0"):
        client.ask([Ask("u0", "statistics")], timeout=0.5)
    assert units_of(client, 10) == {"u1"}
    os.kill(frozen.pid, signal.SIGCONT)
    wait_until(lambda: units_of(client, 4) == {"u0", "u1"})


def test_when_all_units_are_down_a_put_says_which_it_asked(plane: InProcessPlane, client: DataPlaneClient) -> None:
    units_of(client, 4)
    for unit in plane.units.values():
        unit.close()
    for _ in range(3):
        with pytest.raises(Unreachable, match=r"unit u[01]"):
            client.put("t", ["k"], ONE, timeout=0.5)


def test_a_dead_controller_is_named_with_what_to_check() -> None:
    address = PlaneAddress("tcp://127.0.0.1:9", Secret("x"), 0.4)
    with DataPlaneClient(address) as client, pytest.raises(RequestTimeout) as raised:
        client.list("t")
    for word in ("tcp://127.0.0.1:9", "could not be connected to", "plane still runs", "own node"):
        assert word in raised.value.message


def test_closing_from_many_threads_ends_every_open_call(plane: InProcessPlane) -> None:
    client = plane.client()
    with ThreadPoolExecutor(24) as pool:
        open_calls = [pool.submit(client.claim, "t", "actor", ["x"], 1, timeout=60) for _ in range(8)]
        wait_until(lambda: plane.client().describe()["parked"] == 8)
        for closed in [pool.submit(client.close) for _ in range(16)]:
            closed.result(20)
        assert all(isinstance(call.exception(10), ClosedError) for call in open_calls)
    assert not client._driver._loop.thread.is_alive()
    with pytest.raises(ClosedError):
        client.list("t")


def test_closing_on_the_clients_own_thread_while_another_closes(client: DataPlaneClient) -> None:
    """A callback, or a destructor that the collector runs there."""
    client.list("t")
    closed, entered = threading.Event(), threading.Event()

    def close_here() -> None:
        entered.set()
        client.close()
        closed.set()

    client._driver._loop.call_soon(close_here)
    assert entered.wait(10)
    client.close()
    assert closed.wait(10)


def test_a_client_used_after_the_interpreter_began_to_end_gets_an_error(plane: InProcessPlane) -> None:
    """Exit handlers that were registered before the client was made run after it was ended."""
    script = """if True:
        import atexit
        atexit.register(lambda: late())
        import sys
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        from policies.errors import ClosedError
        def late():
            try:
                print(client.list("t"), flush=True)
            except ClosedError:
                print("closed", flush=True)
            client.close()
        client = DataPlaneClient(PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10))
        client.list("t")
    """
    with running(script, plane.address) as child:
        assert child.communicate(timeout=20)[0] == "closed\n"
        assert child.returncode == 0


def test_a_signal_handler_may_close_at_any_moment(plane: InProcessPlane) -> None:
    script = """if True:
        import signal, sys
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        from policies.errors import ClosedError
        client = DataPlaneClient(PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10))
        signal.signal(signal.SIGTERM, lambda *_: client.close())
        print("working", flush=True)
        try:
            while True:
                client.list("t")
        except ClosedError:
            print("closed", flush=True)
    """
    for _ in range(3):
        with running(script, plane.address) as child:
            assert child.stdout is not None and child.stdout.readline() == "working\n"
            child.send_signal(signal.SIGTERM)
            assert child.communicate(timeout=20)[0] == "closed\n"


def test_a_forked_child_makes_its_own_client_and_collects_the_old_one(plane: InProcessPlane) -> None:
    """Fault: sockets or context used after fork. In a process of its own, which has no other threads to fork."""
    script = """if True:
        import gc, os, sys
        import numpy as np
        from actors.client import DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        from policies.errors import ForkedProcessError
        address = PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 10)
        client = DataPlaneClient(address)
        big = {"x": np.zeros((1, 1 << 20), np.uint8)}
        client.put("t", ["before"], big)
        child = os.fork()
        if child == 0:
            try:
                client.list("t")
            except ForkedProcessError:
                client.close()
                del client
                gc.collect()
                with DataPlaneClient(address) as own:
                    own.put("t", ["child"], big)
                sys.exit(0)
            sys.exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for i in range(10):
            client.put("t", [f"after{i}"], big)
        print(len(client.list("t")), flush=True)
        client.close()
    """
    with running(script, plane.address) as process:
        assert process.communicate(timeout=60)[0] == "12\n"
        assert process.returncode == 0


def test_few_descriptors_serve_many_gets_and_their_lack_is_said(plane: InProcessPlane) -> None:
    """Fault: the 1024th socket."""
    plane.client().put("t", ["a"], ONE)
    script = """if True:
        import resource, sys, asyncio
        from actors.client import AsyncDataPlaneClient, DataPlaneClient, PlaneAddress
        from actors.wire.secret import Secret
        from policies.errors import CapacityExceeded
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
        address = PlaneAddress(sys.argv[1], Secret(sys.argv[2]), 30)
        async def read_all():
            client = AsyncDataPlaneClient(address)
            batches = await asyncio.gather(*(client.get("t", ["a"]) for _ in range(1200)))
            await client.close()
            return {batch.verdicts for batch in batches}
        print(asyncio.run(read_all()), flush=True)
        clients = []
        try:
            for _ in range(256):
                clients.append(DataPlaneClient(address))
                clients[-1].list("t")
        except CapacityExceeded as error:
            print("ulimit" in error.message, flush=True)
        for client in clients:
            client.close()
        with DataPlaneClient(address) as client:
            print(client.list("t"), flush=True)
    """
    with running(script, plane.address) as process:
        assert process.communicate(timeout=120)[0] == "{('ok',)}\nTrue\n[('a', {})]\n"


def test_a_client_that_is_closed_at_once_never_hangs(plane: InProcessPlane) -> None:
    for _ in range(50):
        client = DataPlaneClient(plane.address)
        with contextlib.suppress(ClosedError), ThreadPoolExecutor(1) as pool:
            call = pool.submit(client.put, "t", ["a"], {"x": np.arange(1)})
            client.close()
            call.result(10)
