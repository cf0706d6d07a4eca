"""The table that a benchmark prints: a line per scenario and metric, a column per system, and how many times better."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from recipes.bench.quantity import digits, quantity, span
from recipes.bench.record import Record, advantage
from recipes.bench.scenario import REGRAFT, REGRAFT_FRAMES, SYSTEMS


def results_table(title: str, records: Sequence[Record]) -> Table:
    """Medians with their ranges. The last columns say how many times better regraft is, whichever way is better."""
    systems = [system for system in SYSTEMS if any(record.system == system for record in records)]
    peers = [system for system in systems if system not in (REGRAFT, REGRAFT_FRAMES)]
    table = Table(title=title, title_justify="left", caption="median (min – max)", caption_justify="left")
    table.add_column("scenario", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for system in systems:
        table.add_column(system, justify="right", no_wrap=True)
    for peer in peers:
        table.add_column(f"better than\n{peer}", justify="right", no_wrap=True)
    for line in dict.fromkeys((record.scenario, record.metric) for record in records):
        found = {record.system: record for record in records if (record.scenario, record.metric) == line}
        cells = [_cell(found.get(system)) for system in systems]
        table.add_row(*line, *cells, *[_ratio(found.get(REGRAFT), found.get(peer)) for peer in peers])
    return table


def _cell(record: Record | None) -> Text:
    if record is None:
        return Text("–", style="dim")
    text = Text(quantity(record.median, record.unit))
    if record.runs > 1:
        text.append(f"\n{span(record.min, record.max, record.unit)}", style="dim")
    return text


def _ratio(ours: Record | None, theirs: Record | None) -> Text:
    ratio = None if ours is None or theirs is None else advantage(ours, theirs)
    if ratio is None:
        return Text("–", style="dim")
    return Text(f"{digits(ratio)} ×", style="bold green" if ratio >= 1 else "bold red")
