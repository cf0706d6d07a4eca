"""What people read: figures with three digits, the table, the picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from recipes.bench.picture import draw_picture, is_wide
from recipes.bench.quantity import quantity, span
from recipes.bench.record import Record
from recipes.bench.scenario import PATCHED_TRANSFERQUEUE, REGRAFT, TRANSFERQUEUE, Metric
from recipes.bench.table import results_table

SECONDS, RATE = Metric("wall_s", "s"), Metric("rows_per_s", "rows/s", lower_is_better=False)
RECORDS = [
    Record.of("read/1024", REGRAFT, SECONDS, [1e-3, 2e-3, 4e-3]),
    Record.of("read/1024", TRANSFERQUEUE, SECONDS, [0.5, 0.5, 0.6]),
    Record.of("read/1024", PATCHED_TRANSFERQUEUE, SECONDS, [0.001]),
    Record.of("read/1024", REGRAFT, RATE, [100.0]),
    Record.of("read/1024", TRANSFERQUEUE, RATE, [400.0]),
    Record.of("scan", REGRAFT, SECONDS, [0.0]),
]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (4.1e-6, "s", "4.10 µs"),
        (0.0123, "s", "12.3 ms"),
        (12.0, "s", "12 s"),
        (0.0, "s", "0 ns"),
        (2e-12, "s", "0.002 ns"),
        (3 << 20, "bytes", "3 MiB"),
        (30_000.4, "cycles/s", "30,000"),
        (0.25, "cycles/s", "0.25"),
    ],
)
def test_a_figure_has_three_digits_and_the_prefix_that_fits(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_both_ends_of_a_range_have_one_scale() -> None:
    assert span(850e-6, 1.2e-3, "s") == "0.85 – 1.20 ms"


@given(st.floats(1e-12, 1e12), st.sampled_from(["s", "bytes", "rows"]))
def test_no_figure_is_shown_with_an_error_of_more_than_a_percent(value: float, unit: str) -> None:
    scales = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
    number, _, name = quantity(value, unit).partition(" ")
    assert float(number.replace(",", "")) * scales.get(name, 1) == pytest.approx(value, rel=0.01)


def test_the_table_has_a_line_per_scenario_and_metric_and_says_how_many_times_better() -> None:
    console = Console(width=160, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(results_table("Some title", RECORDS))
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert ["read/1024", "wall_s", "2 ms", "500 ms", "1 ms", "250 ×", "0.5 ×"] in cells
    assert ["read/1024", "rows_per_s", "100", "400", "–", "0.25 ×", "–"] in cells
    assert ["scan", "wall_s", "0 ns", "–", "–", "–", "–"] in cells
    assert ["", "", "1 – 4 ms", "500 – 600 ms", "", "", ""] in cells


def test_an_axis_is_logarithmic_when_the_figures_span_more_than_a_decade() -> None:
    assert is_wide(RECORDS[:2])
    assert not is_wide(RECORDS[3:5])
    assert not is_wide(RECORDS[5:])


def test_the_picture_shows_every_system(tmp_path: Path) -> None:
    draw_picture("Some title", RECORDS, tmp_path / "p.png")
    pixels = (imread(tmp_path / "p.png")[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    colours = {tuple(pixel) for pixel in pixels}
    assert {(0x4F, 0x9E, 0x58), (0x7B, 0x9C, 0xC9), (0xF0, 0xA8, 0x30)} <= colours
