"""A benchmark from the command line to its exit status: parse, measure, print the table, draw the picture, write.

Guarantees: nothing is measured before the options and the output are known to be good. Ctrl-C and a failed check end
everything that was started, keep the scenarios that were measured whole in the partial file, and say so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from policies.errors import ConfigError, RegraftError
from recipes.bench.machine import machine, versions
from recipes.bench.measurement import measure
from recipes.bench.options import parse
from recipes.bench.picture import draw_picture
from recipes.bench.record import Record
from recipes.bench.results import Report, ResultFiles
from recipes.bench.scenario import Scenario
from recipes.bench.table import results_table
from recipes.prefix_recovery.interruption import Interrupted, interruptible

_WIDTH_OF_FILES = 180
"""Of a table that goes to no terminal, so that nothing is cut off."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """``name`` is the recipe's module, ``description`` what it shows (its first line heads table and picture).

    ``repetitions``: default, and with ``--quick``. ``add_options`` adds sizes of its own; ``scenarios`` makes them from
    the parsed options and may raise `ConfigError`.
    """

    name: str
    description: str
    repetitions: tuple[int, int]
    add_options: Callable[[argparse.ArgumentParser], None]
    scenarios: Callable[[argparse.Namespace], Sequence[Scenario]]

    @property
    def title(self) -> str:
        return self.description.strip().partition("\n")[0]


def run(benchmark: Benchmark, argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    complaints = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        options = parse(benchmark.name, benchmark.description, benchmark.repetitions, benchmark.add_options, argv)
        scenarios = benchmark.scenarios(options)
        files = ResultFiles.prepare(options.out)
    except ConfigError as error:
        complaints.print(f"{benchmark.name}: {error.message}", style="bold red", markup=False)
        return 2
    records: list[Record] = []
    try:
        with interruptible():
            for measured in _measured(scenarios, options.reps):
                records += measured
            _show(benchmark, records, files)
    except RegraftError as error:
        _broken_off(f"{benchmark.name}: {error.message}", records, files, complaints)
        return 1
    except Interrupted as interruption:
        _broken_off(f"{benchmark.name}: {interruption}; nothing is left running", records, files, complaints)
        return interruption.exit_status
    return 0


def _measured(scenarios: Sequence[Scenario], repetitions: int) -> Iterator[list[Record]]:
    with _progress(sum(scenario.steps(repetitions) for scenario in scenarios)) as progress:
        for scenario in scenarios:
            yield measure(scenario, repetitions, progress)


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """What `measure` tells what it begins with: a bar on a terminal, a line per step elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=steps)
        begun = 0

        def step(text: str) -> None:
            nonlocal begun
            bar.update(task, description=text, completed=begun)
            begun += 1

        yield step


def _show(benchmark: Benchmark, records: Sequence[Record], files: ResultFiles) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_OF_FILES)
    console.print(results_table(benchmark.title, records))
    draw_picture(benchmark.title, records, files.picture)
    Report(machine(), versions(), records).write(files.report)
    files.partial.unlink(missing_ok=True)
    console.print(f"report:  {files.report}\npicture: {files.picture}", highlight=False, soft_wrap=True)


def _broken_off(why: str, records: Sequence[Record], files: ResultFiles, complaints: Console) -> None:
    complaints.print(why, style="bold red", markup=False)
    if not records:
        complaints.print("no scenario was measured whole; nothing was written", markup=False)
        return
    Report(machine(), versions(), records).write(files.partial)
    names = _listed(record.scenario for record in records)
    complaints.print(f"measured whole: {names}; written to {files.partial}", markup=False)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))
