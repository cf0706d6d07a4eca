"""A watch: the rows that have a set of fields and that a task has not claimed, and the sampler that gives them out.

The watch stands between the partition and the sampler, and trusts it with nothing but the choice: it keeps its own
record of the rows offered, checks what is drawn against that, and catches whatever the sampler raises. A sampler that
fails has failed for its watch alone; the failure is the answer to the watch's claims until the task is reset.

Costs: O(1) beside the sampler's own for a row that comes or goes; O(rows drawn) for a draw.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from policies.blocks import Field
from policies.candidates import OFFERED, TAKEN, WITHDRAWN, Candidate
from policies.columns import require_plain
from policies.errors import Refused
from policies.rows import Row
from policies.sampler_registry import SamplerRegistry
from policies.sampling import Demand, Drawn, SamplerSpec


class Table(Protocol):
    """What a watch sees of its partition."""

    @property
    def name(self) -> str: ...
    @property
    def rows(self) -> Mapping[str, Row]: ...
    @property
    def fields(self) -> Mapping[str, Field]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """What a claim was given, for an asker that leaves. Void once the watch's ``epoch`` has passed on."""

    watch: Watch
    epoch: int
    demand: Demand
    drawn: Drawn


class Watch:
    """``want``: mask of the fields. ``bit``: the task's, in `Row.claimed`. ``waiting``: the parked claims, oldest first
    of each demand. ``failed``: demands that were tried and not met since anything changed here. ``epoch``: resets."""

    def __init__(
        self, table: Table, task: str, bit: int, want: int, spec: SamplerSpec, registry: SamplerRegistry
    ) -> None:
        """`Refused` when ``registry`` has no such sampler."""
        self.table, self.task, self.bit, self.want, self.spec = table, task, bit, want, spec
        self.waiting: dict[Demand, OrderedDict[int, Any]] = {}
        self.failed: set[Demand] = set()
        self.epoch = 0
        self.failure: Refused | None = None
        self._registry = registry
        self.sampler = registry.build(spec)
        self._offered: dict[str, Candidate] = {}

    @property
    def available(self) -> int:
        """Rows that the sampler may give."""
        return len(self._offered)

    def ready(self, row: Row) -> bool:
        return row.mask & self.want == self.want and not row.claimed & self.bit

    def fill(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if self.ready(row):
                self.offer(row)

    def offer(self, row: Row) -> None:
        self.failed.clear()
        candidate = self._offered[row.key] = Candidate(row.key, row.arrival, row, self.table.fields)
        if self.failure is None:
            try:
                self.sampler.offer(candidate)
            except Exception as error:  # it may be a user's
                self._fail("offer", error)

    def withdraw(self, key: str) -> None:
        """The row with this key was cleared, or claimed through another watch."""
        self.failed.clear()
        candidate = self._offered.pop(key)
        candidate.state = WITHDRAWN
        if self.failure is None:
            try:
                self.sampler.withdraw(candidate)
            except Exception as error:
                self._fail("withdraw", error)

    def retagged(self, key: str) -> bool:
        """The tags of a row changed. True when that may have changed what can be drawn."""
        candidate = self._offered.get(key)
        if candidate is None or self.failure is not None or not self.sampler.reads_tags:
            return False
        self.failed.clear()
        try:
            self.sampler.retagged(candidate)
        except Exception as error:
            self._fail("retagged", error)
        return True

    def check(self, demand: Demand, fields: Sequence[str]) -> None:
        """Raise what makes this demand one that can never be met."""
        if self.failure is not None:
            raise self.failure
        unread = self.sampler.fields.difference(fields)
        if unread:
            raise self._refused(f"reads the lengths of {sorted(unread)}; name them among the claim's fields {fields}")
        try:
            self.sampler.check(demand)
        except Refused as refusal:
            raise self._refused(f": {refusal.message}") from None
        except Exception as error:
            self._fail("check", error)
            raise self._refused(f"failed in check: {type(error).__name__}: {error}") from error

    def draw(self, demand: Demand) -> Grant | Refused | None:
        """What the demand is given, and the task has claimed now; or why it is refused; or None."""
        if self.failure is not None:
            return self.failure
        if demand in self.failed:
            return None
        try:
            drawn = self.sampler.draw(demand)
            if drawn is None:
                self.failed.add(demand)
                return None
            taken = self._check_drawn(demand, drawn)
        except Refused as refusal:
            return self._refused(f": {refusal.message}")
        except Exception as error:
            return self._fail("draw", error)
        self.failed.clear()
        for candidate in taken:
            candidate.state = TAKEN
            del self._offered[candidate.key]
        drawn = Drawn(tuple(drawn.rows), tuple(taken), tuple(drawn.skipped), drawn.lost, drawn.parts, drawn.note)
        return Grant(self, self.epoch, demand, drawn)

    def _check_drawn(self, demand: Demand, drawn: Drawn) -> list[Candidate]:
        """The rows to take. Raises `_Unsound` for what is not the sampler's to give, or not what was asked."""
        rows, skipped = list(drawn.rows), [skip.row for skip in drawn.skipped]
        if len({id(row) for row in [*rows, *skipped]}) != len(rows) + len(skipped):
            raise _Unsound("it gave or skipped a row twice")
        if len(rows) + drawn.lost != demand.count or sum(row.gone for row in skipped) < drawn.lost:
            raise _Unsound(f"it gave {len(rows)} rows, {drawn.lost} of them lost, where {demand.count} were asked for")
        require_plain(drawn.note)
        taken = list(dict.fromkeys([*drawn.claims, *[row for row in skipped if row.state == OFFERED]]))
        for row in taken:
            if self._offered.get(row.key) is not row:
                raise _Unsound(f"it took key {row.key!r}, which it was not offered or which is {row.state}")
        mine = set(taken)
        for row in rows:
            if row not in mine and (row.state != TAKEN or row.gone):
                raise _Unsound(f"it gave key {row.key!r}, which it had not taken")
        if drawn.parts and sorted(index for part in drawn.parts for index in part) != list(range(len(rows))):
            raise _Unsound(f"its parts {drawn.parts!r:.100} do not name each of {len(rows)} rows once")
        return taken

    def shortfall(self, demand: Demand) -> str:
        if self.failure is not None:
            return self.failure.message
        try:
            return str(self.sampler.shortfall(demand))
        except Exception as error:
            return f"sampler {self.spec.name!r} cannot say why: {type(error).__name__}: {error}"

    def give_back(self, grant: Grant) -> list[Row]:
        """The rows that the asker of ``grant`` leaves to others; still claimed. None when the sampler has failed: only
        it knows what else it did with them, so they stay claimed until the reset."""
        self.failed.clear()
        if self.failure is not None:
            return []
        try:
            back = dict.fromkeys(self.sampler.give_back(grant.demand, grant.drawn))
            if not back.keys() <= set(grant.drawn.claims):
                raise _Unsound("it gave back rows that the claim had not taken")
        except Exception as error:
            self._fail("give_back", error)
            return []
        return [row for candidate in back if (row := candidate.row) is not None]

    def reset(self, rows: Iterable[Row]) -> None:
        """A new sampler, and all ``rows`` anew."""
        self.epoch += 1
        self.failure = None
        self.failed.clear()
        self._offered = {}
        try:
            self.sampler = self._registry.build(self.spec)
        except Refused as refusal:
            self.failure = refusal
        self.fill(rows)

    def find(self, key: str, arrival: int) -> Candidate:
        """A row that was taken before; a `gone` candidate when it is not there any more."""
        row = self.table.rows.get(key)
        candidate = Candidate(key, arrival, row, self.table.fields)
        candidate.state = TAKEN
        return candidate

    def _refused(self, what: str) -> Refused:
        joint = "" if what.startswith(":") else " "
        return Refused(f"sampler {self.spec.name!r} of task {self.task!r}{joint}{what}", sampler=self.spec.name)

    def _fail(self, where: str, error: Exception) -> Refused:
        what = f"{type(error).__name__}: {error}"
        self.failure = self._refused(f"failed in {where}: {what}; its claims are refused until the task is reset")
        return self.failure


class _Unsound(Exception):
    """A sampler broke its contract."""
