"""The client of a plane in two forms: `DataPlaneClient` blocks, `AsyncDataPlaneClient` awaits.

Both have the same methods for rows; making and dropping partitions and looking at the plane is left to the first.

Guarantees: many requests in flight over one socket per peer, from any number of threads or event loops; every call
ends with its result, a named error, or `RequestTimeout`; `close` is idempotent and ends every open call with
`ClosedError`. A client belongs to the process that made it: in a forked child every call raises `ForkedProcessError`.

Cost: one thread per client. A call costs one hop to that thread and one back, however many messages it needs.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from actors.address import PlaneAddress
from actors.driver import Driver
from actors.ragged import TensorBatch
from actors.tensors import as_columns
from policies import operations
from policies.answers import Batch, Claim, Progress, PutAck, Told
from policies.codec import Message
from policies.operations import Ask, Operation
from policies.sampling import SEQUENTIAL, SamplerSpec

T = TypeVar("T")
Tags = Sequence[Mapping[str, Any] | None]


__all__ = ["AsyncDataPlaneClient", "DataPlaneClient", "PlaneAddress"]


class AsyncDataPlaneClient:
    """The awaiting form; see `DataPlaneClient` for what each method does."""

    def __init__(self, address: PlaneAddress) -> None:
        self._driver = Driver(address, self)

    async def _run(self, operation: Operation[T], timeout: float | None) -> T:
        future = self._driver.submit(operation, timeout)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._driver.abandon(future)
            raise

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> PutAck:
        operation = operations.put(
            self._driver.routes, partition, keys, as_columns(fields, keys), tags, uuid.uuid4().hex
        )
        return await self._run(operation, timeout)

    async def get(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        partial: bool = False,
    ) -> TensorBatch:
        batch = await self._run(operations.get(self._driver.routes, partition, keys, fields), timeout)
        return TensorBatch.of(batch if partial else batch.whole())

    async def stream(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str],
        tell: Callable[[Told], None],
        *,
        avoid: Collection[str] = (),
        timeout: float | None = None,
    ) -> Batch:
        """`get` with ``partial``, told in parts (see `policies.operations.get`). ``tell`` is called on the client's
        thread."""
        return await self._run(operations.get(self._driver.routes, partition, keys, fields, avoid, tell), timeout)

    async def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int:
        return await self._run(operations.clear(partition, keys), timeout)

    async def list(
        self, partition: str, where: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        return await self._run(operations.list_keys(partition, where), timeout)

    async def tag(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, timeout: float | None = None
    ) -> None:
        await self._run(operations.tag(partition, keys, tags), timeout)

    async def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        count: int,
        *,
        sampler: SamplerSpec = SEQUENTIAL,
        rank: int | None = None,
        oldest_version: float | None = None,
        timeout: float = 30.0,
    ) -> Claim:
        claim_id = uuid.uuid4().hex
        operation = operations.claim(partition, task, fields, count, sampler, rank, oldest_version, timeout, claim_id)
        return await self._run(operation, None)

    async def reset_task(self, partition: str, task: str) -> None:
        await self._run(operations.reset_task(partition, task), None)

    async def consumed(self, partition: str, task: str) -> Progress:
        return await self._run(operations.consumed(partition, task), None)

    async def produced(self, partition: str) -> Progress:
        return await self._run(operations.produced(partition), None)

    async def wait(self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout: float = 30.0) -> None:
        await self._run(operations.wait(partition, keys, fields, timeout, uuid.uuid4().hex), None)

    async def close(self) -> None:
        await asyncio.to_thread(self._driver.close)


class DataPlaneClient:
    """A blocking client, usable from any thread of the process that made it."""

    def __init__(self, address: PlaneAddress) -> None:
        self._driver = Driver(address, self)

    def __enter__(self) -> DataPlaneClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, operation: Operation[T], timeout: float | None = None) -> T:
        """Drive an operation of `policies.operations` to its result."""
        future = self._driver.submit(operation, timeout)
        try:
            return future.result()
        except BaseException:  # the call's own error, or an interruption of the caller
            if not future.done():
                self._driver.abandon(future)
            raise

    def ask(self, asks: Sequence[Ask], timeout: float | None = None) -> list[Message]:
        """Requests to controller and units, all at once; the first error is raised. Save and restore are made of
        these."""
        return self.run(operations.ask_all(self._driver.routes, asks), timeout)

    def units(self) -> Sequence[str]:
        """Names of the plane's storage units, sorted."""
        self.run(self._driver.routes.learn())
        return sorted(self._driver.routes.units)

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Any],
        *,
        tags: Tags | None = None,
        timeout: float | None = None,
    ) -> PutAck:
        """Store rows as one block; when this returns, every reader sees all of them.

        ``fields`` maps a field to one row per key (see the table in `actors.tensors`), or is a
        ``TensorDict`` of that batch size. ``tags`` are small plain values per row. A put of other
        fields adds to existing rows; of the same field, replaces it.

        Raises `Refused` (its subclasses say why; nothing changed), `CapacityExceeded`, or `Unreachable` when the
        outcome is unknown; the same call made again is applied afresh, so give replaceable keys.
        """
        columns = as_columns(fields, keys)
        return self.run(operations.put(self._driver.routes, partition, keys, columns, tags, uuid.uuid4().hex), timeout)

    def get(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Sequence[str] | None = None,
        *,
        timeout: float | None = None,
        partial: bool = False,
    ) -> TensorBatch:
        """Read rows; ``fields`` None means those that all found rows have. ``batch[field]`` is a
        `RaggedTensor` (see `actors.ragged`).

        With ``partial`` the batch holds a verdict per key and the rows of the good ones; without it a bad key raises
        its error (`KeyMissing`, `KeyCleared`, `KeyCorrupt`, `Unreachable`).
        """
        batch = self.run(operations.get(self._driver.routes, partition, keys, fields), timeout)
        return TensorBatch.of(batch if partial else batch.whole())

    def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int:
        """Remove rows; unknown keys are no error. Returns how many went."""
        return self.run(operations.clear(partition, keys), timeout)

    def list(
        self, partition: str, where: Mapping[str, Any] | None = None, *, timeout: float | None = None
    ) -> Sequence[tuple[str, dict[str, Any]]]:
        """(key, tags) of all rows, or of those whose tags match ``where`` (see `policies.where`)."""
        return self.run(operations.list_keys(partition, where), timeout)

    def tag(
        self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], *, timeout: float | None = None
    ) -> None:
        """Merge ``tags[i]`` into the tags of ``keys[i]``; fields and claims are not touched."""
        self.run(operations.tag(partition, keys, tags), timeout)

    def claim(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        count: int,
        *,
        sampler: SamplerSpec = SEQUENTIAL,
        rank: int | None = None,
        oldest_version: float | None = None,
        timeout: float = 30.0,
    ) -> Claim:
        """``count`` rows that have all ``fields`` and that ``task`` has not claimed before: the oldest, or those that
        ``sampler`` chooses (see `policies.sampling`). ``rank`` is for `ranks`, ``oldest_version`` for `staleness`.

        Waits for them; raises `RequestTimeout` after ``timeout`` seconds, which says what was found, and then nothing
        was claimed. Raises `Refused` for what can never be met, and when a sampler of your own has failed.
        """
        claim_id = uuid.uuid4().hex
        return self.run(
            operations.claim(partition, task, fields, count, sampler, rank, oldest_version, timeout, claim_id)
        )

    def reset_task(self, partition: str, task: str) -> None:
        """Let the task claim all rows of the partition afresh; what its samplers held is forgotten."""
        self.run(operations.reset_task(partition, task))

    def consumed(self, partition: str, task: str) -> Progress:
        """Rows that the task has claimed or skipped since its last reset, of those the partition expects."""
        return self.run(operations.consumed(partition, task))

    def produced(self, partition: str) -> Progress:
        """Rows that have come with a value, cleared ones included, of those the partition expects."""
        return self.run(operations.produced(partition))

    def wait(self, partition: str, keys: Sequence[str], fields: Sequence[str], *, timeout: float = 30.0) -> None:
        """Return when every key has every field; `RequestTimeout` after ``timeout`` seconds."""
        self.run(operations.wait(partition, keys, fields, timeout, uuid.uuid4().hex))

    def create_partition(
        self, partition: str, fields: Mapping[str, str] | None = None, expected_rows: int | None = None
    ) -> None:
        """Declare a partition; with ``fields`` (name → dtype) it takes these only. Made again the same way is no error.

        A plane with ``strict_partitions`` needs this before the first put; others make a partition with its first row.
        ``expected_rows`` says how many rows its producers will bring in all. Raises `Refused` when it exists otherwise.
        """
        self.run(operations.create_partition(partition, fields, expected_rows))

    def drop_partition(self, partition: str) -> int:
        """Forget a partition with its rows, fields and tasks; returns how many rows went. Who waits in it gets
        `UnknownPartition`."""
        return self.run(operations.drop_partition(partition))

    def describe(self) -> Mapping[str, Any]:
        """What the plane holds: partitions, fields, rows, tasks and blocks per unit."""
        return self.run(operations.describe())

    def close(self) -> None:
        self._driver.close()
