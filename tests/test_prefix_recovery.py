"""The main job end to end, with the tiny model: generate, cut, die, regrow; and what a restart refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

MARK = "REGRAFT_TEST"
TOKENS = 1500
CALLS = 4
OPTIONS = [
    "--engine",
    "tiny",
    "--calls",
    str(CALLS),
    "--max-tokens",
    str(TOKENS),
    "--cut-after",
    "200",
    "--cut-gap",
    "60",
]


def recipe(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "recipes.prefix_recovery", *map(str, options)]
    environment = {**os.environ, MARK: str(os.getpid())}
    root = Path(__file__).parent.parent
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=root, env=environment)


def report_of(out: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((out / "report.json").read_text())
    return loaded


def processes_of_lives() -> list[psutil.Process]:
    """What is left of the recipes that this test process started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, subprocess.CompletedProcess[str]]]:
    """One whole run, shared: its directory and how it ended."""
    out = tmp_path_factory.mktemp("run")
    yield out, recipe("--out", out, *OPTIONS)


def test_every_call_is_regrown_bit_for_bit(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, ended = run
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = report_of(out)
    assert (report["calls"], report["rows_matching"]) == (CALLS, CALLS)
    assert (report["restored_prefixes"], report["regenerated"], report["failed_cuts"]) == (CALLS, 0, {})
    assert report["logprobs"] == {"tokens": CALLS * TOKENS, "bit_identical": CALLS * TOKENS, "max_abs_diff": 0.0}
    assert report["prefix_tokens"]["min"] >= 200 and report["prefix_tokens"]["max"] < TOKENS
    assert report["tokens_saved"] == report["prefix_tokens"]["total"]
    assert report["put_calls"] == 4, "two cuts, one batched PUT at each of two leaders"
    assert 2 <= report["get_calls"] <= CALLS
    assert len(report["seconds"]["cut"]) == 2
    assert report["killed_processes"] >= 8
    assert (out / "timeline.png").stat().st_size > 10_000
    assert processes_of_lives() == []


def test_a_second_restart_of_the_same_checkpoint_gives_the_same_rows(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Faster resume: tokens equal, logprobs within 1e-3."""
    ended = recipe("--out", tmp_path / "again", "--from", run[0], "--resume", "fast")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = report_of(tmp_path / "again")
    assert (report["rows_matching"], report["restored_prefixes"], report["regenerated"]) == (CALLS, CALLS, 0)
    assert 0 <= report["logprobs"]["max_abs_diff"] <= 1e-3


def damaged_copy(run_directory: Path, to: Path) -> Path:
    shutil.copytree(run_directory, to)
    (checkpoint,) = (to / "checkpoints").iterdir()
    return checkpoint


def test_a_truncated_checkpoint_is_refused_by_the_file_and_stays_as_it_is(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    checkpoint = damaged_copy(run[0], tmp_path / "damaged")
    file = checkpoint / "unit-u0.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    ended = recipe("--out", tmp_path / "again", "--from", tmp_path / "damaged")
    assert ended.returncode == 1
    assert f"unit-u0.safetensors has {size - 1} bytes, its manifest says {size}" in ended.stdout + ended.stderr
    assert file.stat().st_size == size - 1 and processes_of_lives() == []


def test_a_run_without_a_checkpoint_is_refused(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    shutil.rmtree(damaged_copy(run[0], tmp_path / "empty"))
    ended = recipe("--out", tmp_path / "again", "--from", tmp_path / "empty")
    assert ended.returncode in (1, 2) and "checkpoint" in ended.stdout + ended.stderr


def test_a_checkpoint_of_another_model_is_refused_by_the_field(
    run: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """The checkpoint says it was made by another model: no call is resumed, nothing of it is changed."""
    checkpoint = damaged_copy(run[0], tmp_path / "other")
    manifest = checkpoint / "manifest.json"
    text = manifest.read_text().replace("tiny-0@", "tiny-9@")
    manifest.write_text(text)
    ended = recipe("--out", tmp_path / "again", "--from", tmp_path / "other")
    assert ended.returncode == 1
    said = ended.stdout + ended.stderr
    assert "FingerprintMismatch" in said and "model 'tiny-9@" in said
    assert manifest.read_text() == text and processes_of_lives() == []


def test_calls_that_end_before_the_cut_are_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    """The first cut lies within the limits, but a stop of every call comes before it."""
    options = ["--engine", "tiny", "--calls", "1", "--leaders", "1", "--max-tokens", "60", "--cut-after", "57"]
    ended = recipe("--out", tmp_path / "short", *options, "--cuts", "1")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1 and "smaller --cut-after" in said
    assert processes_of_lives() == []
