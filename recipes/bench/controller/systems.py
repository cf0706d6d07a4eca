"""Which systems there are to compare, by name. The peer is imported when it is made: it may not be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from recipes.bench.controller.catalog import CatalogSubject
from recipes.bench.controller.load import Side
from recipes.bench.controller.subject import Subject
from recipes.bench.scenario import REGRAFT, TRANSFERQUEUE


def _transfer_queue_subject() -> Subject:
    from recipes.bench.controller.transfer_queue import TransferQueueSubject

    return TransferQueueSubject()


SUBJECTS: Final[dict[str, Callable[[], Subject]]] = {
    REGRAFT: CatalogSubject,
    TRANSFERQUEUE: _transfer_queue_subject,
}
"""Controllers in process."""


def _regraft_fused() -> Side:
    from recipes.bench.controller.regraft_load import FUSED

    return FUSED


def _regraft_unfused() -> Side:
    from recipes.bench.controller.regraft_load import UNFUSED

    return UNFUSED


def _transfer_queue_side() -> Side:
    from recipes.bench.controller.transfer_queue_load import STOCK

    return STOCK


FUSED_SIDES: Final[dict[str, Callable[[], Side]]] = {REGRAFT: _regraft_fused, TRANSFERQUEUE: _transfer_queue_side}
"""Controllers under load, where a client asks for what belongs together in one message if its system can."""

UNFUSED_SIDES: Final[dict[str, Callable[[], Side]]] = {REGRAFT: _regraft_unfused, TRANSFERQUEUE: _transfer_queue_side}
"""Controllers under load, where every client asks for one thing at a time."""
