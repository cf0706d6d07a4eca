"""Batches for data-parallel ranks: which rank gets what does not depend on the order in which ranks ask.

The first rank to ask for its batch number k draws *round* k for all ranks at once: ``world_size`` batches, or one that
all of them get. The others find theirs waiting, whenever they come. Rules:

1. Batch k of a rank is fixed when round k is drawn. All ranks ask for a round with one count and one oldest version; an
   asker that differs is refused and told what the round has.
2. A rank's batch that was given back is the next one that this rank gets.
3. A row that was cleared between the drawing and the asking is reported as skipped, and its batch is short of it.

The task has claimed a round's rows once it is drawn. A rank that never asks leaves its batches here, so the ranks of
one world must all ask. Cost: a round O(world_size · count) for the first rank, O(count) for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from policies.candidates import Candidate
from policies.errors import Refused
from policies.samplers_balanced import level_rounds
from policies.samplers_sequential import Sequential
from policies.sampling import Demand, Drawn, Find, Sampler, Skip, Wrapper

MODES = ("disjoint", "same")


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch ``number`` of a rank: its rows, those skipped when it was drawn, and what was asked."""

    number: int
    terms: Demand
    rows: Sequence[Candidate]
    skipped: Sequence[Skip] = ()


class Ranks(Wrapper):
    """``waiting[rank]``: batches drawn and not asked for, or given back, by number. ``drawn``: rounds so far."""

    holds = True

    def __init__(
        self, world_size: int, mode: str = "disjoint", balance: str | None = None, of: Sampler | None = None
    ) -> None:
        if type(world_size) is not int or world_size < 1:
            raise Refused(f"world_size must be a whole number of ranks, 1 or more, not {world_size!r}")
        if mode not in MODES:
            raise Refused(f"mode must be one of {', '.join(map(repr, MODES))}, not {mode!r}")
        if balance is not None and (mode != "disjoint" or not isinstance(balance, str)):
            raise Refused(f"balance must be the name of a field, and mode 'disjoint'; it is {balance!r}, mode {mode!r}")
        of = of or Sequential()
        if of.holds:
            raise Refused("ranks cannot be made of ranks; one sampler knows all of them")
        super().__init__(of)
        self.holds = True
        self.world_size, self.mode, self.balance = world_size, mode, balance
        self.fields |= {balance} if balance is not None else set()
        self.drawn = 0
        self.waiting: defaultdict[int, dict[int, Batch]] = defaultdict(dict)

    def check(self, demand: Demand) -> None:
        rank = demand.rank
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise Refused(f"rank must be 0 to {self.world_size - 1} in a world of {self.world_size}, not {rank!r}")
        if demand.count % self.of.run:
            raise Refused(f"{demand.count} rows per rank asked for in runs of {self.of.run}; ask for a multiple of it")
        self.of.check(self._round_of(demand))

    def _round_of(self, demand: Demand) -> Demand:
        count = demand.count if self.mode == "same" else demand.count * self.world_size
        return Demand(count, None, demand.oldest_version)

    def draw(self, demand: Demand) -> Drawn | None:
        rank, terms = demand.rank, replace(demand, rank=None)
        assert rank is not None, "`check` lets no such demand through"
        taken: Sequence[Candidate] = ()
        mine = self.waiting[rank]
        if not mine:
            drawn = self.of.draw(self._round_of(demand))
            if drawn is None:
                return None
            taken = drawn.claims
            self._add_round(drawn, terms, rank)
        batch = mine[min(mine)]
        if batch.terms != terms:
            raise Refused(
                f"rank {rank} asked for {_words(terms)}, but its batch {batch.number}, drawn when another rank asked, "
                f"is one of {_words(batch.terms)}; all ranks must ask for a round in the same way"
            )
        del mine[batch.number]
        gone = f"cleared before rank {rank} asked for its batch {batch.number}"
        lost = [Skip(row, gone) for row in batch.rows if row.gone]
        rows = [row for row in batch.rows if not row.gone]
        return Drawn(rows, taken, [*batch.skipped, *lost], lost=len(lost), note=batch.number)

    def _add_round(self, drawn: Drawn, terms: Demand, asker: int) -> None:
        """Round number ``drawn``: a batch for each rank; that of the asker reports what was skipped."""
        batches = [drawn.rows] * self.world_size if self.mode == "same" else self._shares(drawn.rows)
        for rank, rows in enumerate(batches):
            skipped = drawn.skipped if rank == asker else ()
            self.waiting[rank][self.drawn] = Batch(self.drawn, terms, rows, skipped)
        self.drawn += 1

    def _shares(self, rows: Sequence[Candidate]) -> list[Sequence[Candidate]]:
        """One share for each rank, equally many rows, runs kept whole."""
        if self.balance is None:
            each = len(rows) // self.world_size
            return [rows[rank * each : (rank + 1) * each] for rank in range(self.world_size)]
        runs = [rows[start : start + self.run] for start in range(0, len(rows), self.run)]
        lengths = [sum(row.length(self.balance) for row in run) for run in runs]
        return [[row for index in share for row in runs[index]] for share in level_rounds(lengths, self.world_size)]

    def shortfall(self, demand: Demand) -> str:
        return f"a round for {self.world_size} ranks ({self.mode}): {self.of.shortfall(self._round_of(demand))}"

    def give_back(self, demand: Demand, drawn: Drawn) -> Sequence[Candidate]:
        """Nothing is offered anew: the rows stay the rank's."""
        assert demand.rank is not None
        before = len(drawn.skipped) - drawn.lost
        rows = [*drawn.rows, *[skip.row for skip in drawn.skipped[before:]]]
        batch = Batch(drawn.note, replace(demand, rank=None), rows, drawn.skipped[:before])
        self.waiting[demand.rank][batch.number] = batch
        return ()

    def state(self) -> Any:
        return {
            "drawn": self.drawn,
            "waiting": [
                [rank, _batch_to_plain(batch)]
                for rank, batches in sorted(self.waiting.items())
                for batch in batches.values()
            ],
            "of": self.of.state(),
        }

    def restore(self, state: Any, find: Find) -> None:
        self.drawn = state["drawn"]
        for rank, plain in state["waiting"]:
            batch = _batch_from_plain(plain, find)
            self.waiting[rank][batch.number] = batch
        self.of.restore(state["of"], find)


def _words(terms: Demand) -> str:
    bound = "" if terms.oldest_version is None else f" of version {terms.oldest_version} or newer"
    return f"{terms.count} rows{bound}"


def _batch_to_plain(batch: Batch) -> dict[str, Any]:
    return {
        "number": batch.number,
        "terms": [batch.terms.count, batch.terms.oldest_version],
        "rows": [[row.key, row.arrival] for row in batch.rows],
        "skipped": [[skip.row.key, skip.row.arrival, skip.reason] for skip in batch.skipped],
    }


def _batch_from_plain(plain: Mapping[str, Any], find: Find) -> Batch:
    count, oldest = plain["terms"]
    return Batch(
        plain["number"],
        Demand(count, None, oldest),
        [find(key, arrival) for key, arrival in plain["rows"]],
        [Skip(find(key, arrival), reason) for key, arrival, reason in plain["skipped"]],
    )
