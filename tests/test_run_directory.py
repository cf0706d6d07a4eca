"""The directory of a run: proven writable, and never emptied of what somebody else keeps there."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.errors import ConfigError
from recipes.prefix_recovery.arguments import parse
from recipes.prefix_recovery.run_directory import RunDirectory, temporary_directory


def listing(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_a_new_directory_is_made_and_left_empty(tmp_path: Path) -> None:
    RunDirectory.prepare(tmp_path / "a" / "b")
    assert listing(tmp_path) == ["a", "a/b"]


@pytest.mark.parametrize("below", ["x", "x/y/z"])
def test_a_path_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path, below: str) -> None:
    """Also for root, whom permissions do not stop: below a file, and in a file system that takes no files."""
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / below, tmp_path / "file", Path("/proc") / below):
        with pytest.raises(ConfigError, match="--out"):
            RunDirectory.prepare(path)
    assert listing(tmp_path) == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


def test_directories_made_before_the_refusal_are_taken_back(tmp_path: Path) -> None:
    """A name that is too long fails after its parents have been made."""
    with pytest.raises(ConfigError):
        RunDirectory.prepare(tmp_path / "a" / "b" / ("c" * 300))
    assert listing(tmp_path) == []


def test_what_an_earlier_run_wrote_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    parse(["--out", str(tmp_path)]).plan.write(tmp_path / "plan.json")
    (tmp_path / "checkpoints" / "checkpoint-00000001").mkdir(parents=True)
    for name in ("report.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    RunDirectory.prepare(tmp_path)
    assert listing(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize("name", ["checkpoints", "report.json", "plan.json"])
def test_a_directory_of_somebody_else_is_refused_untouched(tmp_path: Path, name: str) -> None:
    """Names like ours without a plan of ours, or with a plan of another kind."""
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=f"holds {name}"):
        RunDirectory.prepare(tmp_path)
    assert (tmp_path / name).read_text() == "{}"


def test_the_temporary_directory_is_short_and_goes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("t" * 60)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with temporary_directory() as path:
        (path / "session").mkdir()
        assert len(str(path)) <= 40
    assert not path.exists()
