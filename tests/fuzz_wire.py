"""A longer hunt for messages that hurt a plane: `python -m tests.fuzz_wire --seconds 600 --seed 1`.

Random, but repeatable by its seed: it takes messages of every operation, spoils them, sends them to a live controller
and a live unit as a peer that has the secret, and compares all that is stored with what was. It ends with the messages
that hurt, or with how many did not. With ``--decoder``, atheris explores the decoder instead (`pip install atheris`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import zmq

import policies.codec
from actors.wire.secret import present
from policies.codec import Message, decode_messages
from policies.errors import WireError
from policies.operations import CONTROLLER
from tests.plane_in_process import in_process_plane
from tests.wire_mutations import Frames, record, spoil

PARKED = ("claim", "wait")
"""Requests that a controller may keep without an answer, for as long as they say."""


class Victim:
    """A plane with rows that no fuzzed message has a right to change, and peers that have its secret."""

    def __init__(self) -> None:
        self._context = in_process_plane(units=1)
        self.plane = self._context.__enter__()
        self.client = self.plane.client()
        rows = {"ids": [np.arange(n) for n in range(8)], "score": np.arange(8, dtype=np.float32)}
        self.client.put("kept", [f"k{n}" for n in range(8)], rows, tags=[{"n": n} for n in range(8)])
        self.client.claim("kept", "trainer", ["ids"], 3)
        self._zmq = zmq.Context()
        endpoints = {CONTROLLER: self.plane.address.endpoint, "unit": self.client.describe()["units"]["u0"]}
        self.peers = {name: self._connect(endpoint) for name, endpoint in endpoints.items()}
        self._before = self._stored()

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._zmq.destroy(linger=0)
        self._context.__exit__(None, None, None)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        peer = self._zmq.socket(zmq.DEALER)
        present(peer, self.plane.secret)
        peer.connect(endpoint)
        return peer

    def suffer(self, to: str, messages: Sequence[Frames]) -> None:
        """Send messages; each request in them that can be read must be answered."""
        expected: Counter[int] = Counter()
        for frames in messages:
            if frames:
                self.peers[to].send_multipart(frames)
                expected += _askers(frames)
        self.require_answers(self.peers[to], expected)

    def require_answers(self, peer: zmq.Socket[bytes], expected: Counter[int], seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while expected and peer.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            answers = decode_messages([memoryview(frame) for frame in peer.recv_multipart()])
            expected = expected - Counter(answer.id for answer in answers if isinstance(answer, Message))
        assert not expected, f"unanswered: {expected}"

    def check(self) -> None:
        """Both servers serve, and everything stored is as it was."""
        assert self._stored() == self._before, "what is stored has changed"

    def _stored(self) -> object:
        batch = self.client.get("kept", [f"k{n}" for n in range(8)], ["ids", "score"], partial=True)
        rows = [(key, row["ids"].tolist(), str(row["ids"].dtype), float(row["score"])) for key, row in batch.rows()]
        return batch.verdicts, rows, self.client.list("kept"), self.client.describe()["partitions"]["kept"]


def _askers(frames: Frames) -> Counter[int]:
    """The ids of the requests in a message that have to be answered at once."""
    try:
        messages = decode_messages([memoryview(frame) for frame in frames])
    except WireError:
        return Counter()
    ids = [
        message.details["id"] if isinstance(message, WireError) else message.id
        for message in messages
        if isinstance(message, WireError) or message.op not in PARKED
    ]
    return Counter(ids)


def hunt(seconds: float, seed: int) -> int:
    """Fuzz for so long; how many messages were sent. `AssertionError`, with the messages, when one hurt."""
    chance, sent, end = random.Random(seed), 0, time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as directory:
        messages, _ = record(Path(directory))
        os.chdir(directory)
        with Victim() as victim:
            while time.monotonic() < end:
                batch = [spoil(chance, chance.choice(messages).frames) for _ in range(32)]
                to = chance.choice((CONTROLLER, "unit"))
                try:
                    victim.suffer(to, batch)
                    victim.check()
                except Exception as error:
                    raise AssertionError(f"after {sent} messages, of these to the {to}: {batch!r}") from error
                sent += len(batch)
        os.chdir("/")
    return sent


def explore_decoder(seconds: float, seed: int) -> None:
    """Let atheris, which sees what code its inputs reach, look for frames that are neither read nor refused."""
    import atheris

    with tempfile.TemporaryDirectory() as directory:
        seeds = [recorded.frames for recorded in record(Path(directory))[0]]
    with atheris.instrument_imports():
        codec = importlib.reload(policies.codec)

    def one_input(data: bytes) -> None:
        source = atheris.FuzzedDataProvider(data)
        frames = list(seeds[source.ConsumeIntInRange(0, len(seeds) - 1)])
        frames[source.ConsumeIntInRange(0, len(frames) - 1)] = source.ConsumeBytes(source.remaining_bytes())
        with contextlib.suppress(WireError):
            for message in codec.decode_messages([memoryview(frame) for frame in frames]):
                if not isinstance(message, WireError):
                    codec.decode_columns(message.body.get("columns"), message.buffers)

    atheris.Setup([sys.argv[0], f"-max_total_time={int(seconds)}", f"-seed={seed}"], one_input)
    atheris.Fuzz()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--decoder", action="store_true", help="only the decoder, guided by coverage; needs atheris")
    options = parser.parse_args(arguments)
    print(f"seed {options.seed}", flush=True)
    if options.decoder:
        explore_decoder(options.seconds, options.seed)
    print(f"{hunt(options.seconds, options.seed)} spoilt messages, none of them hurt")


if __name__ == "__main__":
    main(sys.argv[1:])
