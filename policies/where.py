"""Filters over tags.

A filter is a plain mapping from a tag to what it must be. Each entry is a value (equality) or a comparison
``{"op": one of == != < <= > >= in, "value": v}``; a row matches when all entries do. Two rules keep answers
predictable:

1. A row that lacks the tag matches no condition on it, ``!=`` included.
2. A tag whose type has no order with the asked value (a string against a number) is neither less nor greater.

To compare with a mapping that itself has the key ``op``, write ``{"op": "==", "value": {…}}``.

Cost: the filter is checked once, then one dict lookup and one comparison per condition and row.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from policies.errors import Refused

Tags = Mapping[str, Any]
Predicate = Callable[[Tags], bool]

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda found, values: found in values,
}
_ABSENT = object()


def predicate(where: Mapping[str, Any] | None) -> Predicate:
    """The test that ``where`` stands for; None and the empty mapping match every row.

    Raises `Refused` naming the tag for a comparison that does not exist or lacks its value.
    """
    conditions = [_condition(tag, wanted) for tag, wanted in (where or {}).items()]

    def matches(tags: Tags) -> bool:
        return all(_holds(compare, tags.get(tag, _ABSENT), value) for tag, compare, value in conditions)

    return matches


def _condition(tag: str, wanted: Any) -> tuple[str, Callable[[Any, Any], Any], Any]:
    if not isinstance(wanted, Mapping) or "op" not in wanted:
        return tag, operator.eq, wanted
    op = wanted["op"]
    compare = _COMPARISONS.get(op) if isinstance(op, str) else None
    if compare is None or set(wanted) != {"op", "value"}:
        raise Refused(
            f"tag {tag!r}: cannot filter by {dict(wanted)!r}; write {{'op': …, 'value': …}} with one of "
            f"{' '.join(_COMPARISONS)}",
            tag=tag,
        )
    value = wanted["value"]
    if op == "in" and not isinstance(value, list | tuple):
        raise Refused(f"tag {tag!r}: 'in' needs a list of values, not {value!r}", tag=tag)
    return tag, compare, value


def _holds(compare: Callable[[Any, Any], Any], found: Any, value: Any) -> bool:
    if found is _ABSENT:
        return False
    try:
        return bool(compare(found, value))
    except TypeError:
        return False
