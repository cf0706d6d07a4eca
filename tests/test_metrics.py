"""The numbers of a receipt as Ray metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors import metrics

NUMBERS = {
    "calls": 5.0, "durable_prefix": 3.0, "durable_failure": 2.0, "failed_no_tokens": 2.0, "puts": 2.0, "bytes": 96.0,
    "rows_retried": 0.0, "longest_frozen_s": 0.001, "largest_put_bytes": 48.0, "decode_during_per_s": 80.0,
}  # fmt: skip


class Recorded:
    """Stands for a class of `ray.util.metrics`."""

    values: dict[tuple[str, str], Any]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        self._name, self._tag_keys = name, tag_keys

    def record(self, value: float, tags: dict[str, str]) -> None:
        assert set(tags) == set(self._tag_keys)
        outcome = tags.get("outcome", "")
        self.values[self._name, outcome] = self.values.get((self._name, outcome), 0.0) + value

    inc = record


class RecordedGauge(Recorded):
    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._name, ""] = value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[tuple[str, str], float]]:
    class Context:
        def get_actor_id(self) -> str:
            return "a7"

    Recorded.values = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    monkeypatch.setattr(metrics, "Counter", Recorded)
    monkeypatch.setattr(metrics, "Gauge", RecordedGauge)
    metrics._metric.cache_clear()
    yield Recorded.values
    metrics._metric.cache_clear()


def test_counts_add_up_over_cuts_and_the_rest_is_that_of_the_last(recorded: dict[tuple[str, str], float]) -> None:
    metrics.report_cut(NUMBERS)
    metrics.report_cut(NUMBERS)
    assert recorded == {
        ("regraft_cuts", ""): 2.0,
        ("regraft_cut_calls_by_outcome", "durable_prefix"): 6.0,
        ("regraft_cut_calls_by_outcome", "no_tokens"): 4.0,
        ("regraft_cut_puts", ""): 4.0,
        ("regraft_cut_bytes", ""): 192.0,
        ("regraft_cut_longest_frozen_s", ""): 0.001,
        ("regraft_cut_largest_put_bytes", ""): 48.0,
        ("regraft_cut_decode_during_per_s", ""): 80.0,
    }


def test_without_ray_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(metrics, "Counter", None)
    metrics.report_cut(NUMBERS)


def test_ray_takes_them_from_an_actor(ray_cluster: str) -> None:
    @ray.remote
    class Reporter:
        def report(self, numbers: dict[str, float]) -> int:
            metrics.report_cut(numbers)
            return metrics._metric.cache_info().currsize

    reporter = Reporter.remote()
    assert ray.get(reporter.report.remote(NUMBERS)) == 7
    ray.kill(reporter)
