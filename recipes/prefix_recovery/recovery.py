"""The job from outside: the lives one after the other, each watched while it runs, the first one killed.

Guarantees: however a life ends, by itself, by the kill, by an error or by an interruption, none of its processes
outlives `run_lives`, and its temporary directory is removed. The first life is killed ``kill_after`` seconds after the
event that says that its checkpoint is published, at the latest as soon as the event has been read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from policies.errors import RemoteError
from recipes.prefix_recovery import events
from recipes.prefix_recovery.arguments import Arguments
from recipes.prefix_recovery.life import Life
from recipes.prefix_recovery.live_view import LiveView
from recipes.prefix_recovery.record import Record
from recipes.prefix_recovery.run_directory import RunDirectory, temporary_directory

_POLL_S = 0.2


def run_lives(
    arguments: Arguments, directory: RunDirectory, driver: Sequence[str], record: Record, view: LiveView
) -> None:
    """Run both lives, or with an earlier run to resume only the second. ``driver`` is the command of a job driver.

    Raises `RemoteError` when a life fails, with what it said and the end of its log.
    """
    if arguments.source is None:
        with temporary_directory() as temporary:
            replace(arguments.plan, temp_dir=str(temporary)).write(directory.plan)
            _run_first(_life("first", directory, driver), arguments.kill_after, record, view)
    with temporary_directory() as temporary:
        replace(arguments.plan, temp_dir=str(temporary)).write(directory.plan)
        _run_second(_life("second", directory, driver), record, view)


def _life(name: str, directory: RunDirectory, driver: Sequence[str]) -> Life:
    return Life(name, [*driver, name, "--plan", str(directory.plan)], directory.log(name))


def _run_first(life: Life, kill_after: float, record: Record, view: LiveView) -> None:
    with life:
        _start(life, record, view)
        while record.checkpoint is None:
            if not _take(life, _POLL_S, record, view):
                raise _early_end(life)
        deadline = record.checkpoint.t + kill_after
        while (left := deadline - time.time()) > 0:
            if not _take(life, min(left, _POLL_S), record, view):
                raise _early_end(life)
        at = time.time()
        killed = life.kill()
        while _take(life, 0.0, record, view):
            pass
        record.end_life(at, killed)
        view.say(f"SIGKILL to all {killed} processes of the first life; none is left", "bold red")


def _run_second(life: Life, record: Record, view: LiveView) -> None:
    with life:
        _start(life, record, view)
        while _take(life, _POLL_S, record, view):
            pass
        if life.returncode() != 0:
            raise _early_end(life)
        record.end_life(time.time())


def _start(life: Life, record: Record, view: LiveView) -> None:
    view.say(f"the {life.name} life starts; its log is {life.log}", "bold")
    record.begin_life(life.name, time.time())
    life.start()


def _take(life: Life, timeout: float, record: Record, view: LiveView) -> bool:
    """Take in what the life says within ``timeout`` seconds; False once it has ended and everything is read."""
    said = life.read(timeout)
    for event in said or ():
        if isinstance(event, events.Error):
            raise RemoteError(f"the {life.name} life failed, {event.kind}: {event.message}. Its log is {life.log}")
        record.add(event)
        view.show(event)
    return said is not None


def _early_end(life: Life) -> RemoteError:
    return RemoteError(
        f"the {life.name} life ended by itself with exit status {life.returncode()}. The end of its log {life.log}:\n"
        f"{life.log_tail()}"
    )
