"""What a system offers to be measured: its servers, and clients of them in other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from recipes.bench.storage.load import Fields


class StorageClient(Protocol):
    """One process's client, which ends with it. What `put` takes is made before it is timed, by `batch`; what `get`
    gives is in the system's own form, which the other methods look into."""

    def batch(self, keys: Sequence[str], fields: Fields) -> Any: ...

    def put(self, keys: Sequence[str], batch: Any) -> None: ...

    def get(self, keys: Sequence[str]) -> Any:
        """The rows, blocking; only one such call is made at a time."""

    async def get_together(self, keys: Sequence[str]) -> Any:
        """The rows; many such calls are made at once, all on one event loop."""

    def lengths(self, found: Any) -> Sequence[NDArray[Any]]:
        """The length of each row, field by field."""

    def row(self, found: Any, place: int) -> Fields:
        """A copy of one row."""

    def touch(self, found: Any) -> float:
        """Read all that came: the sum of all of it."""

    def clear(self, keys: Sequence[str]) -> None: ...


class StorageSide(Protocol):
    """The servers of one system, on the Ray that runs. ``connect(address)`` makes a client in another process."""

    connect: Callable[[Any], Any]
    address: Any
    unit_processes: str
    """How the title of its units' processes begins."""

    def settle(self) -> None:
        """Return when nothing is stored any more. `CheckFailed` when that does not come."""

    def close(self) -> None: ...
