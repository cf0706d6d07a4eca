"""The storage benchmark: which scenarios there are, what is stored, and that all of them run and check what came."""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.bench.options import parse
from recipes.bench.scenario import MEMCPY, REGRAFT, REGRAFT_FRAMES, TRANSFERQUEUE, ZMQ_SOCKET, CheckFailed
from recipes.bench.storage import worker
from recipes.bench.storage.cluster import Cluster
from recipes.bench.storage.load import Fields, Load, Reading
from recipes.bench_storage import add_options, scenarios

TINY = (
    *("--quick", "--reps", "1", "--rows", "32", "--single-rows", "16", "--tokens", "64", "--batch", "8"),
    *("--clients", "2", "--store-mib", "128"),
)

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None, reason="the extra transferqueue is not installed"
)

loads = st.builds(Load, st.integers(1, 60), st.integers(1, 9), st.integers(1, 7), st.integers(1, 4))


@given(loads)
def test_what_is_put_is_what_must_be_read_and_no_row_is_like_another(load: Load) -> None:
    rows: set[bytes] = set()
    for client in range(load.clients):
        written = [key for keys, _ in load.puts_of(client) for key in keys]
        assert written == load.keys(client)
        for keys, fields in load.puts_of(client):
            for place, key in enumerate(keys):
                expected = load.row(key)
                assert expected.keys() == fields.keys()
                assert all(np.array_equal(fields[name][place], expected[name]) for name in fields)
                rows.add(expected["ids"].tobytes())
    assert load.stored_rows >= load.rows
    assert len(rows) == load.stored_rows or load.puts > load.tokens
    assert sum(values.nbytes for values in load.row("0/0").values()) == load.row_bytes


@given(loads, st.integers(1, 9), st.booleans())
def test_every_row_is_read_once(load: Load, keys_per_get: int, scattered: bool) -> None:
    keys = load.keys(0)
    gets = Reading(keys_per_get, scattered=scattered).gets(keys)
    assert sorted(key for get in gets for key in get) == sorted(keys)
    assert max(map(len, gets)) <= keys_per_get


class _Answering:
    """A client whose every row is ``answer``."""

    def __init__(self, answer: Fields) -> None:
        self._answer = answer

    def get(self, keys: list[str]) -> Fields:
        return self._answer

    def row(self, found: Fields, place: int) -> Fields:
        return found

    def lengths(self, found: Fields) -> list[np.ndarray]:
        return [np.array([len(values)]) for values in found.values()]


LOAD = Load(rows=2, tokens=4, rows_per_put=1, clients=2)
RIGHT = LOAD.row("1/0")
WRONG = {
    "a value": {**RIGHT, "logprobs": RIGHT["logprobs"] + 1},
    "a dtype": {**RIGHT, "mask": RIGHT["mask"].astype(np.float64)},
    "a length": {name: values[:3] for name, values in RIGHT.items()},
    "a field": {name: values for name, values in RIGHT.items() if name != "mask"},
    "another row": LOAD.row("0/0"),
}


def _reader(answer: Fields) -> worker.Worker:
    return worker.Worker(0, _Answering, answer)


def test_a_right_answer_is_accepted() -> None:
    assert _reader(RIGHT).read(LOAD, Reading(1), 0.0) > 0
    assert len(_reader(LOAD.row("0/0")).round_trips(LOAD, 3)) == 3


@pytest.mark.parametrize("answer", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_answer_is_no_figure(answer: Fields) -> None:
    with pytest.raises(CheckFailed):
        _reader(answer).read(LOAD, Reading(1), 0.0)


def _options(*argv: str) -> argparse.Namespace:
    return parse("bench_storage", "", (3, 2), add_options, ["--out", "r.json", *argv])


def _names(tokens: int, batch: int, single: bool) -> list[str]:
    return [
        *(f"write/{tokens}/{batch}/cold", f"read/{tokens}/{batch}/cold", f"memory/{tokens}"),
        *(f"write/{tokens}/{batch}", f"read/{tokens}/{batch}"),
        *(f"read/{tokens}/{batch}/touched", f"read/{tokens}/{batch}/scattered"),
        *((f"write/{tokens}/1", f"read/{tokens}/1") if single else ()),
        f"latency/{tokens}",
    ]


def test_a_full_run_has_the_scenarios_that_reports_are_compared_by() -> None:
    names = [scenario.name for scenario in scenarios(_options(), Cluster({}))]
    assert names == [*_names(1024, 256, single=True), *_names(16_384, 256, single=False)]


def _measured(tmp_path: Path, *argv: str) -> dict[tuple[str, str], dict[str, float]]:
    """By the benchmark in a process of its own: it starts its own Ray, and this one may be connected to another."""
    out = tmp_path / "r.json"
    command = [sys.executable, "-m", "recipes.bench_storage", "--out", str(out), *TINY, *argv]
    subprocess.run(command, check=True, timeout=240)
    return {(r["scenario"], r["system"]): r for r in json.loads(out.read_text())["records"]}


def _expected(*peers: str) -> set[tuple[str, str]]:
    names = _names(64, 8, single=True)
    alike = {(name, system) for name in names for system in (REGRAFT, *peers)}
    frames = {(name, REGRAFT_FRAMES) for name in names if not name.endswith("/1") and not name.startswith("latency")}
    return alike | frames | {("write/64/8", ZMQ_SOCKET), ("write/64/8", MEMCPY)}


def test_every_scenario_measures_regraft(tmp_path: Path) -> None:
    records = _measured(tmp_path)
    assert set(records) == _expected()
    assert all(r["median"] > 0 for r in records.values())


@needs_peer
@pytest.mark.slow
def test_every_scenario_measures_the_peer_in_the_same_run(tmp_path: Path) -> None:
    assert set(_measured(tmp_path, "--peer", TRANSFERQUEUE)) == _expected(TRANSFERQUEUE)
