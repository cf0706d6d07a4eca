"""The directory a run writes into: prepared without harming what somebody else keeps there.

Guarantees: `RunDirectory.prepare` changes nothing when it raises `ConfigError`. It only ever deletes the names that
this recipe writes, and those only where a ``plan.json`` of this recipe shows that it wrote them. The temporary
directory has a short path (Ray's socket paths must fit into 107 bytes).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from policies.errors import ConfigError
from recipes.prefix_recovery.arguments import CHECKPOINTS, REFERENCE_FILE, ROWS_FILE
from recipes.prefix_recovery.plan import PLAN_FILE, Plan

REPORT_FILE = "report.json"
TIMELINE_FILE = "timeline.png"
LOGS = "logs"
_OWN = (CHECKPOINTS, LOGS, REFERENCE_FILE, ROWS_FILE, REPORT_FILE, TIMELINE_FILE, PLAN_FILE)
_SHORT = 40


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Where a run's files lie, below ``path``."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / PLAN_FILE

    @property
    def report(self) -> Path:
        return self.path / REPORT_FILE

    @property
    def timeline(self) -> Path:
        return self.path / TIMELINE_FILE

    def log(self, life: str) -> Path:
        return self.path / LOGS / f"{life}.log"

    @classmethod
    def prepare(cls, path: Path) -> RunDirectory:
        """Make the directory, prove that it can be written to, and remove what an earlier run left in it."""
        _refuse_foreign(path)
        created = [parent for parent in (path, *path.parents) if not _exists(parent)]
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path, prefix=".probe-") as probe:
                probe.write(b"regraft")
                probe.flush()
        except OSError as error:
            for made in created:
                with contextlib.suppress(OSError):
                    made.rmdir()
            raise ConfigError(f"--out {path} cannot be written to: {error.strerror or error}; give another") from error
        for name in _OWN:
            _remove(path / name)
        return cls(path)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True


def _refuse_foreign(path: Path) -> None:
    """Refuse a directory that holds a name of ours which no plan of ours explains."""
    try:
        present = [name for name in _OWN if (path / name).exists() or (path / name).is_symlink()]
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be used: {error.strerror or error}; give another") from error
    if not present:
        return
    try:
        Plan.read(path / PLAN_FILE)
    except ConfigError as error:
        raise ConfigError(
            f"--out {path} holds {', '.join(present)} and no plan of an earlier run; nothing was touched; give another"
        ) from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """An empty directory with a short path, removed at the end together with all that is in it."""
    base = tempfile.gettempdir()
    path = Path(tempfile.mkdtemp(prefix="rg-", dir="/tmp" if len(base) > _SHORT else base))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
