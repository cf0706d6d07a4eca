"""The plane as Ray actors: launched, attached to, outliving its writers, and refused in words when it cannot start."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from actors.client import DataPlaneClient, PlaneAddress
from actors.data_plane import DataPlane
from policies.config import PlaneConfig
from policies.errors import LaunchError, RequestTimeout, Unreachable


@pytest.fixture(scope="module")
def plane(ray_cluster: str) -> Iterator[DataPlane]:
    with DataPlane.launch(PlaneConfig(units=2), name="shared") as running:
        yield running


def test_rows_put_here_are_read_by_another_process(plane: DataPlane) -> None:
    @ray.remote(num_cpus=0)
    def read(address: PlaneAddress) -> list[Any]:
        with DataPlaneClient(address) as client:
            return [row.tolist() for row in client.get("train", ["a", "b"])["ids"]]

    plane.client().put("train", ["a", "b"], {"ids": [np.arange(2), np.arange(3)]})
    assert ray.get(read.remote(plane.address)) == [[0, 1], [0, 1, 2]]


def test_attach_finds_the_plane_by_name(plane: DataPlane) -> None:
    attached = DataPlane.attach("shared")
    assert attached.address == plane.address
    assert list(attached.client().units()) == ["u0", "u1"]
    attached.close()
    assert list(plane.client().units()) == ["u0", "u1"], "closing an attached plane ends nothing"
    with pytest.raises(LaunchError, match="'nosuch'"):
        DataPlane.attach("nosuch")


def test_a_local_plane_listens_on_loopback_only(plane: DataPlane) -> None:
    assert plane.address.endpoint.startswith("tcp://127.0.0.1:")
    endpoints = endpoints_of(plane)
    assert len(endpoints) == 3
    assert all(listener(endpoint)[1] == "127.0.0.1" for endpoint in endpoints.values())


def test_acknowledged_rows_outlive_a_killed_writer(plane: DataPlane) -> None:
    @ray.remote(num_cpus=0, max_restarts=0)
    class Writer:
        def write(self, address: PlaneAddress) -> int:
            rows = [np.full(65_536, i, np.int32) for i in range(16)]
            DataPlaneClient(address).put("train", [f"w{i}" for i in range(16)], {"x": rows})
            return os.getpid()

    os.kill(ray.get(Writer.remote().write.remote(plane.address)), signal.SIGKILL)
    rows = plane.client().get("train", [f"w{i}" for i in range(16)])["x"]
    assert all((row == i).all() for i, row in enumerate(rows))


def test_units_that_do_not_fit_are_an_error_that_counts_cpus_and_leaves_nothing(ray_cluster: str) -> None:
    greedy = PlaneConfig(units=2, unit_cpus=5, launch_timeout_s=8)
    with pytest.raises(LaunchError, match="need 10 CPUs, the cluster has 8"):
        DataPlane.launch(greedy, name="greedy")
    with DataPlane.launch(PlaneConfig(units=1, unit_cpus=5), name="greedy") as plane:
        plane.client().put("train", ["a"], {"x": np.arange(1)})


def test_a_killed_unit_gives_named_errors_and_the_other_goes_on(ray_cluster: str) -> None:
    with DataPlane.launch(PlaneConfig(units=2, request_timeout_s=4), name="doomed") as plane:
        client = plane.client()
        units = {key: client.put("train", [key], {"x": np.arange(1)}).unit for key in ("a", "b")}
        lost, kept = sorted(units, key=lambda key: units[key], reverse=True)
        os.kill(listener(endpoints_of(plane)["u1"])[0].pid, signal.SIGKILL)
        with pytest.raises((Unreachable, RequestTimeout), match="u1"):
            client.get("train", [lost])
        assert client.get("train", [kept], partial=True).verdicts == ("ok",)


def test_processes_without_an_engine_stay_light(plane: DataPlane) -> None:
    """No torch in controller and units; each well under 150 MB."""
    for name, endpoint in endpoints_of(plane).items():
        process = listener(endpoint)[0]
        assert not any("libtorch" in m.path for m in process.memory_maps()), name
        assert process.memory_info().rss < 150 << 20, name


def endpoints_of(plane: DataPlane) -> dict[str, str]:
    """Where controller and units listen."""
    return {"controller": plane.address.endpoint, **plane.client().describe()["units"]}


def listener(endpoint: str) -> tuple[psutil.Process, str]:
    """The process of this test's cluster that listens at ``endpoint``, and the address it is bound to."""
    port = int(endpoint.rsplit(":", 1)[1])
    for process in psutil.Process().children(recursive=True):
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process, connection.laddr.ip
    raise AssertionError(f"nobody listens at {endpoint}")
