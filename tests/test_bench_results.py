"""The report: its form, and that it is written whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import validate

from policies.errors import ConfigError
from recipes.bench.machine import machine, versions
from recipes.bench.record import Record
from recipes.bench.results import Report, ResultFiles
from recipes.bench.scenario import REGRAFT, SYSTEMS, Metric

NUMBER, TEXT = {"type": "number"}, {"type": "string"}
RECORD = {
    "scenario": TEXT,
    "system": {"enum": list(SYSTEMS)},
    "metric": TEXT,
    "unit": TEXT,
    "median": NUMBER,
    "min": NUMBER,
    "max": NUMBER,
    "runs": {"type": "integer", "minimum": 1},
    "lower_is_better": {"type": "boolean"},
}
MACHINE = {"cpu": TEXT, "cores": {"type": "integer"}, "memory_bytes": {"type": "integer"}, "kernel": TEXT}
VERSIONS = ("python", "regraft", "numpy", "pyzmq", "ray", "torch", "transferqueue")


def closed(properties: dict[str, object]) -> dict[str, object]:
    """An object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMA = closed(
    {
        "machine": closed({**MACHINE}),
        "versions": closed({name: {"type": ["string", "null"]} for name in VERSIONS}),
        "records": {"type": "array", "items": closed({**RECORD})},
    }
)


def report() -> Report:
    return Report(machine(), versions(), [Record.of("write/1024/256", REGRAFT, Metric("wall_s", "s"), [1.0, 2.0])])


def test_a_report_has_the_form_that_all_benchmarks_share(tmp_path: Path) -> None:
    report().write(tmp_path / "r.json")
    plain = json.loads((tmp_path / "r.json").read_text())
    validate(plain, SCHEMA)
    assert plain["versions"]["numpy"] is not None
    assert plain["machine"]["cores"] >= 1 and plain["machine"]["memory_bytes"] > 1 << 20
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_a_report_that_cannot_be_written_whole_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("earlier")
    broken = Report({}, {}, [Record.of("a", REGRAFT, Metric("wall_s", "s"), [float("nan")])])
    with pytest.raises(ValueError, match="JSON"):
        broken.write(path)
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_the_companions_lie_beside_the_report(tmp_path: Path) -> None:
    files = ResultFiles.prepare(tmp_path / "new" / "r.json")
    assert (files.picture.name, files.partial.name) == ("r.png", "r.partial.json")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "r.json").mkdir()
    (tmp_path / "s.png").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for out, why in (
        (tmp_path / "file" / "r.json", "cannot be written"),
        (tmp_path / "r.json", "is a directory"),
        (tmp_path / "s.json", "s.png is a directory"),
        (tmp_path / "r.txt", "ends in .json"),
        (Path("/proc/nowhere/r.json"), "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=why):
            ResultFiles.prepare(out)
    assert sorted(tmp_path.rglob("*")) == before
