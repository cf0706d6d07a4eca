"""A plane in a dictionary, for tests of what stands on a plane. It fails when and how it is told to.

Every put, get and clear takes the next entry of its script (then ``"ok"`` for ever) and gives way to the event loop a
few times, so that whatever else runs gets between its steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from policies.answers import CLEARED, MISSING, OK, UNREACHABLE, Batch, Placed, PutAck, Told
from policies.checksums import block_checksum
from policies.columns import Column, rows_of
from policies.errors import Refused, Unreachable

PUT_FAULTS = (
    "refused",
    "fail_before",
    "fail_after",
    "fail_late",
    "wrong_checksum",
    "wrong_bytes",
    "missing_key",
    "cancelled",
)


class FakePlane:
    def __init__(self, puts: Iterable[str] = (), clears: Iterable[str] = (), gets: Iterable[str] = ()) -> None:
        self.rows: dict[str, dict[str, np.ndarray]] = {}
        self.tags: dict[str, Mapping[str, Any] | None] = {}
        self.bad: dict[str, str] = {}  # key → verdict of a get
        self.units: dict[str, str] = {}  # key → where it lies; a get tells nothing before its end of keys without one
        self.hanging: set[str] = set()  # units that answer no get until the gate opens
        self.unit_gets: Counter[str] = Counter()
        self.sources: list[tuple[str, tuple[str, ...]]] = []
        self.put_keys: list[tuple[str, ...]] = []
        self.get_keys: list[tuple[str, ...]] = []
        self.clear_keys: list[tuple[str, ...]] = []
        self.gate = asyncio.Event()  # what is scripted "hang" waits for it
        self.closed = False
        self.late: dict[str, dict[str, np.ndarray]] = {}  # stored, and published when the unit gets round to it
        self._puts, self._clears, self._gets = iter(puts), iter(clears), iter(gets)

    async def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Mapping[str, Column],
        *,
        tags: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> PutAck:
        assert partition == "staging"
        self.put_keys.append(tuple(keys))
        fault = await self._begin(self._puts)
        if fault == "cancelled":
            raise asyncio.CancelledError
        if fault == "refused":
            raise Refused("no room")
        if fault == "fail_before":
            raise Unreachable("the unit did not answer")
        rows = self.late if fault == "fail_late" else self.rows
        for index, key in enumerate(keys):
            rows[key] = {name: np.array(column.row(index)) for name, column in fields.items()}
            self.tags[key] = None if tags is None else tags[index]
        if fault in ("fail_after", "fail_late"):
            raise Unreachable("the answer was lost")
        row_bytes = sum(column.row_bytes() for column in fields.values()).tolist()
        return spoiled(PutAck("u0", 1, tuple(keys), tuple(row_bytes), block_checksum(fields)), fault)

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
        """Keys of ``units`` are placed there, and told of as soon as their unit answers; a hanging one never does."""
        self.get_keys.append(tuple(keys))
        self.sources.append((partition, tuple(fields)))
        if await self._begin(self._gets) != "ok":
            raise Unreachable("the controller did not answer")
        hanging = self.hanging - {*avoid}
        placed = {key: self.units[key] for key in keys if key in self.units and key in self.rows}
        if placed:
            tell(Placed(placed))
        for unit in sorted({*placed.values()}.difference(avoid)):
            self.unit_gets[unit] += 1
        told = {key for key, unit in placed.items() if unit not in {*avoid, *hanging}}
        for unit in sorted({placed[key] for key in told}):
            tell(self._batch([key for key in placed if placed[key] == unit], fields))
        if hanging & {*placed.values()}:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.gate.wait(), timeout)
                hanging = set()
        return self._batch([key for key in keys if key not in told], fields, {*avoid, *hanging})

    def _batch(self, keys: Sequence[str], fields: Sequence[str], silent: Collection[str] = ()) -> Batch:
        def verdict(key: str) -> str:
            if self.units.get(key) in silent:
                return UNREACHABLE
            return self.bad.get(key, OK if key in self.rows else MISSING)

        verdicts = tuple(map(verdict, keys))
        good = [key for key, found in zip(keys, verdicts, strict=True) if found == OK]
        columns = {name: rows_of([self.rows[key][name] for key in good]) for name in fields} if good else {}
        causes = {
            key: f"unit {self.units.get(key, 'u1')}: {found}"
            for key, found in zip(keys, verdicts, strict=True)
            if found in (UNREACHABLE, CLEARED)
        }
        return Batch(tuple(keys), verdicts, columns, causes)

    async def clear(self, partition: str, keys: Sequence[str], *, timeout: float | None = None) -> int:
        assert partition == "staging"
        self.clear_keys.append(tuple(keys))
        if await self._begin(self._clears) != "ok":
            raise Unreachable("the controller did not answer")
        return sum(self.rows.pop(key, None) is not None for key in keys)

    def publish_late(self) -> None:
        """What units have stored without an answer becomes visible."""
        self.rows |= self.late
        self.late = {}

    def heal(self) -> None:
        """From now on everything works."""
        self._puts = self._clears = self._gets = iter(())

    async def close(self) -> None:
        self.closed = True

    async def _begin(self, script: Any) -> str:
        behaviour = str(next(script, "ok"))
        for _ in range(3):
            await asyncio.sleep(0)
        if behaviour == "hang":
            await self.gate.wait()
            return "ok"
        return behaviour


def spoiled(ack: PutAck, fault: str) -> PutAck:
    """The acknowledgement as a faulty unit would give it; as it is for any other ``fault``."""
    if fault == "wrong_checksum":
        return PutAck(ack.unit, ack.block, ack.keys, ack.row_bytes, ack.checksum ^ 1)
    if fault == "wrong_bytes":
        return PutAck(ack.unit, ack.block, ack.keys, (ack.row_bytes[0] + 4, *ack.row_bytes[1:]), ack.checksum)
    if fault == "missing_key":
        return PutAck(ack.unit, ack.block, ack.keys[1:], ack.row_bytes[1:], ack.checksum)
    return ack
