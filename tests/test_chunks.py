"""Packing chunks into one block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.calls import CallIdentity
from policies.capture import CallCapture
from policies.chain import ChainDigest
from policies.checksums import block_checksum
from policies.chunks import ROWS_BETWEEN_PAUSES, Frozen, pack
from tests.generated_tokens import chain, tokens


def frozen(number: int, length: int, layers: int) -> Frozen:
    capture = CallCapture(CallIdentity("r", f"c{number}"))
    capture.observe(tokens(0, length, layers=layers))
    return capture.freeze()


@given(st.lists(st.integers(1, 6), min_size=1, max_size=40), st.integers(0, 2))
def test_every_chunk_is_a_row_with_its_own_digest(lengths: list[int], layers: int) -> None:
    chunks = [frozen(number, length, layers) for number, length in enumerate(lengths)]
    pauses: list[None] = []
    packed = pack([c.identity.chunk_key(0) for c in chunks], chunks, lambda: pauses.append(None))
    assert len(pauses) == -(-len(chunks) // ROWS_BETWEEN_PAUSES)
    assert set(packed.columns) == {"ids", "logprobs", "versions", *(["routes"] if layers else [])}
    assert packed.sent.checksum == block_checksum(packed.columns)
    assert sum(column.values.nbytes for column in packed.columns.values()) == sum(c.nbytes for c in chunks)
    for index, (chunk, digest) in enumerate(zip(chunks, packed.sent.digests, strict=True)):
        for name, part in chunk.parts.items():
            row = packed.columns[name].row(index)
            assert row.dtype == part.dtype and np.array_equal(row, part)
        assert digest.hexdigest() == ChainDigest.of(chain(chunk.tokens, layers=layers)).hexdigest()
        assert packed.tags[index]["tokens"] == chunk.tokens
    assert chunks[0].before.tokens == 0, "packing changes nothing of the call"
