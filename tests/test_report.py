"""The report: every figure from the record of a known run."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from recipes.prefix_recovery import events
from recipes.prefix_recovery.comparison import Comparison, RowComparison
from recipes.prefix_recovery.report import build_report, closing_table, print_summary, write_report
from tests import recorded_run
from tests.recorded_run import START


def test_all_figures_of_a_known_run() -> None:
    report = build_report(recorded_run.plan(), recorded_run.record(), recorded_run.comparison())
    assert (report["calls"], report["rows_matching"], report["restored_prefixes"], report["regenerated"]) == (
        3,
        3,
        3,
        0,
    )
    assert report["prefix_tokens"] == {"min": 5, "max": 5, "total": 15}
    assert report["failed_cuts"] == {"no_tokens": 1}
    assert report["logprobs"] == {"tokens": 24, "bit_identical": 21, "max_abs_diff": 0.25}
    assert round(report["decode_during_cut"], 6) == 1.0
    assert (report["put_calls"], report["get_calls"], report["tokens_saved"]) == (4, 2, 15)
    seconds = report["seconds"]
    assert [round(s, 3) for s in seconds.pop("cut")] == [0.2, 0.2]
    assert seconds == {"reference": 8.0, "save": 0.5, "restore": 0.25, "to_first_resumed_token": 11.0}
    assert report["versions"]["ray"] == "0.0-recorded"
    assert report["options"]["cut_after"] == 3


def test_a_refused_prefix_saves_nothing() -> None:
    report = build_report(recorded_run.plan(), recorded_run.record(refuse="c1"), recorded_run.comparison("c1"))
    assert (report["restored_prefixes"], report["regenerated"], report["tokens_saved"]) == (2, 1, 10)
    assert report["rows"][1]["refused"] == "digest"
    assert report["rows_matching"] == 2


def test_a_row_that_came_whole_with_the_checkpoint_is_saved_and_not_regenerated() -> None:
    record = recorded_run.record()
    del record.chains["c2"], record.finished["resume"]["c2"]
    record.steps["resume"] = [step for step in record.steps["resume"] if "c2" not in step.tokens]
    record.add(events.Finished(phase="cut", call="c2", tokens=8, reason="stop", at=START + 24))
    report = build_report(recorded_run.plan(), record, recorded_run.comparison())
    assert (report["restored_prefixes"], report["finished_before_the_kill"], report["tokens_saved"]) == (2, 1, 18)


def test_a_run_without_a_first_life_has_no_figures_of_it(tmp_path: Path) -> None:
    report = build_report(recorded_run.plan(), recorded_run.record(only_second=True), recorded_run.comparison())
    assert (report["decode_during_cut"], report["killed_processes"], report["put_calls"]) == (None, None, 0)
    assert report["seconds"]["reference"] is None and report["seconds"]["cut"] == []
    write_report(report, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_what_json_cannot_say_is_null() -> None:
    rows = (RowComparison("c0", 8, 8, True, 8, 7, float("inf")), *recorded_run.comparison().rows[1:])
    report = build_report(recorded_run.plan(), recorded_run.record(), Comparison(rows))
    assert report["logprobs"]["max_abs_diff"] is None
    json.dumps(report, allow_nan=False)


def test_the_closing_table_shows_each_call_and_what_went_wrong() -> None:
    rows = (RowComparison("c0", 8, None, False, 0, 0, 0.0), *recorded_run.comparison("c1").rows[1:])
    report = build_report(recorded_run.plan(), recorded_run.record(refuse="c2"), Comparison(rows))
    console = Console(width=100)
    with console.capture() as captured:
        console.print(closing_table(recorded_run.plan().calls, report))
        print_summary(report, console)
    text = captured.get()
    for words in ("c0", "Write a long story", "missing", "NO", "refused", "1 of 3 rows match", "1 regenerated"):
        assert words in text
