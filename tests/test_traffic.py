"""A server's account of what it served."""

from __future__ import annotations

import time

import numpy as np
import pytest

from actors.wire.traffic import Traffic
from tests.plane_in_process import in_process_plane


def test_sums_counts_and_longest_are_kept_by_operation() -> None:
    traffic = Traffic(["put", "get", "clear"], now=100.0)
    traffic.operations["put"].add(queued_s=0.5, busy_s=1.0, failed=False)
    traffic.operations["put"].add(queued_s=0.25, busy_s=2.0, failed=True)
    traffic.operations["get"].add(queued_s=0.0, busy_s=1.0, failed=False)
    plain = traffic.to_plain(now=108.0)
    assert (plain["seconds"], plain["busy_fraction"]) == (8.0, 0.5)
    assert list(plain["operations"]) == ["put", "get"]
    assert plain["operations"]["put"] == {
        "requests": 2, "failed": 1, "busy_s": 3.0, "longest_busy_s": 2.0, "queued_s": 0.75, "longest_queued_s": 0.5
    }  # fmt: skip


def test_nothing_served_in_no_time_is_no_error() -> None:
    assert Traffic(["put"], now=3.0).to_plain(now=3.0) == {"seconds": 0.0, "busy_fraction": 0.0, "operations": {}}


def test_the_controller_tells_what_it_was_asked() -> None:
    with in_process_plane() as plane:
        client = plane.client()
        began = time.perf_counter()
        client.put("train", ["a"], {"x": np.arange(1)})
        client.tag("train", ["a"], [{"n": 1}])
        with pytest.raises(Exception, match="no key 'b'"):
            client.tag("train", ["b"], [{"n": 1}])
        client.list("train")
        traffic = client.describe()["traffic"]
        passed = time.perf_counter() - began
    served = traffic["operations"]
    assert {name: (each["requests"], each["failed"]) for name, each in served.items()} == {
        "units": (1, 0), "publish": (1, 0), "tag": (2, 1), "list": (1, 0)
    }  # fmt: skip
    assert 0 < served["publish"]["busy_s"] == served["publish"]["longest_busy_s"] < passed
    assert 0 < traffic["busy_fraction"] < 1
