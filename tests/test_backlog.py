"""What is on its way to each peer: counted to within one mark, forgotten when it was taken."""

from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from policies.backlog import MARK_BYTES, Backlogs

LIMIT = 4 * MARK_BYTES


class Network:
    """Takes the messages of one peer in their order."""

    def __init__(self) -> None:
        self.on_the_way: deque[tuple[int, list[bool]]] = deque()

    def send(self, backlogs: Backlogs, peer: bytes, nbytes: int) -> None:
        taken = [False]
        marked = backlogs.mark_next(peer, nbytes)
        backlogs.sent(peer, nbytes, (lambda: taken[0]) if marked else None)
        self.on_the_way.append((nbytes, taken))

    def take(self) -> None:
        if self.on_the_way:
            self.on_the_way.popleft()[1][0] = True

    @property
    def nbytes(self) -> int:
        return sum(nbytes for nbytes, _ in self.on_the_way)


@given(st.lists(st.one_of(st.integers(1, 2 * MARK_BYTES), st.just("take"))))
def test_a_peer_is_full_when_more_than_the_limit_is_on_its_way_give_or_take_a_mark(steps: list[int | str]) -> None:
    backlogs, network = Backlogs(LIMIT), Network()
    for step in steps:
        if isinstance(step, int):
            network.send(backlogs, b"p", step)
        else:
            network.take()
        if network.nbytes > LIMIT:
            assert backlogs.full(b"p")
        if network.nbytes + 2 * MARK_BYTES <= LIMIT:
            assert not backlogs.full(b"p") or backlogs.on_the_way(b"p") <= network.nbytes + 3 * MARK_BYTES


@given(st.integers(1, 40), st.integers(1, 3 * MARK_BYTES))
def test_what_was_taken_counts_no_more(messages: int, nbytes: int) -> None:
    backlogs, network = Backlogs(0), Network()
    for _ in range(messages):
        network.send(backlogs, b"p", nbytes)
    for _ in range(messages):
        network.take()
    assert backlogs.on_the_way(b"p") < MARK_BYTES


def test_one_full_peer_leaves_the_others_alone() -> None:
    backlogs, network = Backlogs(LIMIT), Network()
    network.send(backlogs, b"stuck", LIMIT + 1)
    network.send(backlogs, b"fine", 1)
    assert backlogs.full(b"stuck") and not backlogs.full(b"fine") and not backlogs.full(b"unknown")


def test_peers_that_come_and_go_are_not_remembered_for_ever() -> None:
    backlogs = Backlogs(LIMIT)
    for number in range(100_000):
        backlogs.sent(number.to_bytes(4, "big"), 100)
    assert len(backlogs._peers) <= 1024
