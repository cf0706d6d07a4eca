"""The errors of the plane and of what runs on it, under one base.

A message says what was asked, what was found and what to do. An error that crosses the wire travels as its class
name, its message and plain details, and is rebuilt from the fixed table at the end of this file; nothing that a peer
sends can name a class outside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class RegraftError(Exception):
    """Base of all errors of this package. ``details`` are plain values (str, int, float, bool, list, dict)."""

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details: dict[str, Any] = details

    @property
    def message(self) -> str:
        return str(self.args[0])


class ConfigError(RegraftError):
    """A configuration names an unknown field or holds an impossible value."""


class WireError(RegraftError):
    """A message that cannot be read: bad header, unknown dtype, sizes that disagree, a frame over the limit."""


class Refused(RegraftError):
    """The plane understood the request and will not do it; nothing changed."""


class DtypeConflict(Refused):
    """A field already holds another dtype than the one that came."""


class DuplicateKey(Refused):
    """One batch names a key twice."""


class UnknownPartition(Refused):
    """The partition does not exist and the plane does not create it on demand."""


class UnknownField(Refused):
    """The field does not exist in the partition."""


class CapacityExceeded(Refused):
    """A unit or a queue is full; the details say which limit and by how much."""


class Unreachable(RegraftError):
    """A peer could not be reached or did not answer in time; the outcome of the request is unknown."""


class ReferenceUnavailable(RegraftError):
    """Bytes cannot travel by reference now; in frames they can."""


class RequestTimeout(Unreachable):
    """No answer came before the deadline of the request."""


class Unauthorized(RegraftError):
    """The peer did not accept the secret of this plane."""


class ClosedError(RegraftError):
    """The client, plane or actor was closed before or during the request."""


class ForkedProcessError(RegraftError):
    """A client was used in a forked child of the process that made it; make a new one there."""


class RemoteError(RegraftError):
    """A peer failed while it served a request; the message is the peer's."""


class KeyUnavailable(RegraftError):
    """One key of a read could not be delivered; the other keys of the read are not affected."""


class KeyMissing(KeyUnavailable):
    """The key is not in the partition, or has no value in a field that was asked for."""


class KeyCleared(KeyUnavailable):
    """The key was cleared while the read was on its way."""


class KeyCorrupt(KeyUnavailable):
    """The stored bytes do not match their checksum."""


class LaunchError(RegraftError):
    """The actors of a plane could not be started, or there is no plane of that name to attach to."""


class CheckpointError(RegraftError):
    """A checkpoint cannot be written or used."""


class CheckpointMissing(CheckpointError):
    """There is no whole checkpoint at the path."""


class CheckpointDamaged(CheckpointError):
    """A file of the checkpoint is missing, has another size or another checksum than its manifest says."""


class FingerprintMismatch(CheckpointError):
    """The checkpoint was made by a job whose data has another shape: other model, tokenizer or schema."""


class CutRefused(Refused):
    """A cut could not be started, for example because another one runs on this coordinator."""


class CleanupFailed(RegraftError):
    """Rows that nobody needs stay behind, because they could not be cleared."""


class EngineError(RegraftError):
    """An engine could not be loaded or could not take a call."""


ERRORS_BY_NAME: dict[str, type[RegraftError]] = {
    cls.__name__: cls
    for cls in (
        RegraftError, ConfigError, WireError, Refused, DtypeConflict, DuplicateKey, UnknownPartition, UnknownField,
        CapacityExceeded, Unreachable, ReferenceUnavailable, RequestTimeout, Unauthorized, ClosedError,
        ForkedProcessError, RemoteError, KeyUnavailable, KeyMissing, KeyCleared, KeyCorrupt, CheckpointError,
        CheckpointMissing, CheckpointDamaged, FingerprintMismatch, CutRefused, CleanupFailed, EngineError,
    )
}  # fmt: skip


def error_to_plain(error: RegraftError) -> dict[str, Any]:
    """The form in which an error travels: ``{"error": class name, "message": str, "details": mapping}``."""
    return {"error": type(error).__name__, "message": error.message, "details": error.details}


def error_from_plain(plain: Mapping[str, Any]) -> RegraftError:
    """Rebuild an error that came from a peer. An unknown name becomes a `RemoteError`, never another class."""
    cls = ERRORS_BY_NAME.get(str(plain.get("error")), RemoteError)
    details = plain.get("details")
    error = cls(str(plain.get("message", "a peer failed without saying why")))
    error.details = dict(details) if isinstance(details, Mapping) else {}
    return error
