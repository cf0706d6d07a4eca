"""What a put answers, what a get returns, and what a claim is given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.columns import Column
from policies.errors import KeyCleared, KeyCorrupt, KeyMissing, KeyUnavailable, Unreachable

OK = "ok"
MISSING = "missing"
CLEARED = "cleared"
CORRUPT = "corrupt"
UNREACHABLE = "unreachable"

_ERRORS: dict[str, type[KeyUnavailable] | type[Unreachable]] = {
    MISSING: KeyMissing,
    CLEARED: KeyCleared,
    CORRUPT: KeyCorrupt,
    UNREACHABLE: Unreachable,
}


@dataclass(frozen=True, slots=True)
class PutAck:
    """A unit's acknowledgement of one put: stored and published.

    ``keys`` in the order of the put; ``row_bytes[i]`` the value bytes of all fields of row i as the unit holds them;
    ``checksum``: `policies.checksums.block_checksum` over the block as the unit holds it.
    """

    unit: str
    block: int
    keys: tuple[str, ...]
    row_bytes: tuple[int, ...]
    checksum: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The answer to a get: a verdict for each key asked, and the rows of those that are ``ok``.

    ``columns[field]`` has one row per ok key, in the order asked. ``causes`` says in words why a key is not ok.
    """

    keys: tuple[str, ...]
    verdicts: tuple[str, ...]
    columns: Mapping[str, Column]
    causes: Mapping[str, str]

    def errors(self) -> dict[str, KeyUnavailable | Unreachable]:
        """The error of each key that is not ok, in the order asked."""
        return {
            key: _ERRORS[verdict](f"key {key!r}: {self.causes.get(key, verdict)}", key=key, verdict=verdict)
            for key, verdict in zip(self.keys, self.verdicts, strict=True)
            if verdict != OK
        }

    def whole(self) -> Batch:
        """This batch, when every key is ok; else the first bad key's error is raised, all of them in its details."""
        errors = self.errors()
        for error in errors.values():
            error.details["keys"] = list(errors)
            raise error
        return self

    def rows(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(key, {field: row}) for every ok key, in the order asked. Rows are views of the answer's buffers."""
        ok = (key for key, verdict in zip(self.keys, self.verdicts, strict=True) if verdict == OK)
        for index, key in enumerate(ok):
            yield key, {name: column.row(index) for name, column in self.columns.items()}


@dataclass(frozen=True, slots=True)
class Claim(Sequence[str]):
    """What a claim was given: a sequence of ``keys``, in the sampler's order.

    ``skipped``: rows that the task will not be given, with the reason. ``parts``: the micro-batches as indices into
    ``keys``; one of all keys when the sampler makes none.
    """

    keys: tuple[str, ...]
    skipped: Mapping[str, str]
    parts: tuple[tuple[int, ...], ...]

    @property
    def micro_batches(self) -> tuple[tuple[str, ...], ...]:
        """The keys of each micro-batch."""
        return tuple([tuple([self.keys[index] for index in part]) for part in self.parts])

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> Any:
        return self.keys[index]


@dataclass(frozen=True, slots=True)
class Progress:
    """``rows`` so far, of ``expected`` (None: nobody said how many there will be)."""

    rows: int
    expected: int | None

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.rows >= self.expected


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a get found its keys: key → unit. It comes before the rows do."""

    units: Mapping[str, str]


Told = Placed | Batch
"""What a get tells while it is under way."""
