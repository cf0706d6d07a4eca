"""The command line: what can be asked for, and what is refused before anything is touched.

Guarantees: `parse` only reads; every refusal is a `ConfigError` of one line that names the option, what it was and what
it must be.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from policies.errors import ConfigError
from policies.manifest import newest_first
from recipes.prefix_recovery.plan import PLAN_FILE, Plan, PlannedCall
from recipes.prefix_recovery.prompts import load_prompts

REFERENCE_FILE: Final = "reference.safetensors"
ROWS_FILE: Final = "rows.safetensors"
CHECKPOINTS: Final = "checkpoints"

DESCRIPTION: Final = """\
Shows what regraft is for, and proves that it works. Three phases:
  reference  every call generates to its end, without interruption
  cut        the same calls again; while they generate, they are cut and checkpointed, then every process of the
             cluster gets SIGKILL
  resume     a fresh cluster restores the checkpoint from disk and every call goes on from where it was cut
Then every recovered row is compared with its reference, token by token and logprob by logprob."""

EPILOG: Final = """\
DIR gets report.json, timeline.png, plan.json, the rows, the checkpoints and the logs of both lives. What an earlier run
of this recipe wrote into DIR is replaced. Exit status: 0 when every row matches, 1 when one does not or the run failed,
2 when the options are refused, 130 after Ctrl-C."""

_DEFAULTS: Final[Mapping[str, Any]] = {
    "engine": "smollm2",
    "leaders": 2,
    "calls": 8,
    "max_tokens": 160,
    "cut_after": 48,
    "cuts": 2,
    "cut_gap": 24,
    "seed": 0,
    "temperature": 0.8,
    "top_p": 0.95,
    "resume": "exact",
    "kill_after": 0.5,
    "address": "",
}
_TINY_DEFAULTS: Final[Mapping[str, Any]] = {"max_tokens": 1600, "cut_after": 300, "cut_gap": 150}
"""The tiny engine makes some hundred tokens a second for each call, so its calls must be longer to be cut midway."""

_WITH_FROM: Final = ("engine", "leaders", "resume", "address")
"""What may be chosen anew when an earlier run is resumed; all else is part of that run."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """A checked command line. ``plan`` has no ``temp_dir`` yet. ``source`` is the earlier run to resume, if any;
    ``kill_after`` the seconds between the publication of the checkpoint and the kill."""

    out: Path
    source: Path | None
    kill_after: float
    plan: Plan


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help explains the options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m recipes.prefix_recovery",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )

    def option(name: str, kind: type, text: str, metavar: str, **more: Any) -> None:
        key = name.lstrip("-").replace("-", "_")
        default, tiny = _DEFAULTS[key], _TINY_DEFAULTS.get(key)
        if default != "":
            text += f" (default {default})" if tiny is None else f" (default {default}, tiny: {tiny})"
        parser.add_argument(name, type=kind, help=text, metavar=metavar, **more)

    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where everything is written")
    option("--engine", str, "smollm2: SmolLM2-135M-Instruct; tiny: random weights, in seconds, for tests", "NAME")
    option("--leaders", int, "generation engines, each with a coordinator and a coalescer of its own", "N")
    option("--calls", int, "generations, dealt to the leaders in turn", "N")
    option("--max-tokens", int, "tokens that a call generates at most", "N")
    option("--cut-after", int, "the first cut comes when the slowest active call has so many tokens", "N")
    option("--cuts", int, "cuts before the kill; each adds one chunk to a call's chain", "N")
    option("--cut-gap", int, "tokens of the slowest active call between two cuts", "N")
    option("--seed", int, "seed of the first call; each further call has the next one", "N")
    option("--temperature", float, "of the sampling; 0 is greedy", "T")
    option("--top-p", float, "of the sampling, in (0, 1]", "P")
    option("--resume", str, "exact: replay a prefix, bit-identical logprobs; fast: prefill it in one pass", "HOW")
    option("--kill-after", float, "seconds between the publication of the checkpoint and the kill", "SECONDS")
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="RUN_DIR",
        help="only the second life: resume the newest whole checkpoint of this earlier run, compare with its rows",
    )
    option("--address", str, "run on this Ray cluster; then only the job's own actors end at the kill", "ADDRESS")
    return parser


def parse(argv: Sequence[str] | None = None) -> Arguments:
    """Read and check the command line. Raises `ConfigError`; ``--help`` is a `SystemExit`."""
    given = vars(_parser().parse_args(argv))
    out: Path = given.pop("out").absolute()
    source: Path | None = given.pop("source", None)
    options = {**_DEFAULTS, **(_TINY_DEFAULTS if given.get("engine") == "tiny" else {}), **given}
    _check_choices(options)
    _check_numbers(options)
    if source is not None:
        return _resumption(out, source.absolute(), given, options["kill_after"])
    _check_cuts(options)
    return Arguments(out, None, options["kill_after"], _plan(out, options))


def _plan(out: Path, options: Mapping[str, Any]) -> Plan:
    prompts, seed = load_prompts(), options["seed"]
    calls = tuple(PlannedCall(f"c{i}", prompts[i % len(prompts)], seed + i) for i in range(options["calls"]))
    shared = {name: value for name, value in options.items() if name not in ("calls", "kill_after")}
    return Plan(
        calls=calls,
        reference=str(out / REFERENCE_FILE),
        checkpoints=str(out / CHECKPOINTS),
        rows=str(out / ROWS_FILE),
        temp_dir="",
        **shared,
    )


def _resumption(out: Path, source: Path, given: Mapping[str, Any], kill_after: float) -> Arguments:
    for name in given:
        if name not in _WITH_FROM:
            raise ConfigError(f"{_flag(name)} cannot be given with --from: it is part of the earlier run; leave it out")
    if not source.is_dir():
        raise ConfigError(f"--from {source} is not a directory; give the --out of an earlier run")
    if out.resolve() == source.resolve():
        raise ConfigError(f"--from and --out are both {out}; give another --out, so that the earlier run is kept")
    try:
        plan = Plan.read(source / PLAN_FILE)
    except ConfigError as error:
        raise ConfigError(f"--from {source} is no earlier run: {error.message}") from error
    checkpoints, reference = source / CHECKPOINTS, source / REFERENCE_FILE
    if not checkpoints.is_dir() or not newest_first(path.name for path in checkpoints.iterdir()):
        raise ConfigError(f"--from {source} has no checkpoint in {checkpoints}; give a run that published one")
    if not reference.is_file():
        raise ConfigError(f"--from {source} has no reference rows {reference}; give a run that got past its reference")
    chosen = {"resume": _DEFAULTS["resume"], "address": _DEFAULTS["address"], **given}
    plan = replace(
        plan, checkpoints=str(checkpoints), reference=str(reference), rows=str(out / ROWS_FILE), temp_dir="", **chosen
    )
    _check_leaders(plan.leaders, len(plan.calls))
    return Arguments(out, source, kill_after, plan)


def _check_choices(options: Mapping[str, Any]) -> None:
    for name, choices in (("engine", ("smollm2", "tiny")), ("resume", ("exact", "fast"))):
        if options[name] not in choices:
            raise ConfigError(f"{_flag(name)} is {options[name]!r}; it must be {' or '.join(choices)}")


def _check_numbers(options: Mapping[str, Any]) -> None:
    for name in ("leaders", "calls", "max_tokens", "cut_after", "cuts", "cut_gap"):
        if options[name] < 1:
            raise ConfigError(f"{_flag(name)} is {options[name]}; it must be at least 1")
    for name in ("seed", "temperature", "kill_after"):
        if not (options[name] >= 0 and math.isfinite(options[name])):
            raise ConfigError(f"{_flag(name)} is {options[name]}; it must be at least 0")
    if not 0 < options["top_p"] <= 1:
        raise ConfigError(f"--top-p is {options['top_p']}; it must be more than 0 and at most 1")
    _check_leaders(options["leaders"], options["calls"])


def _check_leaders(leaders: int, calls: int) -> None:
    if calls < leaders:
        raise ConfigError(f"--leaders is {leaders} and there are {calls} calls; each leader must get a call")


def _check_cuts(options: Mapping[str, Any]) -> None:
    last = options["cut_after"] + (options["cuts"] - 1) * options["cut_gap"]
    if last >= options["max_tokens"]:
        raise ConfigError(
            f"the last cut would come after {last} tokens (--cut-after {options['cut_after']}, --cuts {options['cuts']}"
            f", --cut-gap {options['cut_gap']}), but a call ends at --max-tokens {options['max_tokens']}; cut earlier"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
