"""The picture: it is drawn for every kind of run, and its names stand clear of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from recipes.prefix_recovery.timeline import _CHARACTER, _flags, _Mark, draw_timeline
from tests import recorded_run


@given(
    st.lists(st.tuples(st.floats(0, 100), st.sampled_from(("cut 1", "SIGKILL", "checkpoint restored"))), max_size=12)
)
def test_no_name_hides_another_name_or_is_crossed_by_a_pole(moments: list[tuple[float, str]]) -> None:
    """A pole reaches from the lanes to its own row; names extend from their poles to the right."""
    marks = [_Mark(at, text, "black", "-", 1.0) for at, text in moments]
    flags = _flags(marks, 100.0)
    assert sorted(m.at for _, m in flags) == sorted(m.at for m in marks)
    for index, (row, mark) in enumerate(flags):
        reach = mark.at + _CHARACTER * len(mark.text) * 100
        for other_index, (other_row, other) in enumerate(flags):
            if other_index != index and other_row >= row:
                assert not mark.at < other.at < reach
        assert all(other.at != mark.at or other_row != row or other is mark for other_row, other in flags)


@pytest.mark.parametrize(("refuse", "only_second", "different"), [("", False, ""), ("c1", False, "c2"), ("", True, "")])
def test_every_kind_of_run_can_be_drawn(tmp_path: Path, refuse: str, only_second: bool, different: str) -> None:
    """All colours of the legend are on the lanes of a whole run."""
    path = tmp_path / "timeline.png"
    record = recorded_run.record(refuse, only_second)
    draw_timeline(recorded_run.plan(), record, recorded_run.comparison(different), path)
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1690
    colours = {tuple(pixel) for pixel in pixels[:-130].reshape(-1, 3)}
    blue, amber, red, green = (0x7B, 0x9C, 0xC9), (0xF0, 0xA8, 0x30), (0xD9, 0x53, 0x4F), (0x4F, 0x9E, 0x58)
    assert {amber, green} <= colours
    assert ({blue, red} <= colours) == (not only_second)
