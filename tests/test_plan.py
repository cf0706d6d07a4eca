"""The plan file: what one side writes is what the other reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policies.errors import ConfigError
from recipes.prefix_recovery.arguments import parse
from recipes.prefix_recovery.plan import Plan


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    """Prompts of all scripts included; no partial file stays behind."""
    plan = parse(["--out", str(tmp_path), "--calls", "38", "--temperature", "1"]).plan
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"recipe": "soup"}, "no plan of this recipe"),
        ({"leaders": "two"}, "'leaders' is 'two'"),
        ({"leaders": None}, "'leaders' is None"),
        ({"calls": 3}, "no whole plan"),
        ({"calls": [{"id": "c0"}]}, "no whole plan"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_another_file_is_refused_by_name(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "plan.json"
    parse(["--out", str(tmp_path)]).plan.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=named):
        Plan.read(path)


def test_a_file_that_is_missing_or_cut_off_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(ConfigError, match="cannot read"):
        Plan.read(path)
    parse(["--out", str(tmp_path)]).plan.write(path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(ConfigError, match="cannot read"):
        Plan.read(path)
