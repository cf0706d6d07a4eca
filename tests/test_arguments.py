"""The command line: defaults, and one clear line for everything that cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from recipes.prefix_recovery.arguments import parse
from recipes.prefix_recovery.plan import PLAN_FILE


def test_the_defaults_are_two_cuts_of_eight_calls_on_two_leaders(tmp_path: Path) -> None:
    arguments = parse(["--out", str(tmp_path)])
    plan = arguments.plan
    assert (plan.engine, plan.leaders, len(plan.calls), plan.max_tokens) == ("smollm2", 2, 8, 160)
    assert (plan.cut_after, plan.cuts, plan.cut_gap, plan.resume) == (48, 2, 24, "exact")
    assert (plan.temperature, plan.top_p, arguments.kill_after, arguments.source) == (0.8, 0.95, 0.5, None)


@given(calls=st.integers(2, 200), seed=st.integers(0, 1 << 40))
def test_every_call_has_an_id_and_a_seed_of_its_own(calls: int, seed: int) -> None:
    """Also when there are more calls than prompts."""
    plan = parse(["--out", "out", "--calls", str(calls), "--seed", str(seed)]).plan
    assert len({call.id for call in plan.calls}) == calls
    assert [call.seed for call in plan.calls] == list(range(seed, seed + calls))


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 20), st.integers(1, 100))
def test_exactly_the_cuts_before_the_end_are_accepted(after: int, cuts: int, gap: int, most: int) -> None:
    argv = ["--out", "out", "--cut-after", f"{after}", "--cuts", f"{cuts}", "--cut-gap", f"{gap}"]
    argv += ["--max-tokens", f"{most}"]
    if after + (cuts - 1) * gap < most:
        assert parse(argv).plan.cut_after == after
    else:
        with pytest.raises(ConfigError, match="--cut-after"):
            parse(argv)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ([], "--out"),
        (["--out", "o", "--leaders", "0"], "--leaders is 0"),
        (["--out", "o", "--calls", "-1"], "--calls is -1"),
        (["--out", "o", "--calls", "1"], "--leaders is 2 and there are 1 calls"),
        (["--out", "o", "--cut-after", "0"], "--cut-after is 0"),
        (["--out", "o", "--cuts", "0"], "--cuts is 0"),
        (["--out", "o", "--cut-gap", "0"], "--cut-gap is 0"),
        (["--out", "o", "--seed", "-1"], "--seed is -1"),
        (["--out", "o", "--temperature", "nan"], "--temperature is nan"),
        (["--out", "o", "--top-p", "0"], "--top-p is 0"),
        (["--out", "o", "--kill-after", "-1"], "--kill-after is -1"),
        (["--out", "o", "--kill-after", "inf"], "--kill-after is inf"),
        (["--out", "o", "--engine", "gpt"], "--engine is 'gpt'; it must be smollm2 or tiny"),
        (["--out", "o", "--resume", "slow"], "--resume is 'slow'"),
        (["--out", "o", "--calls", "many"], "--calls: invalid int value: 'many'"),
        (["--out", "o", "--unheard-of"], "--unheard-of"),
    ],
)
def test_what_cannot_work_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(argv)
    assert named in refused.value.message
    assert "\n" not in refused.value.message


def earlier_run(path: Path) -> Path:
    plan = parse(["--out", str(path), "--calls", "4", "--seed", "5", "--max-tokens", "100"]).plan
    (path / "checkpoints" / "checkpoint-00000001").mkdir(parents=True)
    (path / "reference.safetensors").write_bytes(b"rows")
    plan.write(path / PLAN_FILE)
    return path


def test_resuming_an_earlier_run_keeps_its_calls(tmp_path: Path) -> None:
    run = earlier_run(tmp_path / "run")
    plan = parse(["--out", str(tmp_path / "new"), "--from", str(run), "--resume", "fast"]).plan
    assert (len(plan.calls), plan.seed, plan.max_tokens, plan.resume) == (4, 5, 100, "fast")
    assert plan.reference == str(run / "reference.safetensors")
    assert plan.checkpoints == str(run / "checkpoints")
    assert plan.rows == str(tmp_path / "new" / "rows.safetensors")


def test_an_earlier_run_that_cannot_be_resumed_is_refused(tmp_path: Path) -> None:
    run = earlier_run(tmp_path / "run")
    argv = ["--out", str(tmp_path / "new"), "--from"]
    for options, named in [
        ([str(tmp_path / "nowhere")], "not a directory"),
        ([str(tmp_path)], "no earlier run"),
        ([str(run), "--calls", "8"], "--calls cannot be given with --from"),
        ([str(run), "--leaders", "5"], "--leaders is 5"),
        ([str(run), "--out", str(run)], "are both"),
    ]:
        with pytest.raises(ConfigError, match=named):
            parse([*argv, *options])
    (run / "reference.safetensors").unlink()
    with pytest.raises(ConfigError, match="no reference rows"):
        parse([*argv, str(run)])
    (run / "checkpoints" / "checkpoint-00000001").rename(run / "checkpoints" / "checkpoint-00000001.partial")
    with pytest.raises(ConfigError, match="no checkpoint in"):
        parse([*argv, str(run)])


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    assert "SIGKILL" in text and "--cut-gap" in text and "default 160" in text
