"""The shared command line: defaults, and one clear line for everything that cannot work."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from policies.errors import ConfigError
from recipes.bench.options import parse, positive, positives


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=positives, default=(20, 300))
    parser.add_argument("--clients", type=positive, default=96)


def parsed(*argv: str) -> argparse.Namespace:
    return parse("recipes.bench_some", "What it shows.", (7, 3), add_options, ["--out", "r.json", *argv])


def test_the_defaults_of_a_full_and_of_a_quick_run() -> None:
    full, quick = parsed(), parsed("--quick")
    assert (full.reps, full.quick, full.peer, full.rows, full.clients) == (7, False, None, (20, 300), 96)
    assert (quick.reps, quick.quick) == (3, True)
    assert parsed("--quick", "--reps", "5").reps == 5


def test_sizes_are_lists_without_repeats() -> None:
    assert parsed("--rows", "5,7,5").rows == (5, 7)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--reps", "0"], "--reps: it is 0 and must be at least 1"),
        (["--reps", "many"], "--reps: 'many' is no whole number"),
        (["--rows", "5,,7"], "--rows: '' is no whole number"),
        (["--rows", "5,-7"], "--rows: it is -7"),
        (["--clients", "1.5"], "--clients: '1.5' is no whole number"),
        (["--peer", "other"], "--peer: invalid choice: 'other'"),
        (["--row", "5"], "unrecognized arguments: --row"),
    ],
)
def test_what_cannot_work_is_refused_by_name(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parsed(*argv)
    assert named in refusal.value.message
    assert "\n" not in refusal.value.message


def test_an_output_must_be_named() -> None:
    with pytest.raises(ConfigError, match="--out"):
        parse("recipes.bench_some", "", (7, 3), add_options, [])


def test_a_peer_that_is_not_installed_is_refused_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'regraft\[transferqueue\]'"):
        parsed("--peer", "transferqueue")
    assert parsed().peer is None
