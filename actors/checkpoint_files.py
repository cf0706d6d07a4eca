"""Checkpoints on disk: directories that appear whole or not at all.

A checkpoint is written into ``<name>.partial``, every file is fsynced, the manifest comes last, and one rename makes it
visible. So a stop at any moment leaves the earlier checkpoints and at most one partial directory, which the next save
removes. Reading verifies size and checksum of every file before anything is used.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from actors.block_files import checksum_file, sync_and_describe
from policies.errors import CheckpointDamaged, CheckpointError, CheckpointMissing
from policies.manifest import (
    CONTROLLER_FILE,
    JOB_FILE,
    MANIFEST,
    PARTIAL_SUFFIX,
    FileEntry,
    Manifest,
    checkpoint_name,
    checkpoint_number,
    first_damage,
    newest_first,
)

logger = logging.getLogger(__name__)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class PartialCheckpoint:
    """A checkpoint while it is written. Use as a context manager: an exception removes what was written."""

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for leftover in self._root.glob(f"*{PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            numbers = [n for p in self._root.iterdir() if (n := checkpoint_number(p.name)) is not None]
            self.name = checkpoint_name(max(numbers, default=0) + 1)
            self.path = self._root / f"{self.name}{PARTIAL_SUFFIX}"
            self.path.mkdir()
        except OSError as error:
            raise CheckpointError(f"cannot write a checkpoint in {self._root}: {error}") from error
        self._entries: list[FileEntry] = []

    def __enter__(self) -> PartialCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)

    def add(self, entry: FileEntry) -> None:
        """A file that somebody else wrote and fsynced here; its presence and size are checked from this side."""
        path = self.path / entry.name
        size = path.stat().st_size if path.exists() else None
        if size != entry.size:
            raise CheckpointError(
                f"{path}: its writer reports {entry.size} bytes, here it has {size}; a checkpoint must lie on a file "
                "system that all nodes share"
            )
        self._entries.append(entry)

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.write_bytes(content)
        self._entries.append(sync_and_describe(path))

    def publish(self, checkpoint_id: str, fingerprint: Mapping[str, Any], unit_files: Sequence[str]) -> Path:
        """Write the manifest and make the checkpoint visible. Returns its directory."""
        manifest = Manifest(checkpoint_id, fingerprint, unit_files, self._entries)
        path = self.path / MANIFEST
        path.write_text(manifest.to_json())
        sync_and_describe(path)
        _sync_directory(self.path)
        final = self._root / self.name
        self.path.rename(final)
        _sync_directory(self._root)
        return final


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A whole checkpoint whose files have been verified. ``job`` is what the job saved with it."""

    path: Path
    manifest: Manifest
    controller: bytes
    job: Mapping[str, Any]

    @property
    def unit_files(self) -> list[Path]:
        return [self.path / name for name in self.manifest.unit_files]

    @classmethod
    def open(cls, path: str | Path) -> StoredCheckpoint:
        """Verify and open one checkpoint, or the newest whole one in a directory of checkpoints.

        Raises `CheckpointMissing` when there is none, `CheckpointDamaged` with what is wrong. In a directory of
        checkpoints, a newer one that is damaged is passed over with a warning if an older whole one exists.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointMissing(f"{path} is not a directory; give a checkpoint or a directory of checkpoints")
        if (path / MANIFEST).exists() or checkpoint_number(path.name) is not None:
            return cls._open_one(path)
        damage: CheckpointError | None = None
        for name in newest_first(p.name for p in path.iterdir() if p.is_dir()):
            try:
                return cls._open_one(path / name)
            except CheckpointError as error:
                logger.warning("passed over a checkpoint that cannot be used: %s", error)
                damage = damage or error
        raise damage or CheckpointMissing(f"{path} holds no checkpoint")

    @classmethod
    def _open_one(cls, path: Path) -> StoredCheckpoint:
        try:
            text = (path / MANIFEST).read_text()
        except OSError as error:
            raise CheckpointDamaged(f"{path} has no readable {MANIFEST}: {error.strerror}") from None
        except ValueError as error:
            raise CheckpointDamaged(f"{path}: {MANIFEST} is not text: {error}") from None
        manifest = Manifest.from_json(text, str(path))
        sizes = {e.name: (path / e.name).stat().st_size if (path / e.name).is_file() else None for e in manifest.files}
        damage = first_damage(manifest, sizes)
        if damage is None:
            damage = next(
                (
                    f"{entry.name} does not match its checksum"
                    for entry in manifest.files
                    if checksum_file(path / entry.name) != entry.checksum
                ),
                None,
            )
        if damage is not None:
            raise CheckpointDamaged(f"{path}: {damage}; restore an earlier checkpoint")
        try:
            job = msgpack.unpackb((path / JOB_FILE).read_bytes(), strict_map_key=False)
            controller = (path / CONTROLLER_FILE).read_bytes()
        except (OSError, ValueError, msgpack.UnpackException) as error:
            raise CheckpointDamaged(f"{path}: {error}") from None
        return cls(path, manifest, controller, job)
