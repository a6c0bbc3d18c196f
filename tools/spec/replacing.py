"""`dataclasses.replace`, without a call for each field that stays.

A search makes a hundred thousand specs that differ in a field or two, and a fifth of its time went into
their other thirty. For frozen data classes that have no `__post_init__`.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

__all__ = ["replace"]

if TYPE_CHECKING:
    from dataclasses import replace
else:

    def replace(item: Any, /, **changes: Any) -> Any:
        """The same with other values of some fields.

        Raises:
            TypeError: There is no such field.
        """
        kind = type(item)
        if not hasattr(item, "__dict__"):
            return dataclasses.replace(item, **changes)
        names = _names(kind)
        # Not `__dict__`: cached properties are in it, and defaults of a decoded record are not.
        state = {name: getattr(item, name) for name in names} | changes
        if len(state) > len(names):
            raise TypeError(f"{kind.__name__} has no {', '.join(changes.keys() - set(names))}.")
        new = object.__new__(kind)
        object.__setattr__(new, "__dict__", state)
        return new


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
