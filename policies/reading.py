"""The rows of one get while they come in: from several units, in any order, put back into the order asked.

Guarantees: a row is handed out once, and only whole, also when its fields lie on several units. Costs: nothing is
copied when the rows of a unit's answer lie side by side in the order asked; otherwise one gather per field.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED, MISSING, OK, UNREACHABLE, Batch, Placed, Told
from policies.codec import Message, decode_columns
from policies.columns import Column
from policies.errors import RegraftError, WireError
from policies.locations import Located, Read


class Reading:
    """``tell``, when there is one, is told where the keys are, and the rows of each unit as soon as they are there."""

    def __init__(self, keys: Sequence[str], located: Located, tell: Callable[[Told], None] | None) -> None:
        self._keys = tuple(keys)
        self._fields = located.fields
        self._verdicts = list(located.verdicts)
        self._causes = dict(located.causes)
        self._parts: dict[str, list[tuple[NDArray[np.int64], Column]]] = {name: [] for name in located.fields}
        self._borrowed: defaultdict[str, list[Read]] = defaultdict(list)
        self._tell = tell
        self._owed = np.zeros(len(keys), np.int64)  # reads of a row that are still out
        self._told = np.zeros(len(keys), bool)

    def expect(self, reads: Mapping[str, Sequence[Read]]) -> None:
        """These reads, per unit, go out now."""
        if self._tell is None:
            return
        placed: dict[str, str] = {}
        for unit, of_unit in reads.items():
            for read in of_unit:
                self._owed[list(read.rows)] += 1
                placed.update((self._keys[row], unit) for row in read.rows)
        self._tell(Placed(placed))

    def heard(self, unit: str, reads: Sequence[Read], outcome: Message | RegraftError) -> None:
        """``unit`` has answered these reads, or failed to, or says of some that their blocks should be borrowed."""
        ended = []
        if isinstance(outcome, RegraftError):
            ended = list(reads)
            for read in reads:
                self._fail(read.rows, UNREACHABLE, f"{type(outcome).__name__}: {outcome.message}", unit)
        else:
            for read, part in zip(reads, self._parts_of(unit, outcome.body["parts"], reads), strict=True):
                if part.get("borrow"):
                    self._borrowed[unit].append(read)
                else:
                    ended.append(read)
                    self._add(read.rows, part["bad"], decode_columns(part["columns"], outcome.buffers), unit)
        self._ended(ended)

    def lent(self, unit: str, reads: Sequence[Read], outcome: Message | RegraftError) -> None:
        """``unit`` has lent the blocks of these reads, or some of them, or none: the others are borrowed still."""
        ended = []
        if isinstance(outcome, RegraftError):
            self._borrowed[unit] += reads
        else:
            for read, block in zip(reads, self._parts_of(unit, outcome.body["blocks"], reads), strict=True):
                if block is None:
                    self._borrowed[unit].append(read)
                else:
                    ended.append(read)
                    columns, positions = decode_columns(block, outcome.buffers), np.array(read.positions, np.int64)
                    wanted = {name: column.take(positions) for name, column in columns.items() if name in read.fields}
                    self._add(read.rows, (), wanted, unit)
        self._ended(ended)

    def take_borrowed(self) -> dict[str, list[Read]]:
        """Per unit, the reads whose blocks are to be borrowed."""
        borrowed, self._borrowed = dict(self._borrowed), defaultdict(list)
        return borrowed

    @staticmethod
    def _parts_of(unit: str, parts: Sequence[Any], reads: Sequence[Read]) -> Sequence[Any]:
        if len(parts) != len(reads):
            raise WireError(f"unit {unit!r} answered {len(parts)} of {len(reads)} reads")
        return parts

    def _ended(self, reads: Sequence[Read]) -> None:
        if self._tell is not None and reads:
            for read in reads:
                self._owed[list(read.rows)] -= 1
            rows = np.unique(np.concatenate([read.rows for read in reads]))
            self._tell_whole(self._tell, rows[self._owed[rows] == 0])

    def rows_with(self, verdict: str) -> NDArray[np.int64]:
        return np.array([i for i, v in enumerate(self._verdicts) if v == verdict], np.int64)

    def relocate(self, rows: NDArray[np.int64], located: Located) -> None:
        """Take over the second lookup of ``rows``; one that is missing now was cleared while the get was under way."""
        gone = np.zeros(len(self._keys), bool)
        gone[rows] = True
        self._keep_parts(~gone)
        for row, verdict in zip(rows.tolist(), located.verdicts, strict=True):
            self._verdicts[row] = CLEARED if verdict == MISSING else verdict

    def rest(self) -> Batch:
        """What nobody was told yet."""
        return self._batch(np.flatnonzero(~self._told))

    def _tell_whole(self, tell: Callable[[Told], None], rows: NDArray[np.int64]) -> None:
        """Tell of rows that are all there, except those that may have moved."""
        rows = rows[[self._verdicts[row] != CLEARED for row in rows]]
        if not len(rows):
            return
        self._told[rows] = True
        tell(self._batch(rows))
        self._keep_parts(~self._told)

    def _keep_parts(self, rows: NDArray[np.bool_]) -> None:
        for name, parts in self._parts.items():
            self._parts[name] = [
                (r[rows[r]], c if rows[r].all() else c.take(np.flatnonzero(rows[r]))) for r, c in parts if rows[r].any()
            ]

    def _fail(self, rows: Sequence[int] | NDArray[np.int64], verdict: str, cause: str, unit: str) -> None:
        for row in rows:
            self._verdicts[row] = verdict
            self._causes[self._keys[row]] = f"unit {unit}: {cause}"

    def _add(
        self, asked: Sequence[int], bad: Sequence[tuple[int, str, str]], columns: Mapping[str, Column], unit: str
    ) -> None:
        """One answered read: ``bad`` lists (index, verdict, cause) of its rows, ``columns`` hold all others."""
        rows = np.array(asked, np.int64)
        good = np.ones(len(rows), bool)
        for index, verdict, cause in bad:
            good[index] = False
            self._fail(rows[index : index + 1], verdict, cause, unit)
        for name, column in columns.items():
            if name not in self._parts or column.rows != int(good.sum()):
                raise WireError(f"unit {unit!r} answered field {name!r} with {column.rows} rows for {int(good.sum())}")
            self._parts[name].append((rows[good], column))

    def _batch(self, rows: NDArray[np.int64]) -> Batch:
        """The batch of ``rows``, which are in the order asked."""
        keys = tuple([self._keys[row] for row in rows])
        verdicts = tuple([self._verdicts[row] for row in rows])
        ok = np.zeros(len(self._keys), bool)
        ok[rows] = [verdict == OK for verdict in verdicts]
        columns = {name: column for name in self._fields if (column := _in_order(self._parts[name], ok)) is not None}
        return Batch(keys, verdicts, columns, {key: self._causes[key] for key in keys if key in self._causes})


def _in_order(parts: Sequence[tuple[NDArray[np.int64], Column]], ok: NDArray[np.bool_]) -> Column | None:
    """The rows of all parts that are ok, in the order in which they were asked; None when there are none."""
    kept = []
    for rows, column in parts:
        wanted = ok[rows]
        if wanted.any():
            kept.append((rows, column) if wanted.all() else (rows[wanted], column.take(np.flatnonzero(wanted))))
    if not kept:
        return None
    order = np.argsort(np.concatenate([r for r, _ in kept]), kind="stable")
    return Column.collect([c for _, c in kept], order)
