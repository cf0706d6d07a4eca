"""What a cut of many active calls costs: how fast their tokens are durable, in how many PUTs, with how much memory.

8,192 calls, 256 on each of 32 coordinators, are cut at once. Scenarios:
  cut/TOKENS/ROWS            every call has that many tokens; at most ROWS rows in one PUT
  cut/TOKENS/ROWS/chain4     they are staged by four cuts, each a quarter; seconds and PUTs of all four
  cut/TOKENS/ROWS/routes     every token also has 48 x 8 int16 expert indices; fewer calls, so that they fit in memory
  cut/…/equal-bytes          regraft stages a mask of 4 bytes a token as well, and so as many bytes as the peer
Timed is from the order to cut until every call is durable: freezing, packing, writing, validating, sealing. `regraft`
stages ids int32, logprobs float32 and weight versions int32, 12 bytes a token (a mask follows from the lengths).
`transferqueue` stages the same calls through async_kv_batch_put as ids int64, mask float32, logprobs float32, 16 bytes
a token, with the same rows in one put and as many writers at once. Coordinators and writers share one process, storage
has its own. Peak memory is what the staging process grew by. Rows are checked after every run, and cleared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from recipes.bench.benchmark import Benchmark, run
from recipes.bench.cut import regraft_side
from recipes.bench.cut.load import CutRun, Load
from recipes.bench.options import positive, positives
from recipes.bench.scenario import REGRAFT, TRANSFERQUEUE, Metric, Runner, Scenario
from recipes.bench.servers import limit_peer_threads

METRICS: Final = (
    Metric("rows_per_s", "rows/s", lower_is_better=False),
    Metric("wall_s", "s"),
    Metric("row_wait_s", "s"),
    Metric("puts", "puts"),
    Metric("peak_bytes", "bytes"),
)
CHAIN: Final = 4


def add_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--calls", type=positive, metavar="N", help="calls without routes (default 8192; with --quick 512)"
    )
    sizes.add_argument(
        "--routes-calls", type=positive, metavar="N", help="calls with routes (default 512; with --quick 64)"
    )
    sizes.add_argument("--coordinators", type=positive, metavar="N", help="coordinators (default 32; with --quick 2)")
    sizes.add_argument(
        "--tokens", type=positives, metavar="N,N", help="per call (default 1024,16384; with --quick 1024)"
    )
    sizes.add_argument(
        "--rows-per-put", type=positives, default=(1, 256), metavar="N,N", help="rows in one PUT (default 1,256)"
    )


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    quick = options.quick
    calls, routes_calls = options.calls or (512 if quick else 8192), options.routes_calls or (64 if quick else 512)
    coordinators = options.coordinators or (2 if quick else 32)
    listed = []
    for tokens in options.tokens or ((1024,) if quick else (1024, 16_384)):
        for rows in options.rows_per_put:
            name, load = f"cut/{tokens}/{rows}", Load(calls, coordinators, tokens, rows)
            chained = Load(calls, coordinators, tokens, rows, cuts=CHAIN)
            padded = Load(calls, coordinators, tokens, rows, padded=True)
            listed.append(_scenario(name, "calls made durable", load, options.peer))
            listed.append(_scenario(f"{name}/equal-bytes", "calls of 16 bytes a token", padded, options.peer))
            listed.append(_scenario(f"{name}/chain{CHAIN}", "chunks made durable", chained, options.peer))
        routed = Load(routes_calls, coordinators, min(tokens, 1024), max(options.rows_per_put), routes=True)
        if tokens == routed.tokens:
            shows = "calls with routes made durable"
            listed.append(_scenario(f"cut/{tokens}/{routed.rows_per_put}/routes", shows, routed, options.peer))
    return listed


def _scenario(name: str, shows: str, load: Load, peer: str | None) -> Scenario:
    systems: dict[str, Callable[[], Runner]] = {REGRAFT: partial(CutRun, name, regraft_side.serve, load)}
    if peer == TRANSFERQUEUE:
        systems[TRANSFERQUEUE] = partial(_peer_run, name, load)
    return Scenario(name, shows, METRICS, systems)


def _peer_run(name: str, load: Load) -> Runner:
    limit_peer_threads()
    from recipes.bench.cut import transfer_queue_side

    return CutRun(name, transfer_queue_side.serve, load)


BENCHMARK: Final = Benchmark("recipes.bench_cut", str(__doc__), (5, 3), add_options, scenarios)


def main(argv: Sequence[str] | None = None) -> int:
    return run(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
