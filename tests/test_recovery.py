"""The recipe from the command line to its exit status, with a driver that only pretends to generate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipes.prefix_recovery.__main__ import main

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--engine", "tiny", "--calls", "4", "--max-tokens", "24", "--cut-after", "8", "--cut-gap", "4"]


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake driver is found from the root, and temporary directories can be counted."""
    monkeypatch.chdir(ROOT)
    (tmp_path / "t").mkdir()
    monkeypatch.setattr("recipes.prefix_recovery.run_directory._SHORT", 1000)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "t"))


def recover(out: Path, mode: str = "good", kill_after: str = "0.02") -> int:
    argv = ["--out", str(out), *SMALL, "--kill-after", kill_after]
    return main(argv, driver=(sys.executable, "-m", "tests.fake_driver", "--mode", mode))


def left_running(out: Path) -> list[int]:
    pids = map(int, (out / "stubborn.pids").read_text().split())
    return [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "report.json").read_text())
    return report


def test_a_good_run_ends_with_every_row_matching(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert recover(out) == 0
    report = report_of(out)
    assert (report["calls"], report["rows_matching"]) == (4, 4)
    assert (report["restored_prefixes"], report["regenerated"]) == (4, 0)
    assert report["prefix_tokens"] == {"min": 12, "max": 12, "total": 48}
    assert report["failed_cuts"] == {}
    assert report["logprobs"] == {"tokens": 94, "bit_identical": 94, "max_abs_diff": 0.0}
    assert (report["put_calls"], report["get_calls"], report["tokens_saved"]) == (4, 2, 48)
    assert report["killed_processes"] == 3
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    text = capsys.readouterr().out
    for words in (
        "SIGKILL to all 3",
        "cut 2",
        "4 of 4 rows match",
        f"{out / 'report.json'}",
        f"{out / 'timeline.png'}",
    ):
        assert words in text
    assert left_running(out) == []
    assert list((tmp_path / "t").iterdir()) == []


@pytest.mark.parametrize("after", ["0", "0.3"])
def test_the_moment_of_the_kill_changes_nothing(tmp_path: Path, after: str) -> None:
    """Right at the publication, or once every call has ended by itself."""
    assert recover(tmp_path / "out", "good", after) == 0
    assert left_running(tmp_path / "out") == []


def test_a_second_run_replaces_the_first(tmp_path: Path) -> None:
    """Its checkpoint, rows and report are the second run's own, and a failed one leaves no report of the first."""
    assert [recover(tmp_path / "out"), recover(tmp_path / "out")] == [0, 0]
    assert recover(tmp_path / "out", "dies") == 1
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_row_that_differs_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recover(tmp_path / "out", "mismatch") == 1
    assert report_of(tmp_path / "out")["rows_matching"] == 3
    assert "3 of 4 rows match" in capsys.readouterr().out


def test_a_missing_call_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recover(tmp_path / "out", "missing") == 1
    assert "missing" in capsys.readouterr().out


def test_a_refused_chain_is_counted(tmp_path: Path) -> None:
    """It was generated again from its prompt, so that the row matches all the same."""
    assert recover(tmp_path / "out", "refuse") == 0
    report = report_of(tmp_path / "out")
    assert (report["restored_prefixes"], report["regenerated"], report["tokens_saved"]) == (3, 1, 36)


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("malformed", "(raylet) a worker died"),
        ("dies", "the engine ran out of memory"),
        ("error", "every call had ended before it could be cut"),
        ("ends_after_checkpoint", "exit status 5"),
        ("second_dies", "exit status -11"),
        ("other_model", "of the model another"),
    ],
)
def test_a_life_that_fails_ends_the_run_with_what_it_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, said: str
) -> None:
    out = tmp_path / "out"
    assert recover(out, mode, "30" if mode == "ends_after_checkpoint" else "0.02") == 1
    assert said in capsys.readouterr().err
    assert not (out / "report.json").exists()
    assert left_running(out) == []
    assert list((tmp_path / "t").iterdir()) == []


def test_an_earlier_run_is_resumed_without_a_first_life(tmp_path: Path) -> None:
    """And nothing in its directory is changed."""
    one, two = tmp_path / "one", tmp_path / "two"
    assert recover(one) == 0
    before = {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}
    driver = (sys.executable, "-m", "tests.fake_driver")
    assert main(["--out", str(two), "--from", str(one)], driver=driver) == 0
    report = report_of(two)
    assert (report["rows_matching"], report["restored_prefixes"]) == (4, 4)
    assert (report["seconds"]["reference"], report["decode_during_cut"]) == (None, None)
    assert not (two / "logs" / "first.log").exists()
    assert before == {path: path.read_bytes() for path in one.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "argv",
    [
        ["--out", "{}/file/below"],
        ["--out", "/proc/x"],
        ["--out", "{}/new", "--cut-after", "400"],
        ["--out", "{}/new", "--calls", "0"],
        ["--out", "{}/new", "--from", "{}"],
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    """No life is started: the driver's command does not exist."""
    (tmp_path / "file").write_text("mine")
    assert main([text.format(tmp_path) for text in argv], driver=("/nonexistent",)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "t"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_process_and_no_temporary_directory(tmp_path: Path, number: int, status: int) -> None:
    """Even when the signal comes twice."""
    out, script = tmp_path / "out", "import sys; from recipes.prefix_recovery.__main__ import main; "
    script += f"sys.exit(main({['--out', str(out), *SMALL]!r}, driver=sys.argv[1:]))"
    command = [sys.executable, "-c", script, sys.executable, "-m", "tests.fake_driver", "--mode", "hang"]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "t")}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    while not (out / "stubborn.pids").exists() or len((out / "stubborn.pids").read_text().split()) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == status
    assert "interrupted by" in said
    assert "Traceback" not in said
    assert left_running(out) == []
    assert list((tmp_path / "t").glob("rg-*")) == []


def test_the_orchestrator_loads_neither_ray_nor_torch() -> None:
    script = "import sys, recipes.prefix_recovery.__main__; print(*{'ray', 'torch', 'transformers'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == []
