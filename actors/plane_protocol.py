"""What coordinators and coalescers need of a plane, and how they get it: four methods of the client, so that a test can
stand in for a whole plane."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, Protocol

from actors.client import AsyncDataPlaneClient, PlaneAddress
from policies.answers import Batch, PutAck, Told
from policies.columns import Column

STAGING: Final = "staging"
"""The partition of chunks."""

TRAIN: Final = "train"
"""The partition of finished calls, one row each."""


class Plane(Protocol):
    """The part of `actors.client.AsyncDataPlaneClient` that cut and restore use; it says what each method does."""

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Column],
        *,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> PutAck: ...

    async def stream(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str],
        tell: Callable[[Told], None],
        *,
        avoid: Collection[str] = (),
        timeout: float | None = None,
    ) -> Batch: ...

    async def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int: ...

    async def close(self) -> None: ...


def connect(plane: Plane | PlaneAddress) -> Plane:
    """A client of the plane at an address; a plane that is one already stays as it is."""
    return AsyncDataPlaneClient(plane) if isinstance(plane, PlaneAddress) else plane
