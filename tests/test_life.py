"""A life: everything it started dies by the kill, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from policies.errors import WireError
from recipes.prefix_recovery.events import Restored, to_line
from recipes.prefix_recovery.life import MARKER, Life

LINE = to_line(Restored(seconds=1.0, rows=2, t=3.0))

FAMILY = """
import os, sys
from tests.fake_driver import STUBBORN, stubborn
pids = [os.getpid(), stubborn("stay"), stubborn("leave")]
import subprocess
unmarked = {name: value for name, value in os.environ.items() if name != "REGRAFT_LIFE"}
pids.append(subprocess.Popen([sys.executable, "-c", STUBBORN, "stay"], env=unmarked, stdout=subprocess.PIPE).pid)
print(*pids, file=sys.stderr, flush=True)
import time
time.sleep(600)
"""


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def life_of(tmp_path: Path, script: str) -> Life:
    return Life("first", [sys.executable, "-c", textwrap.dedent(script)], tmp_path / "logs" / "first.log")


def wait_for_log(life: Life, words: int) -> list[int]:
    while len(text := life.log.read_text().split()) < words:
        time.sleep(0.01)
    return [int(word) for word in text]


def read_all(life: Life) -> list[object]:
    found: list[object] = []
    while (said := life.read(5.0)) is not None:
        found += said
    return found


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_the_whole_family_is_killed_and_a_bystander_is_not(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    """Children that ignore SIGTERM, one that left its parent and its session, one that lost the marker."""
    with life_of(tmp_path, FAMILY) as life:
        life.start()
        pids = wait_for_log(life, 4)
        assert {process.pid for process in life.processes()} == set(pids)
        assert life.kill() == 4
        assert not any(alive(pid) for pid in pids)
        assert life.processes() == []
        assert life.returncode() == -signal.SIGKILL
    assert bystander.poll() is None


def test_two_lives_have_different_markers(tmp_path: Path) -> None:
    """Killing one leaves the other alone."""
    with life_of(tmp_path, "import time; time.sleep(600)") as one, life_of(tmp_path, "print(input())") as other:
        other.start()
        one.start()
        assert psutil.Process(one.processes()[0].pid).environ()[MARKER] == one.marker
        other.kill()
        assert len(one.processes()) == 1


def test_leaving_the_context_kills_what_is_left_when_the_child_has_ended(tmp_path: Path) -> None:
    script = 'import sys; from tests.fake_driver import stubborn; print(stubborn("leave"), file=sys.stderr)'
    with life_of(tmp_path, script) as life:
        life.start()
        assert life.returncode() == 0
        (pid,) = wait_for_log(life, 1)
        assert alive(pid)
    assert not alive(pid)


def test_an_error_inside_the_context_leaves_no_process(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), life_of(tmp_path, "import time; time.sleep(600)") as life:
        life.start()
        pid = life.processes()[0].pid
        raise KeyboardInterrupt
    assert not alive(pid)


def test_lines_become_events_however_they_are_cut_into_pieces(tmp_path: Path) -> None:
    script = f"""
        import sys, time
        for character in {LINE!r} * 2:
            sys.stdout.write(character)
            sys.stdout.flush()
        sys.stdout.write({LINE!r} * 3000)
    """
    with life_of(tmp_path, script) as life:
        life.start()
        assert read_all(life) == [Restored(seconds=1.0, rows=2, t=3.0)] * 3002


def test_what_a_kill_leaves_of_a_line_is_dropped(tmp_path: Path) -> None:
    script = f"print({LINE!r} + {LINE[:20]!r}, end='', flush=True); import time; time.sleep(600)"
    with life_of(tmp_path, script) as life:
        life.start()
        first = []
        while not first:
            first = life.read(5.0) or []
        life.kill()
        assert (first, read_all(life)) == ([Restored(seconds=1.0, rows=2, t=3.0)], [])


def test_a_line_that_is_no_event_is_an_error(tmp_path: Path) -> None:
    with life_of(tmp_path, "print('(raylet) hello')") as life:
        life.start()
        with pytest.raises(WireError, match=r"\(raylet\) hello"):
            read_all(life)


def test_output_held_open_by_a_grandchild_does_not_hold_up_the_end(tmp_path: Path) -> None:
    script = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with life_of(tmp_path, script) as life:
        life.start()
        life.returncode()
        assert life.read(0.05) is None


def test_silence_is_no_end(tmp_path: Path) -> None:
    with life_of(tmp_path, "import time; time.sleep(600)") as life:
        life.start()
        assert life.read(0.05) == []


def test_the_tail_of_the_log_is_at_hand(tmp_path: Path) -> None:
    with life_of(tmp_path, "import sys; [print('line', i, file=sys.stderr) for i in range(100)]; sys.exit(7)") as life:
        life.start()
        assert life.returncode() == 7
        assert life.log_tail().splitlines()[-1] == "line 99"
        assert "line 10\n" not in life.log_tail()
