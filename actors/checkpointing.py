"""Saving and restoring a whole plane through its client.

The controller's snapshot fixes the membership of a checkpoint in one instant. Units are held before it, so every block
that it names is still there when they write, side by side, straight from their buffers; writers and readers go on
meanwhile. Restoring binds the saved blocks to whatever units there are now.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from actors.checkpoint_files import PartialCheckpoint, StoredCheckpoint
from actors.client import DataPlaneClient
from policies.errors import CheckpointError, Refused, RegraftError
from policies.manifest import CONTROLLER_FILE, JOB_FILE, FileEntry, require_fingerprint
from policies.operations import CONTROLLER, Ask

logger = logging.getLogger(__name__)

FILES_TIMEOUT_S = 3600.0
"""A unit may take this long to write or read its file of a checkpoint."""


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """``seconds`` by phase: ``snapshot``, ``write`` (units and job state), ``publish``."""

    path: Path
    nbytes: int
    seconds: Mapping[str, float]


def save_plane(
    client: DataPlaneClient,
    directory: str | Path,
    job: Mapping[str, Any],
    fingerprint: Mapping[str, Any],
    checkpoint_id: str,
) -> SavedCheckpoint:
    """Write a checkpoint of everything the controller knows at one moment; it appears in ``directory`` when whole.

    ``job`` is the job's own state, any msgpack-plain mapping (receipts in their plain form belong here).
    ``fingerprint`` says what shapes the data; a restore must present the same. Raises `CheckpointError` or the failing
    unit's error, and then nothing of this checkpoint is left and the earlier ones are as they were.
    """
    began = time.monotonic()
    packed_job = _packed(job)
    with PartialCheckpoint(directory) as partial:
        with _held_units(client, holder := uuid.uuid4().hex) as units:
            (snapshot,) = client.ask([Ask(CONTROLLER, "snapshot")])
            snapshot_at = time.monotonic()
            files = {unit: f"unit-{unit}.safetensors" for unit in units}
            blocks = snapshot.body["blocks"]
            asks = [
                Ask(
                    unit,
                    "save",
                    {"path": str(partial.path.resolve() / name), "blocks": blocks.get(unit, []), "holder": holder},
                    repeatable=False,
                )
                for unit, name in files.items()
            ]
            for written in client.ask(asks, FILES_TIMEOUT_S):
                partial.add(FileEntry.from_plain(written.body))
        partial.write(CONTROLLER_FILE, bytes(snapshot.buffers[0]))
        partial.write(JOB_FILE, packed_job)
        written_at = time.monotonic()
        path = partial.publish(checkpoint_id, fingerprint, list(files.values()))
    seconds = {
        "snapshot": snapshot_at - began,
        "write": written_at - snapshot_at,
        "publish": time.monotonic() - written_at,
    }
    return SavedCheckpoint(path, sum(file.stat().st_size for file in path.iterdir()), seconds)


def _packed(job: Mapping[str, Any]) -> bytes:
    try:
        return bytes(msgpack.packb(dict(job)))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the job's state is not plain data that msgpack can hold: {error}") from error


@contextmanager
def _held_units(client: DataPlaneClient, holder: str) -> Iterator[list[str]]:
    """The plane's units, none of which frees a row inside the context."""
    units = list(client.units())
    try:
        client.ask([Ask(unit, "hold", {"holder": holder}) for unit in units])
        yield units
    finally:
        _ask_each(client, [Ask(unit, "release", {"holder": holder}) for unit in units])


def _ask_each(client: DataPlaneClient, asks: Sequence[Ask]) -> None:
    """Ask for what should happen but does not change the outcome."""
    for ask in asks:
        try:
            client.ask([ask])
        except RegraftError as error:
            logger.warning("unit %s did not %s: %s", ask.peer, ask.op, error)


def restore_plane(
    client: DataPlaneClient, checkpoint: StoredCheckpoint | str | Path, fingerprint: Mapping[str, Any] | None
) -> StoredCheckpoint:
    """Fill an empty plane from a checkpoint: one that was opened, or the path of one or of a directory of them (then
    the newest whole one).

    Everything is verified before the plane is touched; with ``fingerprint`` None the caller compares the manifest's
    itself. Raises `CheckpointMissing`, `CheckpointDamaged`,
    `FingerprintMismatch`, or `Refused` when the plane already holds rows.
    """
    stored = checkpoint if isinstance(checkpoint, StoredCheckpoint) else StoredCheckpoint.open(checkpoint)
    if fingerprint is not None:
        require_fingerprint(stored.manifest.fingerprint, fingerprint, str(stored.path))
    held = sorted(client.describe()["partitions"])
    if held:
        raise Refused(f"the plane already holds partitions {held}; restore into a plane that was just launched")
    units = client.units()
    placed = [(units[i % len(units)], file) for i, file in enumerate(stored.unit_files)]
    restore = uuid.uuid4().hex
    loads = [
        Ask(unit, "load", {"path": str(file.resolve()), "restore": restore}, repeatable=False) for unit, file in placed
    ]
    bound: dict[int, str] = {}
    try:
        for (unit, _), loaded in zip(placed, client.ask(loads, FILES_TIMEOUT_S), strict=True):
            bound.update(dict.fromkeys(loaded.body["blocks"], unit))
        client.ask([Ask(CONTROLLER, "restore", {"blocks": bound}, [stored.controller], repeatable=False)])
    except RegraftError:
        _ask_each(client, [Ask(unit, "unload", {"restore": restore}) for unit in units])
        raise
    return stored
