"""Samplers: which of the ready rows a claim is given. This file is the contract, for the shipped and for users' own.

A sampler serves one *watch*: the rows of a partition that have a set of fields and that a task has not claimed. It is
fed row by row and draws whole answers; it never looks through all rows. Rules:

1. A row is offered once. It stays the sampler's to give until it is withdrawn, or taken by a draw of the sampler.
   Between `offer` and `withdraw` it is the same `Candidate` object, so samplers may key sets and dicts by it.
2. `draw` gives what was asked or None, and None changes nothing that a later answer would show. A draw that raises
   `Refused` refuses that one claim; whatever else it raises, and whatever it draws that is not its to give, ends the
   sampler: its watch's claims are refused, naming it, until the task is reset. Nothing else is harmed.
3. What a sampler answers follows from the rows that are offered now, in any order of offering, and from `state`. So a
   restored controller, which offers all rows anew in order of arrival, answers as the saved one would have.
4. No clock, no randomness of its own, no I/O: the controller is one thread and waits for the sampler.

Costs to keep: `offer`, `withdraw` and a failing `draw` O(1) or O(log rows); a draw O(rows drawn).

A claim names its sampler by a `SamplerSpec`, which is plain data and says nothing that would be evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.candidates import Candidate
from policies.errors import Refused

DEEPEST = 8
"""Samplers that one spec may wrap in each other."""

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Demand:
    """What one claim asks of its sampler. ``rank``: who asks, among data-parallel ranks. ``oldest_version``: the oldest
    weight version that it accepts."""

    count: int
    rank: int | None = None
    oldest_version: float | None = None


class Skip(NamedTuple):
    """A row that the claim was not given, and will not be, with the reason in words."""

    row: Candidate
    reason: str


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer: ``rows`` given, in order.

    ``taken``: offered rows that the task has claimed from now on; None means those given. A sampler may take rows that
    it gives later, and give rows again that it took before. Offered rows that are skipped are taken too. ``lost``: how
    many of the rows asked for are lacking, because they were cleared since they were taken; the last ones of
    ``skipped``. ``parts``: micro-batches as indices into ``rows``, each row in one of them; empty when it is one batch.
    ``note``: plain data that `Sampler.give_back` gets to see.
    """

    rows: Sequence[Candidate]
    taken: Sequence[Candidate] | None = None
    skipped: Sequence[Skip] = ()
    lost: int = 0
    parts: Sequence[Sequence[int]] = ()
    note: Any = None

    @property
    def claims(self) -> Sequence[Candidate]:
        return self.rows if self.taken is None else self.taken


Find = Callable[[str, int], Candidate]
"""(key, arrival) → that row, as one taken before; a `gone` one when it was cleared."""


class Sampler(ABC):
    """The base of all samplers. ``__init__`` takes the settings of the spec by name and raises `Refused` for impossible
    ones; one that wraps another takes that as ``of``.

    ``fields``: the fields whose `Candidate.length` it reads; a claim must name them. ``reads_tags``: it wants to hear
    of changed tags. ``run``: it gives rows in runs of this many that belong together. ``holds``: it takes rows that it
    gives later.
    """

    fields: frozenset[str] = frozenset()
    reads_tags: bool = False
    run: int = 1
    holds: bool = False

    def check(self, demand: Demand) -> None:
        """Raise `Refused` for what can never be met, before the claim waits for it."""
        if demand.rank is not None:
            raise Refused(f"a claim came with rank {demand.rank}, but its sampler knows no ranks; claim with ranks(…)")
        if demand.oldest_version is not None:
            raise Refused("a claim came with oldest_version, but its sampler bounds none; claim with staleness(…)")

    @abstractmethod
    def offer(self, row: Candidate) -> None:
        """The row is ready and its task has not claimed it."""

    @abstractmethod
    def withdraw(self, row: Candidate) -> None:
        """An offered row was cleared, or claimed through another watch of its task. Its tags are as they were."""

    def retagged(self, row: Candidate) -> None:  # noqa: B027 a sampler that reads no tags has nothing to do
        """The tags of an offered row may have changed. Called only with ``reads_tags``."""

    def unit(self, row: Candidate) -> Any:
        """What stands and falls together with the row: rows of one unit are given together or not at all. None when
        the sampler cannot tell yet."""
        return row

    @abstractmethod
    def draw(self, demand: Demand) -> Drawn | None:
        """``demand.count`` rows, less those that were lost; None when there are too few."""

    @abstractmethod
    def shortfall(self, demand: Demand) -> str:
        """In words what was found instead, for an asker that waited in vain."""

    def give_back(self, demand: Demand, drawn: Drawn) -> Sequence[Candidate]:
        """The asker left before it had this answer. Which of the rows taken are to be offered anew (as other
        candidates); those cleared meanwhile are passed over."""
        return drawn.claims

    def state(self) -> Any:
        """Plain data (msgpack-able): what `restore` needs beside the rows that will be offered."""
        return None

    def restore(self, state: Any, find: Find) -> None:  # noqa: B027 most samplers have no state
        """Take over a saved state; called once, on a new sampler, before any row is offered."""


class Wrapper(Sampler):
    """A sampler that changes what another gives. It passes on what it does not change."""

    def __init__(self, of: Sampler) -> None:
        self.of = of
        self.fields, self.reads_tags, self.run, self.holds = of.fields, of.reads_tags, of.run, of.holds

    def check(self, demand: Demand) -> None:
        self.of.check(demand)

    def offer(self, row: Candidate) -> None:
        self.of.offer(row)

    def withdraw(self, row: Candidate) -> None:
        self.of.withdraw(row)

    def retagged(self, row: Candidate) -> None:
        self.of.retagged(row)

    def unit(self, row: Candidate) -> Any:
        return self.of.unit(row)

    def shortfall(self, demand: Demand) -> str:
        return self.of.shortfall(demand)

    def give_back(self, demand: Demand, drawn: Drawn) -> Sequence[Candidate]:
        return self.of.give_back(demand, drawn)

    def state(self) -> Any:
        return self.of.state()

    def restore(self, state: Any, find: Find) -> None:
        self.of.restore(state, find)


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """Which sampler, with which settings, around which other. Equal specs of a task and set of fields share a watch."""

    name: str
    settings: tuple[tuple[str, Setting], ...] = ()
    of: SamplerSpec | None = None

    def to_plain(self) -> dict[str, Any]:
        """``{"name": "ranks", "world_size": 8, "of": {"name": "groups", "size": 8}}``"""
        of = {} if self.of is None else {"of": self.of.to_plain()}
        return {"name": self.name, **dict(self.settings), **of}

    @classmethod
    def from_plain(cls, plain: Any, depth: int = 1) -> SamplerSpec:
        """The spec with this plain form; `Refused` for what is none."""
        if not isinstance(plain, Mapping) or not isinstance(plain.get("name"), str) or depth > DEEPEST:
            raise Refused(
                f"a sampler is named by a mapping with its 'name', its settings and 'of' for the one it wraps, at most "
                f"{DEEPEST} deep; {plain!r:.200} came"
            )
        settings = {name: value for name, value in plain.items() if name not in ("name", "of")}
        for name, value in settings.items():
            if not isinstance(name, str) or not isinstance(value, Setting):
                raise Refused(f"sampler {plain['name']!r}: setting {name!r} is {value!r:.200}; give a plain value")
        of = None if plain.get("of") is None else cls.from_plain(plain["of"], depth + 1)
        return cls(plain["name"], tuple(sorted(settings.items())), of)


def sampler(name: str, of: SamplerSpec | None = None, **settings: Setting) -> SamplerSpec:
    """The spec of a sampler by its registered name, such as one of your own."""
    return SamplerSpec(name, tuple(sorted(settings.items())), of)


def sequential() -> SamplerSpec:
    """Rows in order of arrival."""
    return sampler("sequential")


def groups(size: int, tag: str = "group") -> SamplerSpec:
    """All ``size`` rows with one value of ``tag``, or none of them; the group whose first row came first goes first. A
    claim asks for a multiple of ``size``."""
    return sampler("groups", size=size, tag=tag)


def ranks(
    world_size: int, mode: str = "disjoint", balance: str | None = None, of: SamplerSpec | None = None
) -> SamplerSpec:
    """Each of ``world_size`` data-parallel ranks gets its own batches, ``"disjoint"`` ones or the ``"same"``; which
    does not depend on the order in which ranks ask. ``balance`` names a field whose lengths the disjoint batches of one
    step share out evenly, at equal numbers of rows."""
    return sampler("ranks", of, world_size=world_size, mode=mode, balance=balance)


def balanced(parts: int, field: str, of: SamplerSpec | None = None) -> SamplerSpec:
    """The rows of a claim come in ``parts`` micro-batches with nearly equal sums of the lengths of ``field``."""
    return sampler("balanced", of, parts=parts, field=field)


def staleness(tag: str = "version", of: SamplerSpec | None = None) -> SamplerSpec:
    """Rows whose ``tag`` is below the claim's ``oldest_version`` are skipped and reported, once; with groups inside,
    together with their siblings. Rows without a number there wait until they are tagged."""
    return sampler("staleness", of, tag=tag)


SEQUENTIAL = sequential()
