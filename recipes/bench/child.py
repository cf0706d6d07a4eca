"""A process of its own for what a runner must not share with the rest: a server, clients, or a memory to weigh.

A child runs a generator function. What it yields first says that it is ready; then each request is sent into it and
what it yields next is the answer. Guarantees: an error in the child is a `CheckFailed` here, with the child's last
words; a child that is silent for too long too. It ignores Ctrl-C (its parent ends it) and ends when its parent does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator
from multiprocessing.connection import Connection
from typing import Any, Final

from recipes.bench.scenario import CheckFailed

Serve = Callable[..., Generator[Any, Any, None]]
PATIENCE_S: Final = 300.0
_END_S: Final = 5.0


class Child:
    """``serve(*arguments)`` in a fresh process (spawned, so it has nothing of this one); ``first`` is its first answer.

    ``serve`` is a function of a module, ``arguments``, requests and answers are plain values.
    """

    def __init__(self, name: str, serve: Serve, *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = name
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, serve, arguments), name=name, daemon=True)
        with _shielded():
            self._process.start()
        theirs.close()
        try:
            self.first = self.answer()
        except BaseException:
            self.close()
            raise

    def ask(self, request: Any = None) -> Any:
        self.tell(request)
        return self.answer()

    def tell(self, request: Any) -> None:
        """Send a request whose `answer` is asked for later, so that several children can work at once."""
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(request)

    def answer(self) -> Any:
        if not self._connection.poll(PATIENCE_S):
            raise CheckFailed(f"the process {self._name} has not answered for {PATIENCE_S:g} s")
        try:
            worked, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_END_S)
            raise CheckFailed(f"the process {self._name} died (exit code {self._process.exitcode})") from None
        if not worked:
            raise CheckFailed(f"the process {self._name} failed:\n{answer}")
        return answer

    def close(self) -> None:
        """Let it end by itself; kill it if it does not."""
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()


@contextlib.contextmanager
def _shielded() -> Iterator[None]:
    """Ctrl-C is for this process: a child that begins meanwhile never hears of it, and this one only afterwards."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _run(connection: Connection, serve: Serve, arguments: tuple[Any, ...]) -> None:
    with connection, contextlib.suppress(BrokenPipeError):
        try:
            with contextlib.closing(serve(*arguments)) as answers:
                connection.send((True, next(answers)))
                for request in _requests(connection):
                    connection.send((True, answers.send(request)))
        except BrokenPipeError:
            raise
        except Exception:
            connection.send((False, traceback.format_exc()))
    os._exit(0)  # All is closed; taking the interpreter down with ray and torch in it would cost seconds more.


def _requests(connection: Connection) -> Iterator[Any]:
    """All requests until the parent closes its end or is gone."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while True:
            yield connection.recv()
