"""A benchmark from the command line to its exit status, on scenarios that take no time."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from policies.errors import ConfigError
from recipes.bench.benchmark import Benchmark, run
from recipes.bench.scenario import REGRAFT, CheckFailed, Metric, Runner, Scenario

CLOSED: list[str] = []


class Doing:
    def __init__(self, name: str, act: Callable[[], float]) -> None:
        self._name, self._act = name, act

    def run(self) -> Mapping[str, float]:
        return {"wall_s": self._act()}

    def close(self) -> None:
        CLOSED.append(self._name)


def interrupt() -> float:
    os.kill(os.getpid(), signal.SIGINT)
    return 1.0


def refuse() -> float:
    raise CheckFailed("a row is missing")


def benchmark(**acts: Callable[[], float]) -> Benchmark:
    def scenario(name: str, act: Callable[[], float]) -> Scenario:
        make: Callable[[], Runner] = lambda: Doing(name, act)  # noqa: E731
        return Scenario(name, "some work", (Metric("wall_s", "s"),), {REGRAFT: make})

    def scenarios(options: argparse.Namespace) -> list[Scenario]:
        if options.size == "odd":
            raise ConfigError("--size is odd; it must be even")
        return [scenario(name, act) for name, act in acts.items()]

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--size", default="even")

    return Benchmark("recipes.bench_some", "What it shows.\nAnd how.", (2, 1), add_options, scenarios)


def one() -> float:
    return 1.0


def test_a_whole_run_leaves_the_report_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    (tmp_path / "r.partial.json").write_text("of an earlier run that broke off")
    assert run(benchmark(first=one, second=one), ["--out", str(out)]) == 0
    records = json.loads(out.read_text())["records"]
    assert [(r["scenario"], r["runs"], r["median"]) for r in records] == [("first", 2, 1.0), ("second", 2, 1.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "r.png"]
    heard = capsys.readouterr()
    assert "What it shows." in heard.out and "And how." not in heard.out
    assert "second: regraft, 2 of 2" in heard.err


@pytest.mark.parametrize(
    ("act", "status", "why"), [(refuse, 1, "b, regraft: a row is missing"), (interrupt, 130, "SIGINT")]
)
def test_a_run_that_breaks_off_keeps_what_was_measured_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], act: Callable[[], float], status: int, why: str
) -> None:
    out = tmp_path / "r.json"
    out.write_text("earlier")
    CLOSED.clear()
    assert run(benchmark(a=one, b=act, c=one), ["--out", str(out)]) == status
    assert out.read_text() == "earlier"
    records = json.loads((tmp_path / "r.partial.json").read_text())["records"]
    assert [record["scenario"] for record in records] == ["a"]
    assert CLOSED == ["a", "b"]
    heard = capsys.readouterr().err
    assert why in heard and "measured whole: a; written to" in heard


def test_a_run_that_measured_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(benchmark(a=refuse), ["--out", str(tmp_path / "r.json")]) == 1
    assert list(tmp_path.iterdir()) == []
    assert "nothing was written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (["--out", "/proc/nowhere/r.json"], "--out /proc/nowhere/r.json cannot be written"),
        (["--out", "r.json", "--size", "odd"], "--size is odd"),
        (["--reps", "2"], "--out"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(
    argv: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def never() -> float:
        raise AssertionError("nothing may be measured")

    assert run(benchmark(a=never), argv) == 2
    assert why in capsys.readouterr().err
