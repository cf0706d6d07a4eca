"""Configuration: frozen dataclasses, the only place where defaults stand.

Loadable from a mapping or a YAML file; an unknown name or an impossible value is a `ConfigError` that names the field.
All of these are runtime knobs. None of them is part of a checkpoint's fingerprint, so changing one never invalidates a
checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from policies.errors import ConfigError

T = TypeVar("T")

ENCRYPTIONS = ("none", "curve")


def _require(owner: object, name: str, ok: bool, need: str) -> None:
    if not ok:
        raise ConfigError(f"{type(owner).__name__}.{name} is {getattr(owner, name)!r}; it must be {need}", field=name)


@dataclass(frozen=True, slots=True)
class RolloutRecoveryConfig:
    """Knobs of cut and restore. An engine that cannot cut accepts all of them and ignores them.

    ``generation_prefix_batch_size``: rows per cut-time PUT, and keys per restore GET. ``…_max_tokens``: tokens per
    PUT. ``…_max_bytes``: bytes per PUT, all fields counted. ``control_timeout_s``: no write of a cut starts later than
    this many seconds after the cut's start. ``terminal_evidence_s``: for how long a coordinator can say of a call that
    ended what it came to.
    """

    generation_prefix_batch_size: int = 256
    generation_prefix_batch_max_tokens: int = 4_194_304
    generation_prefix_batch_max_bytes: int = 268_435_456
    control_timeout_s: float = 60.0
    terminal_evidence_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (
            "generation_prefix_batch_size",
            "generation_prefix_batch_max_tokens",
            "generation_prefix_batch_max_bytes",
        ):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("control_timeout_s", "terminal_evidence_s"):
            _require(self, name, getattr(self, name) > 0, "more than 0 seconds")


@dataclass(frozen=True, slots=True)
class CoalescerConfig:
    """Bounds of one `ReadCoalescer`.

    ``max_keys`` per GET (leaders of a plane use its ``generation_prefix_batch_size``), ``max_tokens`` and ``max_bytes``
    per GET as far as they are known beforehand, ``max_in_flight`` GETs at once, ``max_waiting`` keys queued before
    callers are made to wait, ``window_s`` to gather before a GET leaves (0: natural batching only), ``timeout_s``
    deadline of each GET, ``probe_after_s`` until a unit that is down is probed for the first time, ``cache_bytes`` kept
    of rows that several callers want in turn.
    """

    max_keys: int = 256
    max_tokens: int = 4_194_304
    max_bytes: int = 268_435_456
    max_in_flight: int = 2
    max_waiting: int = 65_536
    window_s: float = 0.0
    timeout_s: float = 30.0
    probe_after_s: float = 1.0
    cache_bytes: int = 16_777_216

    def __post_init__(self) -> None:
        for name in ("max_keys", "max_tokens", "max_bytes", "max_in_flight", "max_waiting"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "window_s", self.window_s >= 0, "at least 0 seconds")
        _require(self, "cache_bytes", self.cache_bytes >= 0, "at least 0")
        for name in ("timeout_s", "probe_after_s"):
            _require(self, name, getattr(self, name) > 0, "more than 0 seconds")


@dataclass(frozen=True, slots=True)
class TransportConfig:
    """When bytes travel by reference to an object of Ray's store instead of in frames (`policies.transport`).

    ``put_by_reference_bytes``: a put of at least so many. ``get_by_reference_bytes``: a read of at least so many out of
    one block, if they are at least ``get_by_reference_fraction`` of the block. ``store_reserve``: the fraction of a
    node's object store that references leave to others; frames take over before it is touched. ``by_reference`` False
    turns references off.
    """

    by_reference: bool = True
    put_by_reference_bytes: int = 3 << 20
    get_by_reference_bytes: int = 5 << 20
    get_by_reference_fraction: float = 0.5
    store_reserve: float = 0.2

    def __post_init__(self) -> None:
        for name in ("put_by_reference_bytes", "get_by_reference_bytes"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("get_by_reference_fraction", "store_reserve"):
            _require(self, name, 0 <= getattr(self, name) <= 1, "a fraction, 0 to 1")


@dataclass(frozen=True, slots=True)
class PlaneConfig:
    """How a plane is laid out and how patient its parts are.

    ``units``: storage units. ``unit_cpus``: CPUs that Ray reserves for each (they mostly wait, so none by default).
    ``unit_placement``: ``"spread"`` puts them on as many nodes as there are, ``"here"`` all on the node of the process
    that launches the plane, where a checkpoint directory without a shared file system lies.
    ``unit_capacity_bytes`` and ``unit_capacity_rows``: what a unit takes before it refuses with `CapacityExceeded`.
    ``request_timeout_s``:
    default deadline of a client request. ``launch_timeout_s``: how long `DataPlane.launch` waits for its actors to be
    scheduled. ``max_frame_bytes``: largest frame a peer accepts. ``strict_partitions``: when set, only partitions
    declared with `create_partition` exist.
    ``max_undelivered_bytes``: answers on their way to one peer above which it waits for more. ``encryption``:
    ``"none"`` keeps strangers out by a secret that travels in clear, ``"curve"`` encrypts all traffic between actors
    and clients.
    """

    units: int = 2
    unit_cpus: float = 0.0
    unit_placement: str = "spread"
    unit_capacity_bytes: int = 8 << 30
    unit_capacity_rows: int = 100_000_000
    request_timeout_s: float = 30.0
    launch_timeout_s: float = 60.0
    max_frame_bytes: int = 4 << 30
    max_undelivered_bytes: int = 256 << 20
    encryption: str = "none"
    strict_partitions: bool = False
    rollout_recovery: RolloutRecoveryConfig = field(default_factory=RolloutRecoveryConfig)
    coalescer: CoalescerConfig = field(default_factory=CoalescerConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)

    def __post_init__(self) -> None:
        for name in ("units", "unit_capacity_bytes", "unit_capacity_rows", "max_frame_bytes", "max_undelivered_bytes"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "unit_placement", self.unit_placement in ("spread", "here"), "'spread' or 'here'")
        _require(self, "encryption", self.encryption in ENCRYPTIONS, f"one of {', '.join(ENCRYPTIONS)}")
        _require(self, "unit_cpus", self.unit_cpus >= 0, "at least 0")
        keys = self.rollout_recovery.generation_prefix_batch_size
        if self.coalescer.max_keys not in (CoalescerConfig().max_keys, keys):
            raise ConfigError(
                f"coalescer.max_keys is {self.coalescer.max_keys}; keys per restore GET are set by "
                f"rollout_recovery.generation_prefix_batch_size, which is {keys}",
                field="coalescer.max_keys",
            )
        for name in ("request_timeout_s", "launch_timeout_s"):
            _require(self, name, getattr(self, name) > 0, "more than 0 seconds")

    @property
    def restore(self) -> CoalescerConfig:
        """The coalescer's bounds as leaders use them: keys per GET follow ``generation_prefix_batch_size``."""
        return dataclasses.replace(self.coalescer, max_keys=self.rollout_recovery.generation_prefix_batch_size)


def load(cls: type[T], mapping: Mapping[str, Any], where: str = "") -> T:
    """Build the configuration dataclass ``cls`` from a nested mapping.

    Raises `ConfigError` naming the field (with its path) for unknown names, wrong types and impossible values.
    """
    hints = get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        path = f"{where}{name}"
        if name not in known:
            raise ConfigError(f"unknown field {path!r}; known here: {', '.join(sorted(known))}", field=path)
        values[name] = _coerce(hints[name], value, path)
    return cls(**values)


def _coerce(kind: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, Mapping):
            raise ConfigError(f"field {path!r} is {value!r}; it must be a mapping", field=path)
        return load(kind, value, f"{path}.")  # type: ignore[arg-type]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"field {path!r} is {value!r}; it must be of type {kind.__name__}", field=path)
    return value


def load_yaml(cls: type[T], text: str) -> T:
    """`load` from the text of a YAML document (safe subset only)."""
    import yaml

    try:
        mapping = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the configuration is not YAML: {error}") from error
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"the configuration must be a mapping of names to values, not {type(mapping).__name__}")
    return load(cls, mapping)
