"""What a client does for each of its operations, without doing any of it.

An operation is a generator: it yields the `Ask`s that may go out together, is sent one outcome for each of them (a
`Message` or an error), and returns its result. Whoever drives it owns sockets, deadlines and retries, so the sync and
the asyncio client share every line of this.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from policies.answers import CLEARED, MISSING, OK, UNREACHABLE, Batch, PutAck
from policies.checksums import block_checksum
from policies.codec import Buffer, Message, decode_columns, encode_columns, pack_ints, unpack_ints
from policies.columns import Column, require_plain
from policies.errors import Refused, RegraftError, RequestTimeout, Unreachable, WireError
from policies.locations import Located, located_from_plain
from policies.placement import RoundRobin

CONTROLLER = "controller"
GIVE_BACK_S = 1.0
"""How long a caller waits to hear that its request was taken back. It is sent whether or not it hears."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to ``peer`` (`CONTROLLER` or a unit's name).

    ``repeatable``: asking twice does what asking once does, so a lost answer may be asked for again.
    ``patience_s``: seconds the peer may keep the request parked, on top of the operation's timeout.
    """

    peer: str
    op: str
    body: Mapping[str, Any] = field(default_factory=dict)
    buffers: Sequence[Buffer] = ()
    repeatable: bool = True
    patience_s: float = 0.0


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
    """The units a client knows of, name → endpoint; filled from the controller when needed."""

    def __init__(self, placement: RoundRobin) -> None:
        self.endpoints: dict[str, str] = {}
        self._placement = placement

    def learn(self) -> Operation[None]:
        body = yield from ask_body(Ask(CONTROLLER, "units"))
        self.endpoints = {str(name): str(endpoint) for name, endpoint in body["units"].items()}

    def place(self) -> Operation[str]:
        """The unit for the next put."""
        if not self.endpoints:
            yield from self.learn()
        if not self.endpoints:
            raise Refused("the plane has no storage unit; it is still starting or was closed")
        return self._placement.choose(sorted(self.endpoints))

    def require(self, units: Sequence[str]) -> Operation[None]:
        """Make sure that the endpoints of ``units`` are known."""
        if any(unit not in self.endpoints for unit in units):
            yield from self.learn()
        lost = [unit for unit in units if unit not in self.endpoints]
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
    unit = yield from routes.place()
    buffers: list[Buffer] = []
    body = {
        "batch_id": batch_id,
        "partition": _name("partition", partition),
        "keys": keys,
        "columns": encode_columns(columns, buffers),
        "tags": plain_tags,
        "checksum": checksum,
    }
    answer = yield from ask_body(Ask(unit, "put", body, buffers))
    return PutAck(
        unit=unit,
        block=answer["block"],
        keys=tuple(answer["keys"]),
        row_bytes=tuple(unpack_ints(answer["row_bytes"]).tolist()),
        checksum=answer["checksum"],
    )


def get(routes: Routes, partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> Operation[Batch]:
    """Read rows: one lookup, then one request per unit, all at once. Keys that moved meanwhile are looked up again."""
    keys = _names("key", keys)
    located = yield from _locate(partition, keys, fields)
    reading = _Reading(keys, located)
    yield from _read(routes, reading, located, np.arange(len(keys)))
    moved = reading.rows_with(CLEARED)
    if len(moved):
        again = yield from _locate(partition, [keys[i] for i in moved], located.fields)
        reading.relocate(moved, again)
        yield from _read(routes, reading, again, moved)
    return reading.batch()


def _locate(partition: str, keys: Sequence[str], fields: Sequence[str] | None) -> Operation[Located]:
    body = {
        "partition": _name("partition", partition),
        "keys": list(keys),
        "fields": None if fields is None else _names("field", fields),
    }
    answer = yield from ask_body(Ask(CONTROLLER, "locate", body))
    return located_from_plain(answer)


def _read(routes: Routes, reading: _Reading, located: Located, asked: NDArray[np.int64]) -> Operation[None]:
    """Send the reads of ``located``, whose row i is row ``asked[i]`` of the whole reading."""
    per_unit: dict[str, list[int]] = defaultdict(list)
    for index, read in enumerate(located.reads):
        per_unit[read.unit].append(index)
    yield from routes.require(list(per_unit))
    asks = [
        Ask(
            unit,
            "get",
            {
                "reads": [
                    {
                        "block": located.reads[i].block,
                        "fields": list(located.reads[i].fields),
                        "positions": pack_ints(np.array(located.reads[i].positions, np.int64)),
                    }
                    for i in indices
                ]
            },
        )
        for unit, indices in per_unit.items()
    ]
    if not asks:
        return
    outcomes = yield asks
    for (unit, indices), outcome in zip(per_unit.items(), outcomes, strict=True):
        rows = [asked[located.reads[i].rows] for i in indices]
        if isinstance(outcome, RegraftError):
            for affected in rows:
                reading.fail(affected, UNREACHABLE, f"{type(outcome).__name__}: {outcome.message}", unit)
            continue
        parts = outcome.body["parts"]
        if len(parts) != len(indices):
            raise WireError(f"unit {unit!r} answered {len(parts)} of {len(indices)} reads")
        for affected, part in zip(rows, parts, strict=True):
            reading.add(affected, part, outcome.buffers, unit)


class _Reading:
    """The rows of one get while they come in."""

    def __init__(self, keys: Sequence[str], located: Located) -> None:
        self._keys = tuple(keys)
        self._fields = located.fields
        self._verdicts = list(located.verdicts)
        self._causes = dict(located.causes)
        self._parts: dict[str, list[tuple[NDArray[np.int64], Column]]] = {name: [] for name in located.fields}

    def rows_with(self, verdict: str) -> NDArray[np.int64]:
        return np.array([i for i, v in enumerate(self._verdicts) if v == verdict], np.int64)

    def relocate(self, rows: NDArray[np.int64], located: Located) -> None:
        """Take over the second lookup of ``rows``; one that is missing now was cleared while the get was under way."""
        gone = np.zeros(len(self._keys), bool)
        gone[rows] = True
        for name, parts in self._parts.items():
            self._parts[name] = [(r[~gone[r]], c.take(np.flatnonzero(~gone[r]))) for r, c in parts]
        for row, verdict in zip(rows.tolist(), located.verdicts, strict=True):
            self._verdicts[row] = CLEARED if verdict == MISSING else verdict

    def fail(self, rows: NDArray[np.int64], verdict: str, cause: str, unit: str) -> None:
        for row in rows.tolist():
            self._verdicts[row] = verdict
            self._causes[self._keys[row]] = f"unit {unit}: {cause}"

    def add(self, rows: NDArray[np.int64], part: Mapping[str, Any], buffers: Sequence[Buffer], unit: str) -> None:
        """One answered read: ``bad`` lists [index, verdict, cause] of its rows, ``columns`` hold all others."""
        good = np.ones(len(rows), bool)
        for index, verdict, cause in part["bad"]:
            good[index] = False
            self.fail(rows[index : index + 1], verdict, cause, unit)
        columns = decode_columns(part["columns"], buffers)
        for name, column in columns.items():
            if name not in self._parts or column.rows != int(good.sum()):
                raise WireError(f"unit {unit!r} answered field {name!r} with {column.rows} rows for {int(good.sum())}")
            self._parts[name].append((rows[good], column))

    def batch(self) -> Batch:
        ok = np.array([verdict == OK for verdict in self._verdicts], bool)
        columns = {}
        for name in self._fields:
            column = _in_order(self._parts[name], ok)
            if column is not None:
                columns[name] = column
        return Batch(self._keys, tuple(self._verdicts), columns, self._causes)


def _in_order(parts: Sequence[tuple[NDArray[np.int64], Column]], ok: NDArray[np.bool_]) -> Column | None:
    """The rows of all parts that are ok, in the order in which they were asked; None when there are none."""
    kept = []
    for rows, column in parts:
        wanted = ok[rows]
        if wanted.any():
            kept.append((rows, column) if wanted.all() else (rows[wanted], column.take(np.flatnonzero(wanted))))
    if not kept:
        return None
    rows, column = np.concatenate([r for r, _ in kept]), Column.concat([c for _, c in kept])
    order = np.argsort(rows, kind="stable")
    return column.take(order)


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
    partition: str, task: str, fields: Sequence[str], count: int, timeout: float, claim_id: str
) -> Operation[list[str]]:
    """``count`` ready rows that ``task`` has not claimed before; waits for them up to ``timeout`` seconds.

    Raises `RequestTimeout` when they did not come; then nothing was claimed. A claim whose answer is lost, or that its
    caller abandons, is given back.
    """
    require_timeout(timeout)
    body = {
        "partition": _name("partition", partition),
        "task": _name("task", task),
        "fields": _names("field", fields),
        "count": count,
        "timeout": timeout,
        "claim_id": claim_id,
    }
    answer = yield from _parked("claim", body, claim_id, partition, task)
    if answer["timed_out"]:
        raise RequestTimeout(
            f"task {task!r} asked for {count} rows of partition {partition!r} with fields {list(fields)} and "
            f"{timeout:g} s passed without them; nothing was claimed"
        )
    return [str(key) for key in answer["keys"]]


def wait(partition: str, keys: Sequence[str], fields: Sequence[str], timeout: float, wait_id: str) -> Operation[None]:
    """Return when all ``keys`` have all ``fields``; `RequestTimeout` when that takes longer than ``timeout``."""
    require_timeout(timeout)
    body = {**_rows(partition, keys), "fields": _names("field", fields), "timeout": timeout, "wait_id": wait_id}
    answer = yield from _parked("wait", body, wait_id, partition, None)
    if answer["timed_out"]:
        raise RequestTimeout(
            f"waited {timeout:g} s for fields {list(fields)} of {len(keys)} keys of partition {partition!r}"
        )


def _parked(
    op: str, body: Mapping[str, Any], request_id: str, partition: str, task: str | None
) -> Operation[Mapping[str, Any]]:
    """The answer to a request that the controller may park. Whoever goes without the answer takes the request back,
    so that no row is claimed for nobody."""
    (outcome,) = yield [Ask(CONTROLLER, op, body, patience_s=body["timeout"])]
    if isinstance(outcome, Unreachable):
        back = {"request_id": request_id, "partition": partition, "task": task}
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
