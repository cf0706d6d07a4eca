"""What storing rows and reading them back costs, through whole systems: writers, storage units, readers.

Rows have ids int64, mask float32 and logprobs float32 of TOKENS tokens each, 16 bytes a token; 8 client processes own
an equal part each and begin together; two storage units. Scenarios:
  write/TOKENS/ROWS             all rows are written, ROWS of them in one PUT, one PUT after another in each process
  read/TOKENS/KEYS              all rows are read by another process, KEYS in one GET; of one key, 32 GETs at once
  read/TOKENS/KEYS/touched      what is read is also summed up, while the clock runs: a reference costs nothing before
  read/TOKENS/KEYS/scattered    the keys of a GET were written by different PUTs
  …/cold                        the first time after the start, in which no memory was used before; measured once
  latency/TOKENS                GETs of one key, one after another in one process, all else idle
  memory/TOKENS                 what units and object store grow by per byte that is stored, measured once
Systems share one Ray, an object store of 6 GiB, and take turns. `regraft` uses references to that store for what is
large enough, `regraft-frames` never (it is the same for one row). `transferqueue` is used through kv_batch_put and
kv_batch_get of dense tensors. `zmq-socket` sends the same bytes over bare sockets, zero-copy, and `memcpy` copies them
in as many processes: what the machine allows. Of every GET all lengths and one whole row are compared. Memory is the
resident memory of the units' own, and the object store's bytes in use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Final

from recipes.bench.benchmark import Benchmark, run
from recipes.bench.options import positive, positives
from recipes.bench.scenario import (
    MEMCPY,
    REGRAFT,
    REGRAFT_FRAMES,
    TRANSFERQUEUE,
    ZMQ_SOCKET,
    Metric,
    Runner,
    Scenario,
)
from recipes.bench.storage import bounds
from recipes.bench.storage.cluster import Cluster, Period, System
from recipes.bench.storage.load import Load, Reading
from recipes.bench.storage.regraft_side import RegraftSide
from recipes.bench.storage.runs import LatencyRun, MemoryRun, ReadRun, WriteRun
from recipes.bench.storage.side import StorageSide

MOVED: Final = (
    Metric("rows_per_s", "rows/s", lower_is_better=False),
    Metric("gb_per_s", "GB/s", lower_is_better=False),
    Metric("wall_s", "s"),
)
LATENCY: Final = (Metric("p50_s", "s"), Metric("p99_s", "s"))
MEMORY: Final = (Metric("bytes_per_byte", "bytes/byte"),)

IN_FLIGHT: Final = 32
"""GETs of one key that a process has open at a time."""
OBJECT_STORE_MIB: Final = 6144

MakeRun = Callable[[System], Runner]


def add_options(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--rows", type=positive, metavar="N", help="rows (default 8192; with --quick 2048)")
    sizes.add_argument(
        "--single-rows", type=positive, metavar="N", help="rows written or read one by one (default 2048; quick 512)"
    )
    sizes.add_argument(
        "--tokens", type=positives, metavar="N,N", help="per row (default 1024,16384; with --quick 1024)"
    )
    sizes.add_argument("--batch", type=positive, default=256, metavar="N", help="rows in a PUT or GET (default 256)")
    sizes.add_argument("--clients", type=positive, metavar="N", help="client processes (default 8; with --quick 4)")
    sizes.add_argument(
        "--store-mib",
        type=positive,
        default=OBJECT_STORE_MIB,
        metavar="N",
        help=f"size of Ray's object store (default {OBJECT_STORE_MIB})",
    )


def scenarios(options: argparse.Namespace, cluster: Cluster) -> list[Scenario]:
    """One row in a PUT and one key in a GET are measured with the fewest tokens only: there it is that counts."""
    tokens = options.tokens or ((1024,) if options.quick else (1024, 16_384))
    listed = []
    for each in tokens:
        listed += _of_batches(options, cluster, each)
        if each == min(tokens):
            listed += _of_single_rows(options, cluster, each)
        listed.append(_latency(options, cluster, each))
    return listed


def _of_batches(options: argparse.Namespace, cluster: Cluster, tokens: int) -> list[Scenario]:
    batch = options.batch
    load = Load(options.rows or (2048 if options.quick else 8192), tokens, batch, _clients(options))
    names = (REGRAFT, REGRAFT_FRAMES, *_peers(options))

    def scenario(name: str, shows: str, make: MakeRun, once: bool = False) -> Scenario:
        metrics = MEMORY if name.startswith("memory") else MOVED
        return Scenario(
            name, shows, metrics, _on(cluster, names, _period(options, tokens), make), not once, 1 if once else None
        )

    def read(reading: Reading) -> MakeRun:
        return partial(_read, load=load, reading=reading)

    write = partial(WriteRun, load=load)
    limits = {ZMQ_SOCKET: partial(bounds.zmq_socket, load), MEMCPY: partial(bounds.memcpy, load)}
    warm = scenario(f"write/{tokens}/{batch}", "rows written", write)
    return [
        scenario(f"write/{tokens}/{batch}/cold", "rows written for the first time", write, once=True),
        scenario(f"read/{tokens}/{batch}/cold", "rows read for the first time", read(Reading(batch)), once=True),
        scenario(f"memory/{tokens}", "memory per stored byte", partial(MemoryRun, load=load), once=True),
        Scenario(warm.name, warm.shows, MOVED, {**warm.systems, **limits}),
        scenario(f"read/{tokens}/{batch}", "rows read", read(Reading(batch))),
        scenario(f"read/{tokens}/{batch}/touched", "rows read and summed", read(Reading(batch, touched=True))),
        scenario(f"read/{tokens}/{batch}/scattered", "rows of many PUTs read", read(Reading(batch, scattered=True))),
    ]


def _of_single_rows(options: argparse.Namespace, cluster: Cluster, tokens: int) -> list[Scenario]:
    rows = options.single_rows or (512 if options.quick else 2048)
    alone = Load(rows, tokens, 1, _clients(options))
    together = Load(rows, tokens, min(options.batch, -(-rows // _clients(options))), _clients(options))
    reading = Reading(1, in_flight=IN_FLIGHT)
    systems = partial(_on, cluster, (REGRAFT, *_peers(options)), _period(options, tokens))
    return [
        Scenario(f"write/{tokens}/1", "rows written one by one", MOVED, systems(partial(WriteRun, load=alone))),
        Scenario(
            f"read/{tokens}/1", "rows read one by one", MOVED, systems(partial(_read, load=together, reading=reading))
        ),
    ]


def _latency(options: argparse.Namespace, cluster: Cluster, tokens: int) -> Scenario:
    load = Load(_clients(options) * options.batch, tokens, options.batch, _clients(options))
    systems = _on(cluster, (REGRAFT, *_peers(options)), _period(options, tokens), partial(LatencyRun, load=load))
    return Scenario(f"latency/{tokens}", "a GET of one key", LATENCY, systems)


def _read(system: System, load: Load, reading: Reading) -> Runner:
    return ReadRun(system, load, reading)


def _on(cluster: Cluster, names: Sequence[str], period: Period, make: MakeRun) -> Mapping[str, Callable[[], Runner]]:
    return {name: partial(_run_on, cluster, name, period, make) for name in names}


def _run_on(cluster: Cluster, name: str, period: Period, make: MakeRun) -> Runner:
    return make(cluster.system(name, period))


def _clients(options: argparse.Namespace) -> int:
    return options.clients or (4 if options.quick else 8)


def _period(options: argparse.Namespace, tokens: int) -> Period:
    return Period(str(tokens), _clients(options), options.store_mib << 20)


def _peers(options: argparse.Namespace) -> tuple[str, ...]:
    return (options.peer,) if options.peer else ()


def _transfer_queue_side() -> StorageSide:
    from recipes.bench.storage.transfer_queue_side import TransferQueueSide

    return TransferQueueSide()


SIDES: Final[Mapping[str, Callable[[], StorageSide]]] = {
    REGRAFT: partial(RegraftSide, REGRAFT, by_reference=True),
    REGRAFT_FRAMES: partial(RegraftSide, REGRAFT_FRAMES, by_reference=False),
    TRANSFERQUEUE: _transfer_queue_side,
}


def main(argv: Sequence[str] | None = None) -> int:
    with closing(Cluster(SIDES)) as cluster:
        listed = partial(scenarios, cluster=cluster)
        return run(Benchmark("recipes.bench_storage", str(__doc__), (3, 2), add_options, listed), argv)


if __name__ == "__main__":
    sys.exit(main())
