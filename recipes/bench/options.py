"""The command line that all benchmarks share.

Guarantees: `parse` only reads; every refusal is a `ConfigError` of one line that names the option, what it was and what
it must be.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from policies.errors import ConfigError
from recipes.bench.scenario import TRANSFERQUEUE

PEERS: Final = (TRANSFERQUEUE,)
_PEER_MODULE: Final = "transfer_queue"

EPILOG: Final = """\
Systems take turns in one run, after an uncounted warm-up; figures are medians with their ranges. FILE.json gets the
machine, the versions and one record per scenario, system and metric; FILE.png, beside it, the picture. A run that
breaks off leaves an earlier FILE.json as it was and writes what it had measured to FILE.partial.json. Exit status: 0
when everything was measured, 1 when a check failed, 2 when the options are refused, 130 after Ctrl-C."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help explains the options")


def parse(
    name: str,
    description: str,
    repetitions: tuple[int, int],
    add_options: Callable[[argparse.ArgumentParser], None],
    argv: Sequence[str] | None,
) -> argparse.Namespace:
    """``out``, ``quick``, ``reps``, ``peer`` and what ``add_options`` adds. ``repetitions``: default, and with
    ``--quick``. Raises `ConfigError`; ``--help`` is a `SystemExit`."""
    parser = _Parser(
        prog=f"python -m {name}",
        description=description,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    full, quick = repetitions
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="where the report is written")
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer repetitions, for a first look")
    parser.add_argument(
        "--reps", type=positive, metavar="N", help=f"counted repetitions (default {full}, with --quick {quick})"
    )
    parser.add_argument(
        "--peer",
        choices=PEERS,
        help="measure this system in the same run on the same rows; it must be installed (the extra of its name)",
    )
    add_options(parser)
    options = parser.parse_args(argv)
    options.reps = options.reps or (quick if options.quick else full)
    _require_peer(options.peer)
    return options


def _require_peer(peer: str | None) -> None:
    if peer is not None and importlib.util.find_spec(_PEER_MODULE) is None:
        raise ConfigError(
            f"--peer {peer}: it is not installed; install the extra with pip install 'regraft[{peer}]' "
            f"(in a checkout: pip install -e '.[{peer}]'), or leave the option out"
        )


def positive(text: str) -> int:
    """An option's value that counts something, at least one of it."""
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"it is {count} and must be at least 1")
    return count


def positives(text: str) -> tuple[int, ...]:
    """An option's value that lists sizes: ``20000,300000``."""
    return tuple(dict.fromkeys(positive(part) for part in text.split(",")))
