"""``TensorDict``s (of the package tensordict) as the fields of a put; nothing here imports the package.

The rule: the first batch dimension is the keys'. A nested ``TensorDict`` is flattened, its fields named by their path
with dots; ``NonTensorData`` and ``NonTensorStack`` become plain values, one per key. A tensorclass is refused, since it
would come back as its fields and not as the class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from policies.errors import WireError


def is_tensordict(value: Any) -> bool:
    """True for ``TensorDict``s of every kind and for tensorclasses, non-tensor data included."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and bool(tensordict.is_tensor_collection(value))


def flat_items(source: Any, rows: int) -> Iterator[tuple[str, Any]]:
    """(field name, value) of all leaves; a value is a tensor, or a list with one tensor or plain value per row.

    Raises `WireError` for a batch size that does not begin with ``rows``, a tensorclass, and two leaves of one name.
    """
    _require_batch(source, rows)
    seen: set[str] = set()
    for name, value in _leaves(source, ""):
        if name in seen:
            raise WireError(f"field {name!r}: two leaves of the TensorDict have this path", field=name)
        seen.add(name)
        yield name, value


def _require_batch(source: Any, rows: int) -> None:
    batch = tuple(source.batch_size)
    if not batch or batch[0] != rows:
        raise WireError(f"a TensorDict of batch size {list(batch)} came for {rows} keys; its first size must be {rows}")


def _leaves(source: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    tensordict = sys.modules["tensordict"]
    if tensordict.is_tensorclass(source):
        raise WireError(f"{prefix or 'the put'} is a {type(source).__name__}: give its .to_tensordict()")
    for name in list(source.keys()):
        path = f"{prefix}{name}"
        value = _value(source, name)
        if not is_tensordict(value):
            yield path, value
        elif tensordict.is_non_tensor(value):
            yield path, value.tolist()
        else:
            yield from _leaves(value, f"{path}.")


def _value(source: Any, name: str) -> Any:
    """The entry itself; of a lazy stack of rows that cannot be stacked, the rows."""
    tensordict = sys.modules["tensordict"]
    if isinstance(source, tensordict.LazyStackedTensorDict) and source.stack_dim == 0:
        rows = source.get(name, as_list=True)
        if not any(is_tensordict(row) for row in rows):
            return rows
    return source.get(name)
