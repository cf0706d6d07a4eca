"""What a client does for each of its operations, without doing any of it.

An operation is a generator: it yields the `Ask`s that may go out together, is sent one outcome for each of them (a
`Message` or an error), and returns its result. Whoever drives it owns sockets, deadlines and retries, so the sync and
the asyncio client share every line of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED, Batch, Claim, Progress, PutAck, Told
from policies.checksums import block_checksum
from policies.codec import Buffer, Message, encode_columns, pack_ints, unpack_ints
from policies.columns import Column, require_plain
from policies.errors import (
    CapacityExceeded,
    ReferenceUnavailable,
    Refused,
    RegraftError,
    RequestTimeout,
    Unreachable,
    WireError,
)
from policies.locations import Located, Read, UnitLocation, located_from_plain
from policies.placement import RoundRobin
from policies.reading import Reading
from policies.sampling import SamplerSpec
from policies.transport import Transport

CONTROLLER = "controller"
GIVE_BACK_S = 1.0
"""How long a caller waits to hear that its request was taken back. It is sent whether or not it hears."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to ``peer`` (`CONTROLLER` or a unit's name).

    ``repeatable``: asking twice does what asking once does, so a lost answer may be asked for again.
    ``patience_s``: seconds the peer may keep the request parked, on top of the operation's timeout. ``heard`` is called
    with the outcome as soon as it is there, whatever becomes of the asks that went out with this one. ``by_reference``:
    its buffers, or those of its answer, travel as objects of Ray's store (to a unit only).
    """

    peer: str
    op: str
    body: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[Buffer] = ()
    repeatable: bool = True
    patience_s: float = 0.0
    heard: Callable[[Outcome], None] | None = field(default=None, compare=False)
    by_reference: bool = False


T = TypeVar("T")
Outcome = Message | RegraftError
Operation = Generator[list[Ask], list[Outcome], T]


def ask_one(ask: Ask) -> Operation[Message]:
    """The answer to one ask; its error is raised."""
    (outcome,) = yield [ask]
    if isinstance(outcome, RegraftError):
        raise outcome
    return outcome


def ask_body(ask: Ask) -> Operation[Mapping[str, Any]]:
    answer = yield from ask_one(ask)
    return answer.body


def require_timeout(seconds: float) -> None:
    """Raise `Refused` for what is no duration; infinity is one."""
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise Refused(f"a timeout of {seconds!r} s; give seconds, 0 or more")


def _name(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{what} must be a string, not {type(value).__name__}: {value!r}")
    return value


def _names(what: str, values: Sequence[str]) -> list[str]:
    """The strings as a list of their own. A single string is refused: it would be read as its letters."""
    if isinstance(values, str | bytes):
        raise Refused(f"{what}s must be a list of strings, not {type(values).__name__}: {values!r}")
    names = list(values)
    for value in names:
        if not isinstance(value, str):
            raise Refused(f"{what} must be a string, not {type(value).__name__}: {value!r}")
    return names


def _tags(tags: Sequence[Mapping[str, Any] | None], keys: Sequence[str]) -> list[dict[str, Any] | None]:
    """The tags as plain data; `Refused` names the key whose tags would not arrive as they are."""
    if len(tags) != len(keys):
        raise Refused(f"{len(tags)} tags for {len(keys)} keys")
    plain: list[dict[str, Any] | None] = []
    for key, given in zip(keys, tags, strict=True):
        if given is not None and not isinstance(given, Mapping):
            raise Refused(f"the tags of key {key!r} must be a mapping or None, not {given!r}", key=key)
        plain.append(None if given is None else dict(given))
        try:
            require_plain(plain[-1])
        except WireError as error:
            raise Refused(f"the tags of key {key!r}: {error.message}", key=key) from None
    return plain


class Routes:
    """The units a client knows of; filled from the controller when needed. Units that are ``down`` get no new rows
    while another one is up. ``transport`` decides how bytes travel between here and each of them."""

    def __init__(self, placement: RoundRobin, transport: Transport) -> None:
        self.units: dict[str, UnitLocation] = {}
        self.down: set[str] = set()
        self.transport = transport
        self._placement = placement

    def learn(self) -> Operation[None]:
        body = yield from ask_body(Ask(CONTROLLER, "units"))
        self.units = {str(name): UnitLocation(*location) for name, location in body["units"].items()}
        self.down &= self.units.keys()

    def place(self, full: Collection[str] = ()) -> Operation[str | None]:
        """The unit for the next put; None when all of them are ``full``."""
        if not self.units:
            yield from self.learn()
        if not self.units:
            raise Refused("the plane has no storage unit; it is still starting or was closed")
        open_to_it = self.units.keys() - set(full)
        choice = sorted(open_to_it - self.down) or sorted(open_to_it)
        return self._placement.choose(choice) if choice else None

    def require(self, units: Sequence[str]) -> Operation[None]:
        """Make sure that the endpoints of ``units`` are known."""
        if any(unit not in self.units for unit in units):
            yield from self.learn()
        lost = [unit for unit in units if unit not in self.units]
        if lost:
            raise WireError(f"the controller places rows on {lost}, which it does not list as units")


def ask_all(routes: Routes, asks: Sequence[Ask]) -> Operation[list[Message]]:
    """The answers to asks that go out together; the first error among them is raised once all have ended."""
    yield from routes.require([ask.peer for ask in asks if ask.peer != CONTROLLER])
    answers = []
    for outcome in (yield list(asks)):
        if isinstance(outcome, RegraftError):
            raise outcome
        answers.append(outcome)
    return answers


def put(
    routes: Routes,
    partition: str,
    keys: Sequence[str],
    columns: Mapping[str, Column],
    tags: Sequence[Mapping[str, Any] | None] | None,
    batch_id: str,
) -> Operation[PutAck]:
    """Store one block and publish it. A batch id that was applied already is acknowledged again, not applied again.

    The unit refuses the put when its bytes are not those of ``columns`` at this moment: buffers leave without a copy,
    and a caller that was told of a timeout may write to its arrays while they are still on their way.
    """
    keys = _names("key", keys)
    for name, column in columns.items():
        if column.rows != len(keys):
            raise Refused(f"field {name!r} has {column.rows} rows for {len(keys)} keys", field=name)
    plain_tags = None if tags is None else _tags(tags, keys)
    checksum = block_checksum({_name("field", name): column for name, column in columns.items()})
    buffers: list[Buffer] = []
    body = {
        "batch_id": batch_id,
        "partition": _name("partition", partition),
        "keys": keys,
        "columns": encode_columns(columns, buffers),
        "tags": plain_tags,
        "checksum": checksum,
    }
    unit, answer = yield from _put_somewhere(routes, body, buffers, sum(c.nbytes for c in columns.values()))
    return PutAck(
        unit=unit,
        block=answer["block"],
        keys=tuple(answer["keys"]),
        row_bytes=tuple(unpack_ints(answer["row_bytes"]).tolist()),
        checksum=answer["checksum"],
    )


def _put_somewhere(
    routes: Routes, body: Mapping[str, Any], buffers: Sequence[Buffer], nbytes: int
) -> Operation[tuple[str, Mapping[str, Any]]]:
    """The unit that took the put, and its answer: the next one in turn that is not full."""
    full: dict[str, CapacityExceeded] = {}
    while (unit := (yield from routes.place(full))) is not None:
        by_reference = routes.transport.put_by_reference(nbytes, unit, routes.units[unit].node)
        (outcome,) = yield [Ask(unit, "put", body, buffers, by_reference=by_reference)]
        if isinstance(outcome, ReferenceUnavailable):
            routes.transport.learn_room(unit, 0)
            (outcome,) = yield [Ask(unit, "put", body, buffers)]
        if isinstance(outcome, CapacityExceeded):
            full[unit] = outcome
        elif isinstance(outcome, RegraftError):
            raise outcome
        else:
            routes.transport.learn_room(unit, outcome.body["room"])
            return unit, outcome.body
    raise next(iter(full.values()))


def get(
    routes: Routes,
    partition: str,
    keys: Sequence[str],
    fields: Sequence[str] | None,
    avoid: Collection[str] = (),
    tell: Callable[[Told], None] | None = None,
) -> Operation[Batch]:
    """Read rows: one lookup, then one request per unit, all at once. Keys that moved meanwhile are looked up again.

    Units to ``avoid`` are not asked; their keys end as unreachable. With ``tell``, it is told where the keys are before
    they are asked for, and the rows of each unit as soon as they are there; the result holds what was not told.
    """
    keys = _names("key", keys)
    located = yield from _locate(partition, keys, fields)
    reading = Reading(keys, located, tell)
    yield from _read(routes, reading, located, np.arange(len(keys)), avoid)
    moved = reading.rows_with(CLEARED)
    if len(moved):
        again = yield from _locate(partition, [keys[i] for i in moved], located.fields)
        reading.relocate(moved, again)
        yield from _read(routes, reading, again, moved, avoid)
    return reading.rest()


def _locate(partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> Operation[Located]:
    body = {
        "partition": _name("partition", partition),
        "keys": list(keys),
        "fields": None if fields is None else _names("field", fields),
    }
    answer = yield from ask_body(Ask(CONTROLLER, "locate", body))
    return located_from_plain(answer)


def _read(
    routes: Routes, reading: Reading, located: Located, asked: NDArray[np.int64], avoid: Collection[str]
) -> Operation[None]:
    """Send the reads of ``located``, whose row i is row ``asked[i]`` of the whole reading."""
    per_unit: dict[str, list[Read]] = defaultdict(list)
    for read in located.reads:
        per_unit[read.unit].append(read._replace(rows=asked[read.rows].tolist()))
    yield from routes.require(list(per_unit))
    reading.expect(per_unit)
    for unit in per_unit.keys() & set(avoid):
        reading.heard(unit, per_unit.pop(unit), Unreachable("not asked, since the caller avoids it"))
    yield from _ask_reads(reading, per_unit, lambda unit: {"borrows": routes.transport.shares(routes.units[unit].node)})
    borrowed = reading.take_borrowed()
    if borrowed:
        yield [
            Ask(unit, "lend", {"blocks": [read.block for read in reads]}, heard=partial(reading.lent, unit, reads),
                by_reference=True)
            for unit, reads in borrowed.items()
        ]  # fmt: skip
        unlent = reading.take_borrowed()
        yield from _ask_reads(reading, unlent, lambda unit: {"unlent": [read.block for read in unlent[unit]]})


def _ask_reads(
    reading: Reading, reads: Mapping[str, Sequence[Read]], more: Callable[[str], Mapping[str, Any]]
) -> Operation[None]:
    if reads:
        yield [
            Ask(
                unit,
                "get",
                {"reads": list(map(_plain_read, of_unit)), **more(unit)},
                heard=partial(reading.heard, unit, of_unit),
            )
            for unit, of_unit in reads.items()
        ]


def _plain_read(read: Read) -> dict[str, Any]:
    positions = pack_ints(np.array(read.positions, np.int64))
    return {"block": read.block, "fields": list(read.fields), "positions": positions}


def clear(partition: str, keys: Sequence[str]) -> Operation[int]:
    """Clear keys; those that do not exist are no error. The number of rows that went."""
    body = yield from ask_body(Ask(CONTROLLER, "clear", _rows(partition, keys)))
    return int(body["removed"])


def _rows(partition: str, keys: Sequence[str]) -> dict[str, Any]:
    return {"partition": _name("partition", partition), "keys": _names("key", keys)}


def list_keys(partition: str, where: Mapping[str, Any] | None) -> Operation[list[tuple[str, dict[str, Any]]]]:
    body = yield from ask_body(Ask(CONTROLLER, "list", {"partition": _name("partition", partition), "where": where}))
    return [(str(key), dict(tags)) for key, tags in body["keys"]]


def tag(partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> Operation[None]:
    body = _rows(partition, keys)
    yield from ask_one(Ask(CONTROLLER, "tag", {**body, "tags": [t or {} for t in _tags(tags, body["keys"])]}))


def claim(
    partition: str,
    task: str,
    fields: Sequence[str],
    count: int,
    sampler: SamplerSpec,
    rank: int | None,
    oldest_version: float | None,
    timeout: float,
    claim_id: str,
) -> Operation[Claim]:
    """``count`` ready rows that ``task`` has not claimed before; waits for them up to ``timeout`` seconds.

    Raises `RequestTimeout` when they did not come; then nothing was claimed. A claim whose answer is lost, or that its
    caller abandons, is given back.
    """
    require_timeout(timeout)
    if not isinstance(sampler, SamplerSpec):
        raise Refused(f"a sampler must be a SamplerSpec (see policies.sampling), not {sampler!r}")
    body = {
        "partition": _name("partition", partition),
        "task": _name("task", task),
        "fields": _names("field", fields),
        "count": _number("count", count, int),
        "sampler": sampler.to_plain(),
        "rank": None if rank is None else _number("rank", rank, int),
        "oldest_version": None if oldest_version is None else _number("oldest_version", oldest_version, int, float),
        "timeout": timeout,
        "claim_id": claim_id,
    }
    answer = yield from _parked("claim", body, claim_id)
    if answer["timed_out"]:
        raise RequestTimeout(
            f"task {task!r} asked for {count} rows of partition {partition!r} with fields {list(fields)} and "
            f"{timeout:g} s passed without them; nothing was claimed. Found: {answer['found']}"
        )
    keys = tuple(map(str, answer["keys"]))
    parts = answer["parts"] or [range(len(keys))]
    return Claim(keys, {str(key): str(reason) for key, reason in answer["skipped"]}, tuple(map(tuple, parts)))


def _number(what: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise Refused(f"{what} must be a number ({' or '.join(kind.__name__ for kind in kinds)}), not {value!r}")
    return value


def reset_task(partition: str, task: str) -> Operation[None]:
    """Let the task claim all rows afresh."""
    yield from ask_one(Ask(CONTROLLER, "reset_task", _task(partition, task), repeatable=False))


def consumed(partition: str, task: str) -> Operation[Progress]:
    return _progress((yield from ask_body(Ask(CONTROLLER, "consumed", _task(partition, task)))))


def produced(partition: str) -> Operation[Progress]:
    return _progress((yield from ask_body(Ask(CONTROLLER, "produced", {"partition": _name("partition", partition)}))))


def _task(partition: str, task: str) -> dict[str, Any]:
    return {"partition": _name("partition", partition), "task": _name("task", task)}


def _progress(body: Mapping[str, Any]) -> Progress:
    return Progress(int(body["rows"]), None if body["expected"] is None else int(body["expected"]))


def wait(partition: str, keys: Sequence[str], fields: Sequence[str], timeout: float, wait_id: str) -> Operation[None]:
    """Return when all ``keys`` have all ``fields``; `RequestTimeout` when that takes longer than ``timeout``."""
    require_timeout(timeout)
    body = {**_rows(partition, keys), "fields": _names("field", fields), "timeout": timeout, "wait_id": wait_id}
    answer = yield from _parked("wait", body, wait_id)
    if answer["timed_out"]:
        raise RequestTimeout(
            f"waited {timeout:g} s for fields {list(fields)} of {len(keys)} keys of partition {partition!r}. Found: "
            f"{answer['found']}"
        )


def _parked(op: str, body: Mapping[str, Any], request_id: str) -> Operation[Mapping[str, Any]]:
    """The answer to a request that the controller may park. Whoever goes without the answer takes the request back,
    so that no row is claimed for nobody."""
    (outcome,) = yield [Ask(CONTROLLER, op, body, patience_s=body["timeout"])]
    if isinstance(outcome, Unreachable):
        back = {"request_id": request_id}
        yield [Ask(CONTROLLER, "give_back", back, repeatable=False, patience_s=GIVE_BACK_S)]
    if isinstance(outcome, RegraftError):
        raise outcome
    return outcome.body


def create_partition(partition: str, fields: Mapping[str, str] | None, expected_rows: int | None) -> Operation[None]:
    body = {"partition": partition, "fields": fields, "expected_rows": expected_rows}
    yield from ask_one(Ask(CONTROLLER, "create_partition", body))


def drop_partition(partition: str) -> Operation[int]:
    body = yield from ask_body(Ask(CONTROLLER, "drop_partition", {"partition": _name("partition", partition)}))
    return int(body["removed"])


def describe() -> Operation[Mapping[str, Any]]:
    """What the plane holds: partitions, fields, counts, tasks, blocks per unit."""
    return (yield from ask_body(Ask(CONTROLLER, "describe")))
