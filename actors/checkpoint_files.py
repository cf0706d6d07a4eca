"""Checkpoints on disk: directories that appear whole or not at all.

A checkpoint is written into ``<name>.partial``, every file is fsynced, the manifest comes last, and one rename makes it
visible. So a stop at any moment leaves the earlier checkpoints and at most one partial directory, which the next save
removes. Reading verifies size and checksum of every file before anything is used.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


def _lock(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise CheckpointError(f"another save is writing in {path}; save again when it has ended") from None
    except OSError as error:
        logger.info("%s cannot be locked, so nothing keeps two saves apart: %s", path, error)
    return handle


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot write a checkpoint in {path}: {error}") from error


class PartialCheckpoint:
    """A checkpoint while it is written. Use as a context manager: an exception removes what was written.

    One save at a time writes in a directory (where its file system can lock one): a second is a `CheckpointError`. The
    lock goes with the process that holds it.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root)
        with _writing(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self._root)
            for leftover in self._root.glob(f"*{PARTIAL_SUFFIX}"):
                shutil.rmtree(leftover)
            numbers = [n for p in self._root.iterdir() if (n := checkpoint_number(p.name)) is not None]
            self.name = checkpoint_name(max(numbers, default=0) + 1)
            self.path = self._root / f"{self.name}{PARTIAL_SUFFIX}"
            self.path.mkdir()
        self._entries: list[FileEntry] = []

    def __enter__(self) -> PartialCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

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
        with _writing(path):
            path.write_bytes(content)
            self._entries.append(sync_and_describe(path))

    def publish(self, checkpoint_id: str, fingerprint: Mapping[str, Any], unit_files: Sequence[str]) -> Path:
        """Write the manifest and make the checkpoint visible. Returns its directory."""
        text = Manifest(checkpoint_id, fingerprint, unit_files, self._entries).to_json()
        path, final = self.path / MANIFEST, self._root / self.name
        with _writing(self.path):
            path.write_text(text)
            sync_and_describe(path)
            _sync_directory(self.path)
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
        try:
            damage = _damage(path, manifest)
            if damage is not None:
                raise CheckpointDamaged(f"{path}: {damage}; restore an earlier checkpoint")
            job = msgpack.unpackb((path / JOB_FILE).read_bytes(), strict_map_key=False)
            controller = (path / CONTROLLER_FILE).read_bytes()
        except (OSError, ValueError, TypeError, msgpack.UnpackException) as error:
            raise CheckpointDamaged(f"{path} cannot be read: {type(error).__name__}: {error}") from None
        if not isinstance(job, dict):
            raise CheckpointDamaged(f"{path}: {JOB_FILE} holds a {type(job).__name__}, not the mapping that was saved")
        return cls(path, manifest, controller, job)


def _damage(path: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files, by size and then by checksum; None when all fit."""
    sizes = {e.name: (path / e.name).stat().st_size if (path / e.name).is_file() else None for e in manifest.files}
    damage = first_damage(manifest, sizes)
    if damage is not None:
        return damage
    for entry in manifest.files:
        if checksum_file(path / entry.name) != entry.checksum:
            return f"{entry.name} does not match its checksum"
    return None
