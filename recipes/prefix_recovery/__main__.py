"""``python -m recipes.prefix_recovery --out DIR``: generations that survive the death of everything around them.

What it shows: real generations of a language model are cut in mid-flight while decoding goes on, the checkpoint is
saved, every process of the cluster gets SIGKILL, a fresh cluster restores the checkpoint from disk, and every
generation goes on from where it was. The rows that come out equal those of an uninterrupted run. This process only
watches, kills and judges: it imports neither ray nor torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from policies.errors import ConfigError, RegraftError
from recipes.prefix_recovery.arguments import Arguments, parse
from recipes.prefix_recovery.comparison import compare_files
from recipes.prefix_recovery.interruption import Interrupted, interruptible
from recipes.prefix_recovery.live_view import LiveView
from recipes.prefix_recovery.record import Record
from recipes.prefix_recovery.recovery import run_lives
from recipes.prefix_recovery.report import build_report, closing_table, print_summary, write_report
from recipes.prefix_recovery.run_directory import RunDirectory
from recipes.prefix_recovery.timeline import draw_timeline

DRIVER = (sys.executable, "-m", "recipes.prefix_recovery.driver")


def main(argv: Sequence[str] | None = None, driver: Sequence[str] = DRIVER) -> int:
    """Run the recipe and return its exit status. ``driver`` is the command that a job driver is started with."""
    console, complaints = Console(), Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        arguments = parse(argv)
        directory = RunDirectory.prepare(arguments.out)
    except ConfigError as error:
        complaints.print(f"prefix_recovery: {error.message}", style="bold red", markup=False)
        return 2
    try:
        with interruptible():
            return _recover(arguments, directory, driver, console)
    except RegraftError as error:
        complaints.print(f"prefix_recovery: {error.message}", style="bold red", markup=False)
        return 1
    except Interrupted as interruption:
        complaints.print(f"prefix_recovery: {interruption}; nothing of the job is left running", style="bold red")
        return interruption.exit_status


def _recover(arguments: Arguments, directory: RunDirectory, driver: Sequence[str], console: Console) -> int:
    plan, record = arguments.plan, Record()
    with LiveView(plan, record, console) as view:
        run_lives(arguments, directory, driver, record, view)
    comparison = compare_files([call.id for call in plan.calls], Path(plan.reference), Path(plan.rows))
    report = build_report(plan, record, comparison)
    write_report(report, directory.report)
    draw_timeline(plan, record, comparison, directory.timeline)
    console.print(closing_table(plan.calls, report))
    print_summary(report, console)
    console.print(f"report:   {directory.report}\ntimeline: {directory.timeline}", highlight=False, soft_wrap=True)
    return 0 if comparison.all_match else 1


if __name__ == "__main__":
    sys.exit(main())
