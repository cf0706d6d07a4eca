"""Where a plane is, and the secret that lets one in."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.wire.secret import Secret
from policies.config import TransportConfig

NAMESPACE = "regraft"
"""Where Ray keeps the names of a plane's actors."""


@dataclass(frozen=True, slots=True)
class PlaneAddress:
    """What a process needs to reach a plane. Hand it on through Ray; whoever has it may read and write."""

    endpoint: str
    secret: Secret
    request_timeout_s: float = 30.0
    transport: TransportConfig = field(default_factory=TransportConfig)
