"""What a controller costs per request, how that grows with the rows that live in it, and how many clients it bears.

The controller is one thread that every client asks, so its cost per request bounds the whole plane. Scenarios:
  cycle/LIVE           one row with 16 fields is created, published, looked up and tagged, in process
  cycle-jagged/LIVE    the same, all 16 fields jagged and each row's length one that never was
  removal/LIVE         16 rows that lie together in one publication are cleared; one jagged field, all lengths distinct
  removal-scattered/…  the same, but the 16 rows are any of those that live
  publish/ROWS         one publication of that many new rows, 4 of its 16 fields jagged, 20,000 rows alive
  memory/LIVE          what a process grows by per row, resident memory, 4 of 16 fields jagged, 256 rows a publication
  zmq/CLIENTS          cycles per second of closed-loop connections, controllers in their own processes, 20,000 rows
                       alive; regraft's clients ask for what belongs to a cycle in one message, the peer's need four
  zmq-unfused/CLIENTS  the same, regraft's clients also ask for one thing at a time, three messages a cycle
In process only calls of the controller are timed: what its clients would send is prepared before, and cyclic garbage
collection is off. `regraft` is policies.catalog.Catalog: publish, locate, tag, clear. `transferqueue` is its own
TransferQueueController class: kv_retrieve_meta(create), update_production_status, kv_retrieve_meta, set_custom_meta,
clear_meta. Rows made in a repetition are removed after it, so the number of live rows stays, and all answers are
checked. Over ZeroMQ every 8th cycle of a connection also clears the 8 rows that it made, on both sides."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from recipes.bench.benchmark import Benchmark, run
from recipes.bench.controller.load import LoadRun, Side
from recipes.bench.controller.rows import FIELDS, Columns
from recipes.bench.controller.runs import CycleRun, MemoryRun, PublishRun, RemovalRun
from recipes.bench.controller.subject import Subject
from recipes.bench.controller.systems import FUSED_SIDES, SUBJECTS, UNFUSED_SIDES
from recipes.bench.options import positive, positives
from recipes.bench.scenario import REGRAFT, Metric, Runner, Scenario

BASE_ROWS: Final = 20_000
"""Live rows where their number is not what is varied."""

FIXED, MIXED, JAGGED = Columns(FIELDS, 0), Columns(FIELDS, 4), Columns(FIELDS, FIELDS)
CLIENT_PROCESSES: Final = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--live-rows",
        type=positives,
        metavar="N,N",
        help="rows alive in cycle and memory (default 20000,300000; with --quick 20000)",
    )
    sizes.add_argument(
        "--removal-rows",
        type=positives,
        metavar="N,N",
        help="rows alive in removal (default 20000,100000,300000; with --quick 20000)",
    )
    sizes.add_argument(
        "--publish-rows", type=positives, default=(1, 16, 256), metavar="N,N", help="of publish (default 1,16,256)"
    )
    sizes.add_argument(
        "--base-rows", type=positive, default=BASE_ROWS, metavar="N", help=f"alive elsewhere (default {BASE_ROWS})"
    )
    sizes.add_argument("--clients", type=positive, metavar="N", help="connections (default 96; with --quick 16)")
    sizes.add_argument(
        "--window", type=_seconds, metavar="S", help="seconds that clients ask per run (default 2; with --quick 1)"
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"it is {text} and must be more than 0 and less than 3600")
    return seconds


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    quick, base = options.quick, options.base_rows
    live_rows = options.live_rows or ((20_000,) if quick else (20_000, 300_000))
    removal_rows = options.removal_rows or ((20_000,) if quick else (20_000, 100_000, 300_000))
    clients, window = options.clients or (16 if quick else 96), options.window or (1.0 if quick else 2.0)
    cycles, removals, published = (200, 16, 512) if quick else (1_000, 48, 2_048)
    systems = [REGRAFT, *([options.peer] if options.peer else [])]

    def in_process(name: str, shows: str, metric: Metric, make: Callable[[Subject], Runner]) -> Scenario:
        return Scenario(name, shows, (metric,), {s: partial(_on_subject, make, SUBJECTS[s]) for s in systems})

    def under_load(name: str, shows: str, sides: Mapping[str, Callable[[], Side]]) -> Scenario:
        runners = {s: partial(_on_side, sides[s], base, clients, window) for s in systems}
        return Scenario(f"{name}/{clients}", shows, (Metric("cycles_per_s", "cycles/s", False),), runners)

    cycle, removal, publish = Metric("cycle_s", "s"), Metric("removal_s", "s"), Metric("publish_s", "s")
    listed = []
    for name, columns in (("cycle", FIXED), ("cycle-jagged", JAGGED)):
        for live in live_rows:
            make = partial(CycleRun, columns=columns, live=live, cycles=cycles)
            listed.append(in_process(f"{name}/{live}", "create, publish, look up and tag one row", cycle, make))
    for name, scattered in (("removal", False), ("removal-scattered", True)):
        for live in removal_rows:
            make = partial(RemovalRun, live=live, removals=removals, scattered=scattered)
            listed.append(in_process(f"{name}/{live}", "clear 16 rows of one jagged field", removal, make))
    for rows in options.publish_rows:
        make = partial(PublishRun, columns=MIXED, live=base, rows=rows, publications=max(4, published // rows))
        listed.append(in_process(f"publish/{rows}", "publish new rows of 16 fields at once", publish, make))
    for live in live_rows:
        weigh = {s: partial(MemoryRun, SUBJECTS[s], MIXED, live) for s in systems}
        shows = "resident memory per live row"
        listed.append(Scenario(f"memory/{live}", shows, (Metric("row_bytes", "bytes"),), weigh, False, most_runs=1))
    listed.append(under_load("zmq", "cycles of closed-loop connections, fused where it can be", FUSED_SIDES))
    listed.append(under_load("zmq-unfused", "cycles of closed-loop connections, a message each", UNFUSED_SIDES))
    return listed


def _on_subject(make: Callable[[Subject], Runner], subject: Callable[[], Subject]) -> Runner:
    return make(subject())


def _on_side(side: Callable[[], Side], live: int, clients: int, window: float) -> Runner:
    return LoadRun(side(), live, clients, CLIENT_PROCESSES, window)


BENCHMARK: Final = Benchmark("recipes.bench_controller", str(__doc__), (5, 3), add_options, scenarios)


def main(argv: Sequence[str] | None = None) -> int:
    return run(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
