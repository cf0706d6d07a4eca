"""The JSON of a benchmark: ``{"machine": {…}, "versions": {…}, "records": [{…}, …]}``.

Guarantees: `ResultFiles.prepare` finds out before any work whether the files can be written, and changes nothing that
is there. A report appears whole, by a rename. What a run that broke off had measured goes into a file of another name,
so that a report never is a part of one and an earlier report stays.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import ConfigError
from recipes.bench.record import Record

SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Report:
    """What a benchmark found out, and where."""

    machine: Mapping[str, Any]
    versions: Mapping[str, str | None]
    records: Sequence[Record]

    def to_plain(self) -> dict[str, Any]:
        return {
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "records": [record.to_plain() for record in self.records],
        }

    def write(self, path: Path) -> None:
        text = json.dumps(self.to_plain(), indent=2, allow_nan=False) + "\n"
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), 0o666 & ~_umask())
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


@dataclass(frozen=True, slots=True)
class ResultFiles:
    """``report`` is what ``--out`` names; its companions lie beside it."""

    report: Path

    @property
    def picture(self) -> Path:
        return self.report.with_suffix(".png")

    @property
    def partial(self) -> Path:
        return self.report.with_suffix(f".partial{SUFFIX}")

    @classmethod
    def prepare(cls, out: Path) -> ResultFiles:
        """Make the directory and prove that files can be written there. Raises `ConfigError`."""
        files = cls(out.absolute())
        if out.suffix != SUFFIX:
            raise ConfigError(f"--out is {out}; give a file whose name ends in {SUFFIX} (the picture lies beside it)")
        for path in (files.report, files.picture, files.partial):
            if path.is_dir():
                raise ConfigError(f"--out {out} cannot be written: {path} is a directory; give another")
        directory = files.report.parent
        made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=directory, prefix=".probe-") as probe:
                probe.write(b"regraft")
                probe.flush()
        except OSError as error:
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            raise ConfigError(f"--out {out} cannot be written: {error.strerror or error}; give another") from error
        return files


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
