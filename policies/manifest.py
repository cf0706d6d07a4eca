"""The manifest of a checkpoint: what is in it, and how that is checked.

A checkpoint is a directory. Its manifest is written last and lists every other file with size and checksum; a directory
without a whole manifest is no checkpoint. Directories are named so that their order is their age.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from policies.errors import CheckpointDamaged, CheckpointError, FingerprintMismatch

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
CONTROLLER_FILE = "controller.msgpack"
JOB_FILE = "job.msgpack"
PARTIAL_SUFFIX = ".partial"

_NAME = re.compile(r"checkpoint-(\d{8})\Z")


def checkpoint_name(number: int) -> str:
    return f"checkpoint-{number:08d}"


def checkpoint_number(name: str) -> int | None:
    """The number in a checkpoint's directory name; None for any other name."""
    match = _NAME.match(name)
    return None if match is None else int(match.group(1))


def newest_first(names: Iterable[str]) -> list[str]:
    """The checkpoint names among ``names``, newest first."""
    return sorted((n for n in names if checkpoint_number(n) is not None), reverse=True)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a checkpoint: ``size`` in bytes, ``checksum`` xxh3-64 of its bytes, hex."""

    name: str
    size: int
    checksum: str

    def to_plain(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size, "checksum": self.checksum}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> FileEntry:
        return cls(str(plain["name"]), int(plain["size"]), str(plain["checksum"]))


@dataclass(frozen=True, slots=True)
class Manifest:
    """``unit_files`` hold blocks; ``fingerprint`` is what the job gave to say what shapes its data."""

    checkpoint_id: str
    fingerprint: Mapping[str, Any]
    unit_files: Sequence[str]
    files: Sequence[FileEntry]

    def to_json(self) -> str:
        """Raises `CheckpointError` when the fingerprint would not read back as it is."""
        plain = {
            "schema_version": SCHEMA_VERSION,
            "checkpoint_id": self.checkpoint_id,
            "fingerprint": dict(self.fingerprint),
            "unit_files": list(self.unit_files),
            "files": [f.to_plain() for f in self.files],
        }
        try:
            text = json.dumps(plain, indent=2)
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the fingerprint {dict(self.fingerprint)!r} is not JSON: {error}") from None
        if json.loads(text)["fingerprint"] != plain["fingerprint"]:
            raise CheckpointError(
                f"the fingerprint {dict(self.fingerprint)!r} would read back otherwise, and so match no job; use "
                "string keys, lists, strings and finite numbers"
            )
        return text

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Raises `CheckpointDamaged` when the text is no manifest, `FingerprintMismatch` for another schema version."""
        try:
            plain = json.loads(text)
            version = plain["schema_version"]
            if version != SCHEMA_VERSION:
                raise FingerprintMismatch(
                    f"{where}: schema_version is {version!r}, this regraft reads {SCHEMA_VERSION}; restore it with the "
                    "release that wrote it",
                    field="schema_version",
                )
            manifest = cls(
                checkpoint_id=str(plain["checkpoint_id"]),
                fingerprint=dict(plain["fingerprint"]),
                unit_files=[str(name) for name in plain["unit_files"]],
                files=[FileEntry.from_plain(f) for f in plain["files"]],
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise CheckpointDamaged(f"{where}: {MANIFEST} cannot be read: {error!r}") from None
        names = [entry.name for entry in manifest.files]
        needed = {CONTROLLER_FILE, JOB_FILE, *manifest.unit_files}
        if any("/" in name or name in ("", ".", "..") for name in names) or not needed <= set(names):
            raise CheckpointDamaged(f"{where}: {MANIFEST} names files that cannot be its own: {names}")
        return manifest


def require_fingerprint(found: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Raise `FingerprintMismatch` naming the first field in which the checkpoint ``where`` (``found``) and the job
    (``expected``) differ."""
    for name in sorted({*expected, *found}):
        if found.get(name) != expected.get(name):
            raise FingerprintMismatch(
                f"{where} was made with {name} {found.get(name)!r}, this job has {expected.get(name)!r}; resume it "
                "with the job that made it, or start without a checkpoint",
                field=name,
            )


def first_damage(manifest: Manifest, sizes: Mapping[str, int | None]) -> str | None:
    """What is wrong with the files of a checkpoint, judged by size (None: the file is missing); None when all fit."""
    for entry in manifest.files:
        size = sizes.get(entry.name)
        if size is None:
            return f"{entry.name} is missing"
        if size != entry.size:
            return f"{entry.name} has {size} bytes, its manifest says {entry.size}"
    return None
