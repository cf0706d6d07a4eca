"""TransferQueue's own controller class, as the in-process benchmarks use it. Importing this needs the extra.

The class is taken out of its Ray actor and constructed in this process. For calls in process its sockets and threads
are not needed, so they are not started (which can only make it faster). Its clients put each jagged row's shape under
the row's number before they send a schema; as the number is only known once the key is created, the clock is stopped
while that is done here. Rows that were cleared leave their numbers to the next ones, so its tables do not grow while it
is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final

import torch
from transfer_queue.controller import TransferQueueController

from recipes.bench.controller.rows import FIXED_SHAPE, PARTITION, Rows
from recipes.bench.controller.subject import undisturbed
from recipes.bench.scenario import CheckFailed

StockController: Final[Any] = TransferQueueController.__ray_metadata__.modified_class
"""The plain class under the actor."""

DTYPES: Final = (torch.int64, torch.float32)

Schema = Mapping[str, Mapping[str, Any]]


def as_in_its_actor() -> None:
    """Give torch the one thread that Ray gives an actor of one CPU; with more, its small operations wait for threads
    that have no core."""
    torch.set_num_threads(1)


class _WithoutWire(StockController):
    def _init_zmq_socket(self) -> None:
        pass

    def _start_process_handshake(self) -> None:
        pass

    def _start_process_request(self) -> None:
        pass


def schema(rows: Rows) -> dict[str, dict[str, Any]]:
    """What its client would extract from the rows: a list of shapes for each jagged field."""
    fields = {}
    for index, name in enumerate(rows.columns.names):
        jagged = index < rows.columns.jagged
        shape = (int(rows.lengths[0]),) if jagged else FIXED_SHAPE
        field = {"dtype": DTYPES[index % 2], "shape": torch.Size(shape), "is_nested": jagged, "is_non_tensor": False}
        if jagged:
            field["per_sample_shapes"] = [(int(length),) for length in rows.lengths]
        fields[name] = field
    return fields


def numbered(fields: Schema, indexes: Sequence[int]) -> Schema:
    """The schema as its client sends it: the shapes of jagged rows under their numbers."""
    return {
        name: {**field, "per_sample_shapes": dict(zip(indexes, field["per_sample_shapes"], strict=True))}
        if field["is_nested"]
        else field
        for name, field in fields.items()
    }


class TransferQueueSubject:
    def __init__(self) -> None:
        as_in_its_actor()
        self._controller = _WithoutWire()

    def publish(self, batches: Sequence[Rows]) -> float:
        work = [(list(rows.keys), schema(rows), rows.columns.jagged) for rows in batches]
        retrieve, update = self._controller.kv_retrieve_meta, self._controller.update_production_status
        accepted, away = [], 0.0
        with undisturbed():
            began = perf_counter()
            for keys, fields, jagged in work:
                indexes = retrieve(keys, PARTITION, create=True).global_indexes
                if jagged:
                    paused = perf_counter()
                    fields = numbered(fields, indexes)
                    away += perf_counter() - paused
                accepted.append(update(PARTITION, indexes, fields))
            seconds = perf_counter() - began - away
        _require_accepted(accepted)
        return seconds

    def cycle(self, batches: Sequence[Rows]) -> float:
        work = [(list(rows.keys), schema(rows), rows.columns.jagged, rows.tags) for rows in batches]
        controller = self._controller
        retrieve, update, tag = (
            controller.kv_retrieve_meta,
            controller.update_production_status,
            controller.set_custom_meta,
        )
        accepted, answers, away = [], [], 0.0
        with undisturbed():
            began = perf_counter()
            for keys, fields, jagged, tags in work:
                indexes = retrieve(keys, PARTITION, create=True).global_indexes
                if jagged:
                    paused = perf_counter()
                    fields = numbered(fields, indexes)
                    away += perf_counter() - paused
                accepted.append(update(PARTITION, indexes, fields))
                answers.append(retrieve(keys, PARTITION))
                tag({PARTITION: dict(zip(indexes, tags, strict=True))})
            seconds = perf_counter() - began - away
        _require_accepted(accepted)
        for answer, rows in zip(answers, batches, strict=True):
            _require_fields(answer, rows)
        return seconds

    def clear(self, groups: Sequence[Sequence[str]]) -> float:
        numbers = [[self._partition.keys_mapping[key] for key in keys] for keys in groups]
        work = [(indexes, [PARTITION] * len(indexes)) for indexes in numbers]
        clear = self._controller.clear_meta
        with undisturbed():
            began = perf_counter()
            for indexes, partitions in work:
                clear(indexes, partitions)
            return perf_counter() - began

    def check(self, batches: Sequence[Rows], tagged: bool) -> None:
        for rows in batches:
            answer = self._controller.kv_retrieve_meta(list(rows.keys), PARTITION)
            _require_fields(answer, rows)
            if tagged and answer.custom_meta != rows.tags:
                raise CheckFailed(f"rows {rows.keys} do not have the tags that were set")

    def check_rows(self, rows: int) -> None:
        found = len(self._partition.keys_mapping)
        if found != rows:
            raise CheckFailed(f"{found} rows live, not {rows}")

    def close(self) -> None:
        """Without its wire it is plain memory."""

    @property
    def _partition(self) -> Any:
        return self._controller.partitions[PARTITION]


def _require_accepted(accepted: Sequence[bool]) -> None:
    if not all(accepted):
        raise CheckFailed(f"{accepted.count(False)} of {len(accepted)} publications were not accepted")


def _require_fields(answer: Any, rows: Rows) -> None:
    if answer.size != len(rows.keys) or answer.field_names != sorted(rows.columns.names) or not answer.is_ready:
        raise CheckFailed(f"a lookup of {rows.keys} found {answer.size} rows with fields {answer.field_names}")
