"""How waiting keys become reads."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from policies.coalescing_events import Source
from policies.read_queue import Name, ReadQueue, Waiting

SOURCES = (Source("staging", ("ids",)), Source("train", ("ids",)))
rows = st.lists(st.tuples(st.sampled_from(SOURCES), st.integers(0, 9), st.integers(0, 40)), max_size=30)


def sizes(read: dict[Name, Waiting]) -> tuple[int, int, int]:
    return len(read), sum(w.tokens for w in read.values()), sum(w.nbytes for w in read.values())


@given(rows, st.integers(1, 6), st.integers(1, 20), st.integers(1, 80))
def test_every_key_leaves_once_in_its_order_and_no_read_breaks_a_limit(
    waiting: list[tuple[Source, int, int]], max_keys: int, max_tokens: int, max_bytes: int
) -> None:
    queue = ReadQueue(max_keys, max_tokens, max_bytes)
    names = [Name(source, f"k{n}") for n, (source, _, _) in enumerate(waiting)]
    for since, (name, (_, tokens, nbytes)) in enumerate(zip(names, waiting, strict=True)):
        queue.add(name, Waiting(float(since), tokens, nbytes))
    reads = []
    while len(queue):
        assert queue.oldest() == min(float(names.index(name)) for name in names if name in queue)
        reads.append(queue.take())
    for read in reads:
        assert len({name.source for name in read}) == 1
        assert len(read) == 1 or all(
            size <= limit for size, limit in zip(sizes(read), (max_keys, max_tokens, max_bytes), strict=True)
        )
    for source in SOURCES:
        of_source = [read for read in reads if next(iter(read)).source == source]
        assert [name for read in of_source for name in read] == [name for name in names if name.source == source]
        for read, following in itertools.pairwise(of_source):
            both = sizes({**read, next(iter(following)): next(iter(following.values()))})
            assert any(s > limit for s, limit in zip(both, (max_keys, max_tokens, max_bytes), strict=True))
    assert queue.oldest() is None and queue.whole() is None


def test_what_is_put_back_comes_first_and_keeps_its_time() -> None:
    queue = ReadQueue(2, 100, 100)
    a, b, c = (Name(SOURCES[0], key) for key in "abc")
    queue.add(c, Waiting(5.0, 1, 1))
    assert queue.whole() is None
    queue.put_back([a, b], [Waiting(1.0, 1, 1), Waiting(2.0, 1, 1)])
    assert (len(queue), queue.oldest(), queue.whole()) == (3, 1.0, SOURCES[0])
    queue.remove(b)
    assert list(queue.take()) == [a, c]
