"""Configuration: defaults in one place, every mistake named."""

from __future__ import annotations

import pytest

from policies.config import CoalescerConfig, PlaneConfig, RolloutRecoveryConfig, load, load_yaml
from policies.errors import ConfigError


def test_defaults_are_those_of_the_design() -> None:
    config = RolloutRecoveryConfig()
    assert config.generation_prefix_batch_size == 256
    assert config.generation_prefix_batch_max_tokens == 4_194_304
    assert config.generation_prefix_batch_max_bytes == 268_435_456
    assert config.control_timeout_s == 60


def test_a_nested_mapping_loads() -> None:
    config = load_yaml(PlaneConfig, "units: 3\nrollout_recovery: {generation_prefix_batch_size: 8}\n")
    assert config.units == 3 and config.rollout_recovery.generation_prefix_batch_size == 8
    assert config.restore == CoalescerConfig(max_keys=8), "one knob for rows per PUT and keys per GET"
    assert load(PlaneConfig, {"request_timeout_s": 5}).request_timeout_s == 5.0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("unit: 3", "'unit'"),
        ("rollout_recovery: {batch: 1}", "'rollout_recovery.batch'"),
        ("units: two", "'units' is 'two'"),
        ("units: true", "'units' is True"),
        ("units: 0", "PlaneConfig.units is 0"),
        ("unit_placement: there", "PlaneConfig.unit_placement is 'there'"),
        ("coalescer: {window_s: -1}", "CoalescerConfig.window_s"),
        ("coalescer: {max_keys: 7}", "coalescer.max_keys is 7"),
        ("rollout_recovery: 3", "'rollout_recovery' is 3"),
        ("- 1", "mapping"),
        ("a: [", "not YAML"),
        ("x: !!python/object:os.system {}", "not YAML"),
    ],
)
def test_mistakes_are_named(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match=names.replace("[", r"\[")):
        load_yaml(PlaneConfig, text)
