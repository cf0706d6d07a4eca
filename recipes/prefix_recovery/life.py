"""One life of the job: a child process with everything it starts, marked so that all of it can be found and killed.

Guarantees: every process of the life carries the environment variable ``REGRAFT_LIFE`` with a random value made for
this life alone; `Life.kill` sends SIGKILL to the processes that carry it and to what they have started, to no other
process, again and again until none is left, and says so with `RemoteError` if one survives. Leaving the context kills.

Two nets, because either alone has a hole: a process that sets its own title may overwrite the memory that
``/proc/<pid>/environ`` shows, so descendants of marked processes are killed too; a process whose parents have died is
nobody's descendant any more, but still carries the mark. ``SPT_NOENV`` asks the library that Ray sets titles with to
leave the environment alone. A process id that is used again for another process is never hit: psutil compares the
time of creation before it sends the signal.

Cost: a search reads ``/proc`` once, about 20 ms on a machine with a few hundred processes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from policies.errors import RemoteError
from recipes.prefix_recovery.events import Event, parse

MARKER = "REGRAFT_LIFE"

_KILL_DEADLINE_S = 20.0
_SETTLE_S = 0.02
_EMPTY_SEARCHES = 2
_LOG_LINES = 20
_READ_BYTES = 1 << 16


class Life:
    """A child process of its own session. Its standard output is events, its standard error goes to ``log``.

    ``killed`` is the number of processes that `kill` has ended.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name, self.log, self.marker = name, log, secrets.token_hex(16)
        self.killed = 0
        self._command = [*command]
        self._process: subprocess.Popen[bytes] | None = None
        self._selector = selectors.DefaultSelector()
        self._buffer = b""

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        self._selector.close()

    def start(self) -> None:
        """Start the child. It has a session of its own, so that a terminal's Ctrl-C reaches only this process."""
        environment = {**os.environ, MARKER: self.marker, "SPT_NOENV": "1"}
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def read(self, timeout: float) -> list[Event] | None:
        """The events that came within ``timeout`` seconds, possibly none; None once the child has ended and is read.

        Raises `WireError` for a line that is no event. What a killed child left of a line is dropped.
        """
        process = self._started
        if not self._selector.select(max(0.0, timeout)):
            return [] if process.poll() is None or self._selector.select(0) else None
        assert process.stdout is not None
        data = os.read(process.stdout.fileno(), _READ_BYTES)
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [parse(line.decode("utf-8", "replace")) for line in lines]

    def returncode(self, timeout: float = 30.0) -> int:
        """The child's exit status, minus the signal's number if one ended it; waits for it at most ``timeout`` s."""
        try:
            return self._started.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise RemoteError(f"the {self.name} life has closed its output and does not end; see {self.log}") from error

    def log_tail(self) -> str:
        """The last lines of the log."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            return f"({error})"
        return "\n".join(lines[-_LOG_LINES:]) or "(empty)"

    def kill(self) -> int:
        """SIGKILL everything of this life until nothing is left; returns how many processes that took.

        The child goes first, so that it has no time to report the deaths of the others.
        """
        deadline = time.monotonic() + _KILL_DEADLINE_S
        killed: set[psutil.Process] = set()
        empty = 0
        while empty < _EMPTY_SEARCHES:
            found = self.processes()
            for process in sorted(found, key=self._is_not_child):
                _send_kill(process)
            killed.update(found)
            empty = 0 if found else empty + 1
            if found and time.monotonic() > deadline:
                raise RemoteError(f"processes of the {self.name} life survive SIGKILL: {found}; look at them with ps")
            time.sleep(_SETTLE_S)
        if self._process is not None:
            self._process.wait()
        self.killed += len(killed)
        return len(killed)

    def processes(self) -> list[psutil.Process]:
        """All living processes that carry the marker, the child, and the descendants of these."""
        living = {process.pid: process for process in _living()}
        parents = {pid: _parent(process) for pid, process in living.items()}
        found = {pid for pid, process in living.items() if _carries(process, self.marker)}
        if self._process is not None and self._process.poll() is None:
            found.add(self._process.pid)
        while more := {pid for pid, parent in parents.items() if parent in found} - found:
            found |= more
        return [living[pid] for pid in found if pid in living]

    def _is_not_child(self, process: psutil.Process) -> bool:
        return self._process is None or process.pid != self._process.pid

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, f"the {self.name} life has not been started"
        return self._process


def _living() -> Iterator[psutil.Process]:
    """Fresh handles: those that `psutil.process_iter` caches may stand for a process that is gone."""
    for pid in psutil.pids():
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def _carries(process: psutil.Process, marker: str) -> bool:
    try:
        return bool(process.environ().get(MARKER) == marker)
    except (psutil.Error, OSError):
        return False


def _parent(process: psutil.Process) -> int | None:
    try:
        return int(process.ppid())
    except psutil.Error:
        return None


def _send_kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
