"""PatchedController: the actor that knows what exists, where it is and who has claimed it.

A thin shell around `policies.catalog.Catalog`: one loop thread receives, asks the catalog, sends. It touches no
tensor, and nothing ever waits inside it: a claim that cannot be answered is parked in the catalog and answered by the
publish that completes it or by its own deadline. Units are told of cleared rows in batches, and again until they have
answered.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgpack
from ray.util import get_node_ip_address

from actors.address import PlaneAddress
from actors.wire.connection import Connection, Outcome
from actors.wire.loop import Loop, Timer
from actors.wire.secret import Secret
from actors.wire.server import Request, Server
from policies.answers import Progress
from policies.blocks import Frees
from policies.catalog import Catalog
from policies.catalog_snapshot import restore_snapshot, take_snapshot
from policies.claims import ClaimAnswer, ClaimRequest, WaitRequest
from policies.config import PlaneConfig
from policies.deadlines import deadline_after
from policies.errors import CheckpointDamaged, Refused, RegraftError, error_to_plain
from policies.locations import UnitLocation, located_to_plain, publication_from_plain
from policies.operations import Ask
from policies.sampler_registry import SamplerRegistry
from policies.sampling import Sampler, SamplerSpec

logger = logging.getLogger(__name__)

FREE_TIMEOUT_S = 10.0
FREE_RETRY_S = 1.0


class PatchedController:
    """``host`` None binds to this node's own address. ``samplers``: users' own, by the name that claims give."""

    def __init__(
        self, host: str | None, secret: Secret, config: PlaneConfig, samplers: Mapping[str, type[Sampler]] | None = None
    ) -> None:
        self._secret, self._config = secret, config
        self._catalog = Catalog(config.strict_partitions, SamplerRegistry(samplers))
        self._parked: dict[str, Request] = {}
        self._expiry: Timer | None = None
        self._units: dict[str, Connection] = {}
        self._frees: defaultdict[str, list[tuple[int, list[int]]]] = defaultdict(list)
        self._freeing: set[str] = set()
        self._loop = Loop("controller")
        handlers: dict[str, Callable[[Request], None]] = {
            "units": self._list_units,
            "publish": self._publish,
            "locate": self._locate,
            "clear": self._clear,
            "drop_partition": self._drop_partition,
            "create_partition": self._create_partition,
            "tag": self._tag,
            "list": self._list,
            "claim": self._claim,
            "wait": self._wait,
            "give_back": self._give_back,
            "reset_task": self._reset_task,
            "consumed": self._consumed,
            "produced": self._produced,
            "describe": self._describe,
            "snapshot": self._snapshot,
            "restore": self._restore,
        }
        self._server = Server(self._loop, host or get_node_ip_address(), secret, handlers, config)
        self._loop.start()

    def address(self) -> PlaneAddress:
        config = self._config
        return PlaneAddress(self._server.endpoint, self._secret, config.request_timeout_s, config.transport)

    def config(self) -> PlaneConfig:
        """What the plane was launched with."""
        return self._config

    def register_units(self, locations: Mapping[str, UnitLocation]) -> None:
        """Take units into the plane: name → location."""
        self._loop.call_soon(lambda: self._register(locations))

    def close(self) -> None:
        self._loop.stop()

    def _register(self, locations: Mapping[str, UnitLocation]) -> None:
        for unit, location in locations.items():
            self._catalog.register_unit(unit, location)
            if unit in self._units:
                self._units[unit].close()
            self._units[unit] = Connection(self._loop, location.endpoint, self._secret, f"unit {unit}")

    def _list_units(self, request: Request) -> None:
        request.answer({"units": dict(self._catalog.units())})

    def _publish(self, request: Request) -> None:
        now = time.monotonic()
        outcomes: list[dict[str, Any] | None] = []
        for plain in request.body["publications"]:
            try:
                published = self._catalog.publish(publication_from_plain(plain), now)
            except RegraftError as refusal:
                outcomes.append(error_to_plain(refusal))
            else:
                outcomes.append(None)
                self._after(published.frees, published.woken)
        request.answer({"outcomes": outcomes})

    def _locate(self, request: Request) -> None:
        body = request.body
        fields = None if body["fields"] is None else [str(name) for name in body["fields"]]
        located = self._catalog.locate(str(body["partition"]), _strings(body["keys"]), fields)
        request.answer(located_to_plain(located))

    def _clear(self, request: Request) -> None:
        cleared = self._catalog.clear(str(request.body["partition"]), _strings(request.body["keys"]))
        request.answer({"removed": cleared.removed, "unknown": list(cleared.unknown)})
        self._after(cleared.frees, self._catalog.woken(str(request.body["partition"]), time.monotonic()))

    def _drop_partition(self, request: Request) -> None:
        cleared = self._catalog.drop_partition(str(request.body["partition"]))
        request.answer({"removed": cleared.removed})
        self._after(cleared.frees, cleared.woken)

    def _create_partition(self, request: Request) -> None:
        body = request.body
        self._catalog.create_partition(str(body["partition"]), body["fields"], body["expected_rows"])
        request.answer()

    def _tag(self, request: Request) -> None:
        body = request.body
        self._catalog.tag(str(body["partition"]), _strings(body["keys"]), body["tags"])
        request.answer()
        self._answer_parked(self._catalog.woken(str(body["partition"]), time.monotonic()))

    def _list(self, request: Request) -> None:
        keys = self._catalog.list_keys(str(request.body["partition"]), request.body["where"])
        request.answer({"keys": [[key, dict(tags)] for key, tags in keys]})

    def _claim(self, request: Request) -> None:
        body, now = request.body, time.monotonic()
        claim = ClaimRequest(
            str(body["claim_id"]),
            str(body["partition"]),
            str(body["task"]),
            tuple(_strings(body["fields"])),
            int(body["count"]),
            deadline_after(now, float(body["timeout"])),
            SamplerSpec.from_plain(body["sampler"]),
            None if body["rank"] is None else int(body["rank"]),
            None if body["oldest_version"] is None else float(body["oldest_version"]),
        )
        try:
            self._park_or_answer(claim.claim_id, request, self._catalog.claim(claim, now))
        finally:
            self._answer_parked(self._catalog.woken(claim.partition, now))

    def _wait(self, request: Request) -> None:
        body, now = request.body, time.monotonic()
        wait = WaitRequest(
            str(body["wait_id"]),
            str(body["partition"]),
            tuple(_strings(body["keys"])),
            tuple(_strings(body["fields"])),
            deadline_after(now, float(body["timeout"])),
        )
        self._park_or_answer(wait.wait_id, request, self._catalog.wait(wait, now))

    def _park_or_answer(self, claim_id: str, request: Request, answer: ClaimAnswer | None) -> None:
        self._parked[claim_id] = request
        if answer is not None:
            self._answer_parked([answer])
        self._plan_expiry()

    def _answer_parked(self, answers: Sequence[ClaimAnswer]) -> None:
        for answer in answers:
            request = self._parked.pop(answer.claim_id, None)
            if request is None:
                continue
            if answer.error is not None:
                request.fail(answer.error)
            else:
                request.answer(_answer_to_plain(answer), undelivered=partial(self._take_back, answer.claim_id))

    def _give_back(self, request: Request) -> None:
        request_id = str(request.body["request_id"])
        self._parked.pop(request_id, None)
        self._take_back(request_id)
        request.answer()

    def _take_back(self, request_id: str) -> None:
        """Whoever asked has left; the rows may go to others, also to those parked now."""
        woken = self._catalog.give_back(request_id, time.monotonic())
        self._loop.call_soon(lambda: self._answer_parked(woken))
        self._plan_expiry()

    def _reset_task(self, request: Request) -> None:
        woken = self._catalog.reset_task(str(request.body["partition"]), str(request.body["task"]), time.monotonic())
        request.answer()
        self._answer_parked(woken)

    def _consumed(self, request: Request) -> None:
        request.answer(_progress(self._catalog.consumed(str(request.body["partition"]), str(request.body["task"]))))

    def _produced(self, request: Request) -> None:
        request.answer(_progress(self._catalog.produced(str(request.body["partition"]))))

    def _plan_expiry(self) -> None:
        """Have the catalog look at its deadlines when the next one is due."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        due = self._catalog.next_deadline()
        if due is not None:
            self._expiry = self._loop.call_later(max(0.0, due - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._answer_parked(self._catalog.expire(time.monotonic()))
        self._plan_expiry()

    def _after(self, frees: Frees, woken: Sequence[ClaimAnswer]) -> None:
        """Carry out what an operation asks for beyond its own answer."""
        if woken:
            self._answer_parked(woken)
        for unit, blocks in frees.items():
            self._frees[unit] += blocks
            self._tell_unit(unit)

    def _tell_unit(self, unit: str) -> None:
        connection = self._units.get(unit)
        if unit in self._freeing or not self._frees[unit] or connection is None:
            return
        frees, self._frees[unit] = self._frees[unit], []
        self._freeing.add(unit)

        def told(outcome: Outcome) -> None:
            self._freeing.discard(unit)
            if isinstance(outcome, RegraftError):
                logger.warning("unit %s was not told of %d cleared blocks: %s", unit, len(frees), outcome.message)
                self._frees[unit] = frees + self._frees[unit]
                self._loop.call_later(FREE_RETRY_S, lambda: self._tell_unit(unit))
            else:
                self._tell_unit(unit)

        connection.request(Ask(unit, "free", {"frees": frees}), FREE_TIMEOUT_S, told)

    def _describe(self, request: Request) -> None:
        request.answer(
            {
                **self._catalog.describe(),
                "peers_refused": self._server.refused,
                "answers_dropped": self._server.answers_dropped,
                "requests_refused": self._server.requests_refused,
                "parked": len(self._parked),
                "traffic": self._server.traffic.to_plain(time.perf_counter()),
            }
        )

    def _snapshot(self, request: Request) -> None:
        """All state at this moment as one buffer, and the blocks it needs by unit."""
        blocks: defaultdict[str, list[int]] = defaultdict(list)
        for block in self._catalog.blocks.blocks():
            blocks[block.unit].append(block.id)
        request.answer({"blocks": dict(blocks)}, [msgpack.packb(take_snapshot(self._catalog))])

    def _restore(self, request: Request) -> None:
        """Take over a saved state whose blocks the units named in ``blocks`` have loaded."""
        if self._catalog.partitions:
            raise Refused(
                f"the plane already holds partitions {sorted(self._catalog.partitions)}; restore into a new one"
            )
        try:
            plain = msgpack.unpackb(request.message.buffers[0], strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise CheckpointDamaged(f"the saved controller state cannot be read: {error}") from None
        restored = restore_snapshot(
            plain,
            {int(b): str(u) for b, u in request.body["blocks"].items()},
            self._catalog.strict,
            self._catalog.samplers,
        )
        for unit, location in self._catalog.units().items():
            restored.register_unit(unit, location)
        self._catalog = restored
        request.answer()


def _answer_to_plain(answer: ClaimAnswer) -> dict[str, Any]:
    return {
        "keys": answer.keys,
        "skipped": answer.skipped,
        "parts": answer.parts,
        "timed_out": answer.timed_out,
        "found": answer.found,
    }


def _progress(progress: Progress) -> dict[str, Any]:
    return {"rows": progress.rows, "expected": progress.expected}


def _strings(values: Sequence[Any]) -> list[str]:
    return [str(value) for value in values]
