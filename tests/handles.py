"""Plain objects dressed as Ray actor handles, so that an actor's partners can live in the test's own process."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any


class Handle:
    """``handle.method.remote(…)`` calls ``target.method(…)`` and gives something to await, as an actor handle does."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return _Method(getattr(self._target, name))


class _Method:
    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *arguments: Any) -> asyncio.Future[Any]:
        async def call() -> Any:
            result = self._method(*arguments)
            return await result if inspect.isawaitable(result) else result

        return asyncio.ensure_future(call())
