"""Ray metrics: the one place where regraft's numbers become metrics of the cluster.

Outside a Ray process nothing is recorded. Names begin with ``regraft_``; every metric has the tag ``coordinator``, the
id of the actor. Cost: one call per number and cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final

import ray
from ray.util.metrics import Counter, Gauge

_COUNTED: Final = frozenset({"puts", "rows", "tokens", "bytes", "rows_retried", "puts_in_doubt", "clears_failed"})

_SUMS: Final = frozenset({"calls", "durable_failure"})
"""What outcomes add up to."""


def report_cut(numbers: Mapping[str, float]) -> None:
    """Record the numbers of a receipt: what adds up over cuts as counters, calls by what became of them (``outcome`` is
    ``durable_prefix`` or the reason of a failure), everything else as gauges of the last cut."""
    if not ray.is_initialized():
        return
    tags = {"coordinator": ray.get_runtime_context().get_actor_id() or "none"}
    _metric(Counter, "regraft_cuts", ()).inc(1, tags)
    for name, value in numbers.items():
        if name == "durable_prefix" or name.startswith("failed_"):
            outcome = {"outcome": name.removeprefix("failed_")}
            if value:
                _metric(Counter, "regraft_cut_calls_by_outcome", ("outcome",)).inc(value, {**tags, **outcome})
        elif name in _COUNTED:
            if value:
                _metric(Counter, f"regraft_cut_{name}", ()).inc(value, tags)
        elif name not in _SUMS:
            _metric(Gauge, f"regraft_cut_{name}", ()).set(value, tags)


@cache
def _metric(kind: Any, name: str, tags: tuple[str, ...]) -> Any:
    return kind(name, description="see regraft's receipts", tag_keys=("coordinator", *tags))
