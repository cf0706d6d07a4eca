"""The tasks of a partition, their samplers and their grants as plain data and back; a part of the catalog's snapshot.

A sampler saves what does not follow from the rows; all ready rows are offered to it anew, in order of arrival. What it
was given is named by key and arrival, so a key that was cleared and put again is not taken for the row that it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.candidates import Candidate
from policies.catalog import Catalog
from policies.claims import ClaimAnswer, Task
from policies.columns import require_plain
from policies.errors import CheckpointError, Refused
from policies.partition import Partition
from policies.sampler_registry import SamplerRegistry
from policies.sampling import Demand, Drawn, SamplerSpec, Skip
from policies.watches import Grant, Watch


def task_to_plain(task: Task, partition: Partition) -> dict[str, Any]:
    """Raises `CheckpointError` when a sampler cannot say its state."""
    watches = [_watch_to_plain(watch, partition.names(watch.want)) for watch in task.watches.values()]
    return {"name": task.name, "claimed": task.claimed, "watches": watches}


def _watch_to_plain(watch: Watch, fields: Sequence[str]) -> dict[str, Any]:
    state = None
    if watch.failure is None:
        try:
            state = watch.sampler.state()
            require_plain(state)
        except Exception as error:  # it may be a user's
            raise CheckpointError(
                f"sampler {watch.spec.name!r} of task {watch.task!r} in partition {watch.table.name!r} cannot be "
                f"saved: {type(error).__name__}: {error}; reset the task, or mend the sampler's state()"
            ) from error
    failure = None if watch.failure is None else watch.failure.message
    spec = watch.spec.to_plain()
    return {"fields": list(fields), "sampler": spec, "epoch": watch.epoch, "failure": failure, "state": state}


def restore_task(task: Task, plain: Mapping[str, Any], partition: Partition, registry: SamplerRegistry) -> None:
    """Take over a saved task; the partition has all its rows. Raises `CheckpointError` for a sampler that cannot."""
    task.claimed = plain["claimed"]
    for saved in plain["watches"]:
        spec = SamplerSpec.from_plain(saved["sampler"])
        try:
            watch = Watch(partition, task.name, task.bit, partition.mask(saved["fields"]), spec, registry)
            watch.epoch = saved["epoch"]
            if saved["failure"] is None:
                watch.sampler.restore(saved["state"], watch.find)
            else:
                watch.failure = Refused(saved["failure"], sampler=spec.name)
        except Exception as error:  # it may be a user's
            raise CheckpointError(
                f"task {task.name!r} of partition {partition.name!r} claims with sampler {spec.name!r}, which cannot "
                f"be restored: {type(error).__name__}: {error}; launch the plane with the samplers it was saved with"
            ) from error
        partition.consumers.add_watch(task, watch)
        watch.fill(partition.rows.values())


def grant_to_plain(answer: ClaimAnswer) -> dict[str, Any]:
    """The answer to a claim, and what it takes to give it back."""
    plain = {
        "claim_id": answer.claim_id,
        "keys": list(answer.keys),
        "skipped": [list(skip) for skip in answer.skipped],
        "parts": [list(part) for part in answer.parts],
    }
    grant = answer.grant
    if grant is None or grant.watch.epoch != grant.epoch:
        return {**plain, "grant": None}
    demand, drawn, watch = grant.demand, grant.drawn, grant.watch
    back = {
        "partition": watch.table.name,
        "task": watch.task,
        "want": [name for name, field in watch.table.fields.items() if field.bit & watch.want],
        "sampler": watch.spec.to_plain(),
        "demand": [demand.count, demand.rank, demand.oldest_version],
        "rows": _named(drawn.rows),
        "taken": _named(drawn.claims),
        "skipped": _named([skip.row for skip in drawn.skipped]),
        "lost": drawn.lost,
        "note": drawn.note,
    }
    return {**plain, "grant": back}


def grant_from_plain(catalog: Catalog, plain: Mapping[str, Any]) -> ClaimAnswer:
    skipped = tuple([(key, reason) for key, reason in plain["skipped"]])
    parts = tuple([tuple(part) for part in plain["parts"]])
    back, grant = plain["grant"], None
    if back is not None:
        partition = catalog.partitions[back["partition"]]
        task = partition.consumers.tasks[back["task"]]
        watch = task.watches[partition.mask(back["want"]), SamplerSpec.from_plain(back["sampler"])]
        taken = [watch.find(key, arrival) for key, arrival in back["taken"]]
        known = {(row.key, row.arrival): row for row in taken}
        rows = [known.get((key, arrival)) or watch.find(key, arrival) for key, arrival in back["rows"]]
        passed = [known.get((key, arrival)) or watch.find(key, arrival) for key, arrival in back["skipped"]]
        skips = [Skip(row, reason) for row, (_, reason) in zip(passed, skipped, strict=True)]
        drawn = Drawn(tuple(rows), tuple(taken), tuple(skips), back["lost"], parts, back["note"])
        grant = Grant(watch, watch.epoch, Demand(*back["demand"]), drawn)
    return ClaimAnswer(plain["claim_id"], tuple(plain["keys"]), skipped, parts, grant=grant)


def _named(rows: Sequence[Candidate]) -> list[list[Any]]:
    return [[row.key, row.arrival] for row in rows]
