"""A job driver without a job: it emits the events of two lives and leaves processes behind that do not want to die.

    python -m tests.fake_driver [--mode MODE] [--step SECONDS] first|second --plan PLAN.json

Its rows are made of arithmetic; the reference and the recovered ones are equal unless the mode says otherwise. In the
first life it starts a process that ignores SIGTERM and one that has left its parent; their ids are written into the
directory of the plan as ``stubborn.pids``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from recipes.prefix_recovery import events
from recipes.prefix_recovery.plan import Plan, PlannedCall

MODES = (
    "good", "mismatch", "missing", "refuse", "malformed", "dies", "error", "second_dies", "hang", "other_model",
    "ends_after_checkpoint",
)  # fmt: skip

STUBBORN = """
import os, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if sys.argv[1] == "leave" and os.fork():
    os._exit(0)
if sys.argv[1] == "leave":
    os.setsid()
print(os.getpid(), flush=True)
while True:
    time.sleep(1)
"""


def stubborn(how: str) -> int:
    """Start a process that ignores everything but SIGKILL; ``leave`` has no living parent. Returns its id."""
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, how], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return int(process.stdout.readline())


def length(plan: Plan, index: int) -> int:
    """Tokens of a whole call: the first ends early, the others at the limit."""
    return plan.max_tokens - (2 if index == 0 else 0)


def row(plan: Plan, index: int) -> dict[str, np.ndarray]:
    call, tokens = plan.calls[index], length(plan, index)
    ids = (np.arange(tokens) * 31 + call.seed * 7).astype(np.int32)
    return {f"{call.id}/ids": ids, f"{call.id}/logprobs": (-np.sqrt(ids + 1.0)).astype(np.float32)}


def save(plan: Plan, path: str, mode: str) -> None:
    tensors: dict[str, np.ndarray] = {}
    for index in range(len(plan.calls)):
        tensors.update(row(plan, index))
    last = plan.calls[-1].id
    if mode == "mismatch":
        tensors[f"{last}/ids"][-1] += 1
    if mode == "missing":
        del tensors[f"{last}/ids"], tensors[f"{last}/logprobs"]
    save_file(tensors, path, {"fingerprint": "another" if mode == "other_model" else plan.engine})


class Generation:
    """Emits one step of every leader after the other, as fast as asked for."""

    def __init__(self, plan: Plan, phase: str, counts: dict[str, int], step: float) -> None:
        self.plan, self.phase, self.counts, self.step = plan, phase, counts, step

    def advance(self, until: int) -> None:
        """Generate until every call has ``until`` tokens or has ended."""
        while any(self._wants(i, call, until) for i, call in enumerate(self.plan.calls)):
            began = time.time()
            time.sleep(self.step)
            for leader in range(self.plan.leaders):
                self._step(leader, until, began)

    def _wants(self, index: int, call: PlannedCall, until: int) -> bool:
        return self.counts[call.id] < min(until, length(self.plan, index))

    def _step(self, leader: int, until: int, began: float) -> None:
        new = {}
        for index, call in list(enumerate(self.plan.calls))[leader :: self.plan.leaders]:
            if self._wants(index, call, until):
                new[call.id] = 1
                self.counts[call.id] += 1
        if new:
            events.emit(events.Tokens(phase=self.phase, leader=leader, steps=[[began, time.time(), new]]))
        for index, call in enumerate(self.plan.calls):
            if call.id in new and self.counts[call.id] == length(self.plan, index):
                tokens, reason = self.counts[call.id], "stop" if index == 0 else "length"
                events.emit(
                    events.Finished(phase=self.phase, call=call.id, tokens=tokens, reason=reason, at=time.time())
                )


def start(plan: Plan, step: float) -> None:
    events.emit(events.Cluster(seconds=0.1, processes=3))
    for leader in range(plan.leaders):
        time.sleep(step * 4)
        events.emit(events.EngineReady(leader=leader, seconds=step * 4 * (leader + 1)))


def first(plan: Plan, directory: Path, mode: str, step: float) -> None:
    pids = [stubborn("stay"), stubborn("leave"), os.getpid()]
    (directory / "stubborn.pids").write_text(" ".join(map(str, pids)))
    if mode == "hang":
        time.sleep(600)
    if mode == "malformed":
        print("(raylet) a worker died", flush=True)
    if mode == "error":
        events.emit(events.Error(message="every call had ended before it could be cut", kind="NothingToCut"))
        sys.exit(1)
    if mode == "dies":
        sys.exit("the engine ran out of memory")
    start(plan, step)
    events.emit(events.Phase(name="reference", state="start"))
    Generation(plan, "reference", {call.id: 0 for call in plan.calls}, step).advance(plan.max_tokens)
    events.emit(events.Phase(name="reference", state="end"))
    save(plan, plan.reference, "good")
    events.emit(events.Phase(name="cut", state="start"))
    generation = Generation(plan, "cut", {call.id: 0 for call in plan.calls}, step)
    for number in range(plan.cuts):
        generation.advance(plan.cut_after + number * plan.cut_gap)
        cut(plan, number, generation.counts)
    checkpoint(plan, generation.counts)
    if mode == "ends_after_checkpoint":
        sys.exit(5)
    generation.advance(plan.max_tokens)
    time.sleep(600)


def cut(plan: Plan, number: int, counts: dict[str, int]) -> None:
    began = time.time()
    events.emit(
        events.Cut(
            index=number,
            began=began,
            ended=began + 0.001,
            durable=len(counts),
            failures={},
            numbers={"puts": plan.leaders, "rows": len(counts), "freeze_s": 0.0002},
            prefix_tokens=dict(counts),
        )
    )


def checkpoint(plan: Plan, counts: dict[str, int]) -> None:
    path = Path(plan.checkpoints) / "checkpoint-00000001"
    path.mkdir(parents=True)
    (path / "counts").write_text(events.to_json(counts))
    events.emit(events.Checkpoint(path=str(path), seconds=0.01, bytes=4096, at=time.time()))


def second(plan: Plan, mode: str, step: float) -> None:
    if mode == "second_dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    events.emit(events.Cluster(seconds=0.1, processes=3))
    counts = {call.id: plan.cut_after + (plan.cuts - 1) * plan.cut_gap for call in plan.calls}
    events.emit(events.Restored(seconds=0.02, rows=plan.cuts * len(counts)))
    events.emit(events.Phase(name="resume", state="start"))
    for call, tokens in list(counts.items()):
        if mode == "refuse" and call == plan.calls[0].id:
            events.emit(events.Refused(call=call, reason="digest"))
            counts[call] = 0
        else:
            events.emit(events.Chain(call=call, tokens=tokens, at=time.time(), keys=plan.cuts))
    start(plan, step)
    Generation(plan, "resume", counts, step).advance(plan.max_tokens)
    events.emit(events.Phase(name="resume", state="end"))
    save(plan, plan.rows, mode)
    events.emit(events.Statistics(get_calls=2, versions={"ray": "0.0-fake"}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="good")
    parser.add_argument("--step", type=float, default=0.002)
    parser.add_argument("life", choices=("first", "second"))
    parser.add_argument("--plan", type=Path, required=True)
    given = parser.parse_args()
    plan = Plan.read(given.plan)
    if given.life == "first":
        first(plan, given.plan.parent, given.mode, given.step)
    else:
        second(plan, given.mode, given.step)


if __name__ == "__main__":
    main()
