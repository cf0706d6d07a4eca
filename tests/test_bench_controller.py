"""The controller's benchmark: which scenarios there are, and that all of them run and check what they measure."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from policies.catalog import Catalog, Cleared
from recipes.bench.controller.catalog import CatalogSubject
from recipes.bench.controller.rows import Columns, RowMaker
from recipes.bench.controller.runs import CycleRun, PublishRun, RemovalRun
from recipes.bench.options import parse
from recipes.bench.scenario import REGRAFT, TRANSFERQUEUE, CheckFailed
from recipes.bench_controller import BENCHMARK, add_options, main, scenarios

TINY = ("--quick", "--reps", "1", "--live-rows", "300", "--removal-rows", "600", "--base-rows", "300")
SMALL_LOAD = ("--publish-rows", "1,16", "--clients", "3", "--window", "0.2")

needs_peer = pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None, reason="the extra transferqueue is not installed"
)


def options(*argv: str) -> argparse.Namespace:
    return parse(BENCHMARK.name, BENCHMARK.description, BENCHMARK.repetitions, add_options, ["--out", "r.json", *argv])


def test_a_full_run_has_the_scenarios_that_reports_are_compared_by() -> None:
    names = [scenario.name for scenario in scenarios(options())]
    assert names == [
        *("cycle/20000", "cycle/300000", "cycle-jagged/20000", "cycle-jagged/300000"),
        *("removal/20000", "removal/100000", "removal/300000"),
        *("removal-scattered/20000", "removal-scattered/100000", "removal-scattered/300000"),
        *("publish/1", "publish/16", "publish/256", "memory/20000", "memory/300000", "zmq/96", "zmq-unfused/96"),
    ]


def test_regraft_is_measured_alone_unless_a_peer_is_named() -> None:
    assert all(list(scenario.systems) == [REGRAFT] for scenario in scenarios(options()))


def _measured(tmp_path: Path, *argv: str) -> dict[tuple[str, str], dict[str, float]]:
    out = tmp_path / "r.json"
    assert main(["--out", str(out), *TINY, *SMALL_LOAD, *argv]) == 0
    assert out.with_suffix(".png").stat().st_size > 10_000
    return {(r["scenario"], r["system"]): r for r in json.loads(out.read_text())["records"]}


SCENARIOS = {
    *("cycle/300", "cycle-jagged/300", "removal/600", "removal-scattered/600", "publish/1", "publish/16"),
    *("memory/300", "zmq/3", "zmq-unfused/3"),
}


def test_every_scenario_measures_regraft(tmp_path: Path) -> None:
    records = _measured(tmp_path)
    assert set(records) == {(scenario, REGRAFT) for scenario in SCENARIOS}
    assert all(r["median"] > 0 for (name, _), r in records.items() if not name.startswith("memory"))


@needs_peer
@pytest.mark.slow
def test_every_scenario_measures_the_peer_in_the_same_run(tmp_path: Path) -> None:
    records = _measured(tmp_path, "--peer", TRANSFERQUEUE)
    assert set(records) == {(scenario, system) for scenario in SCENARIOS for system in (REGRAFT, TRANSFERQUEUE)}


class _Forgetful(CatalogSubject):
    """Clears nothing, but quickly."""

    def clear(self, groups: object) -> float:
        return 0.0


def test_a_removal_that_removes_nothing_is_no_figure() -> None:
    with pytest.raises(CheckFailed, match="600 rows live, not"):
        RemovalRun(_Forgetful(), 600, 16, scattered=False).run()


def test_a_cycle_that_leaves_no_tags_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "tag", lambda *arguments: None)
    with pytest.raises(CheckFailed, match="do not have the tags"):
        CycleRun(CatalogSubject(), Columns(16, 16), 300, 5).run()


def test_a_run_that_leaves_its_rows_behind_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    run = PublishRun(CatalogSubject(), Columns(16, 4), 300, 16, 4)
    run.run()
    monkeypatch.setattr(Catalog, "clear", lambda *arguments: Cleared(0, (), {}))
    with pytest.raises(CheckFailed, match="364 rows live, not 300"):
        run.run()


def test_rows_are_never_like_rows_before_them() -> None:
    maker = RowMaker(Columns(16, 4))
    made = [maker.batch(3), *maker.batches(5, 2), maker.again(("rollout-0",))]
    lengths = [int(length) for rows in made for length in rows.lengths]
    assert len(set(lengths)) == len(lengths) == 9
    assert len({key for rows in made[:-1] for key in rows.keys}) == 8
