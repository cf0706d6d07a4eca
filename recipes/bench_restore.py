"""What restoring cut calls costs their workers: all at once after a restart, and when there is little to share.

Scenarios, with MODE per-request (a read for each call), window (a coalescer that gathers for 2 ms) or natural (one that
gathers while it reads):
  mass/TOKENS/MODE           128 workers want 64 calls of that many tokens each, all at the same time
  mass/TOKENS/chain4/MODE    the calls' tokens lie in chains of 4 chunks
  every/MS/MODE              128 workers, each restores a call of 2,048 tokens every MS milliseconds
  light/MS/MODE              8 workers, the same
Seconds of a restore (p50, p99) count from when it was due, until its chain is verified. `regraft` reads 12 bytes a
token in reads of at most 256 keys and verifies each chain; `transferqueue` reads the same calls, 16 bytes a token, with
one async_kv_batch_get each in mode per-request; in mode natural of mass, in ideal reads of 256 keys, known in advance
and two at a time in each process. The workers share two processes, and the client of their process; storage has its
own."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from recipes.bench.benchmark import Benchmark, run
from recipes.bench.options import positive, positives
from recipes.bench.restore import regraft_side
from recipes.bench.restore.load import MODES, NATURAL, PER_REQUEST, Load, RestoreRun
from recipes.bench.scenario import REGRAFT, TRANSFERQUEUE, Metric, Runner, Scenario

METRICS: Final = (
    Metric("wall_s", "s"),
    Metric("p50_s", "s"),
    Metric("p99_s", "s"),
    Metric("gets", "gets"),
    Metric("keys_per_get", "keys", lower_is_better=False),
)
CHAIN: Final = 4
PACED_TOKENS: Final = 2_048
PROCESSES: Final = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument(
        "--workers", type=positive, metavar="N", help="workers of mass and every (default 128; with --quick 16)"
    )
    sizes.add_argument("--light-workers", type=positive, default=8, metavar="N", help="workers of light (default 8)")
    sizes.add_argument(
        "--restores", type=positive, metavar="N", help="calls of each worker (default 64; with --quick 16)"
    )
    sizes.add_argument(
        "--tokens", type=positives, metavar="N,N", help="per call of mass (default 16384,2048; with --quick 2048)"
    )
    sizes.add_argument(
        "--every-ms", type=positives, default=(5, 20), metavar="N,N", help="pauses of every (default 5,20)"
    )
    sizes.add_argument(
        "--light-ms", type=positives, default=(10, 50), metavar="N,N", help="pauses of light (default 10,50)"
    )


def scenarios(options: argparse.Namespace) -> list[Scenario]:
    quick = options.quick
    workers, restores = options.workers or (16 if quick else 128), options.restores or (16 if quick else 64)
    listed = []
    for tokens in options.tokens or ((2_048,) if quick else (16_384, 2_048)):
        for name, chunks in ((f"mass/{tokens}", 1), (f"mass/{tokens}/chain{CHAIN}", CHAIN)):
            load = Load(NATURAL, workers, restores, tokens, chunks)
            listed += _modes(name, "all restores at once", load, options.peer)
    for family, pauses, count in (
        ("every", options.every_ms, workers),
        ("light", options.light_ms, options.light_workers),
    ):
        for pause in pauses:
            load = Load(NATURAL, count, restores, PACED_TOKENS, pause_s=pause / 1000)
            listed += _modes(f"{family}/{pause}", "a restore at a time", load, options.peer)
    return listed


def _modes(name: str, shows: str, load: Load, peer: str | None) -> list[Scenario]:
    listed = []
    for mode in MODES:
        in_mode, title = replace(load, mode=mode), f"{name}/{mode}"
        systems: dict[str, Callable[[], Runner]] = {REGRAFT: partial(_regraft, title, in_mode)}
        if peer == TRANSFERQUEUE and (mode == PER_REQUEST or (mode == NATURAL and not load.pause_s)):
            systems[TRANSFERQUEUE] = partial(_transfer_queue, title, in_mode)
        listed.append(Scenario(title, shows, METRICS, systems))
    return listed


def _regraft(name: str, load: Load) -> Runner:
    return RestoreRun(name, regraft_side.store, regraft_side.work, load, PROCESSES)


def _transfer_queue(name: str, load: Load) -> Runner:
    # Its processes share a Ray. Those that join one must be told that it wants a token, before they begin.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from recipes.bench.restore import transfer_queue_side

    return RestoreRun(name, transfer_queue_side.store, transfer_queue_side.work, load, PROCESSES)


BENCHMARK: Final = Benchmark("recipes.bench_restore", str(__doc__), (5, 3), add_options, scenarios)


def main(argv: Sequence[str] | None = None) -> int:
    return run(BENCHMARK, argv)


if __name__ == "__main__":
    sys.exit(main())
