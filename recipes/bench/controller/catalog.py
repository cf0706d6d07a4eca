"""regraft's controller without its wire: `policies.catalog.Catalog`, as the in-process benchmarks use it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from policies.answers import OK
from policies.catalog import Catalog
from policies.columns import JAGGED
from policies.locations import FieldSchema, Publication, UnitLocation
from recipes.bench.controller.rows import FIXED_SHAPE, PARTITION, Rows
from recipes.bench.controller.subject import undisturbed
from recipes.bench.scenario import CheckFailed

UNIT: Final = "u0"
DTYPES: Final = ("int64", "float32")


def publication(rows: Rows, number: int) -> Publication:
    """What a unit would say of the rows, as block ``number`` of the plane's life."""
    fields = {}
    for index, name in enumerate(rows.columns.names):
        dtype = DTYPES[index % 2]
        jagged = index < rows.columns.jagged
        fields[name] = FieldSchema(dtype, (JAGGED,), rows.lengths) if jagged else FieldSchema(dtype, FIXED_SHAPE)
    return Publication.of(f"batch-{number}", UNIT, number, PARTITION, rows.keys, fields)


class CatalogSubject:
    """A catalog with one unit."""

    def __init__(self) -> None:
        self._catalog = Catalog(strict=False)
        self._catalog.register_unit(UNIT, UnitLocation("tcp://127.0.0.1:1"))
        self._numbers = itertools.count()

    def publish(self, batches: Sequence[Rows]) -> float:
        publications = self._publications(batches)
        publish, now = self._catalog.publish, 0.0
        with undisturbed():
            began = perf_counter()
            for each in publications:
                publish(each, now)
            return perf_counter() - began

    def cycle(self, batches: Sequence[Rows]) -> float:
        work = [(each, rows.keys, rows.tags) for each, rows in zip(self._publications(batches), batches, strict=True)]
        publish, locate, tag, now = self._catalog.publish, self._catalog.locate, self._catalog.tag, 0.0
        answers = []
        with undisturbed():
            began = perf_counter()
            for each, keys, tags in work:
                publish(each, now)
                answers.append(locate(PARTITION, keys, None))
                tag(PARTITION, keys, tags)
            seconds = perf_counter() - began
        for answer, rows in zip(answers, batches, strict=True):
            if set(answer.verdicts) != {OK} or answer.fields != rows.columns.names:
                raise CheckFailed(f"a lookup of {rows.keys} found {answer.verdicts} with fields {answer.fields}")
        return seconds

    def clear(self, groups: Sequence[Sequence[str]]) -> float:
        clear = self._catalog.clear
        with undisturbed():
            began = perf_counter()
            for keys in groups:
                clear(PARTITION, keys)
            return perf_counter() - began

    def check(self, batches: Sequence[Rows], tagged: bool) -> None:
        for rows in batches:
            located = self._catalog.locate(PARTITION, rows.keys, None)
            if set(located.verdicts) != {OK} or located.fields != rows.columns.names:
                raise CheckFailed(f"rows {rows.keys} are {located.verdicts} with fields {located.fields}")
            if tagged and self._catalog.tags(PARTITION, rows.keys) != rows.tags:
                raise CheckFailed(f"rows {rows.keys} do not have the tags that were set")

    def check_rows(self, rows: int) -> None:
        found = len(self._catalog.list_keys(PARTITION))
        if found != rows:
            raise CheckFailed(f"{found} rows live, not {rows}")

    def close(self) -> None:
        """A catalog is plain memory."""

    def _publications(self, batches: Sequence[Rows]) -> list[Publication]:
        return [publication(rows, next(self._numbers)) for rows in batches]
