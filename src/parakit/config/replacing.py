"""`dataclasses.replace`, without a call for each field that stays.

A search makes a hundred thousand specs that differ in a field or two, and a fifth of its time went into
their other thirty. For frozen data classes that have no `__post_init__`.
"""

from __future__ import annotations

import dataclasses
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

__all__ = ["replace", "replace_cached"]

if TYPE_CHECKING:
    from dataclasses import replace
    from dataclasses import replace as replace_cached
else:

    def replace(item: Any, /, **changes: Any) -> Any:
        """The same with other values of some fields.

        Raises:
            TypeError: There is no such field.
        """
        kind = type(item)
        names, cached = _names(kind)
        if not names:
            return dataclasses.replace(item, **changes)
        if not names.issuperset(changes):
            raise TypeError(f"{kind.__name__} has no {', '.join(changes.keys() - names)}.")
        state = item.__dict__ | changes
        for name in state.keys() & cached:
            del state[name]
        new = object.__new__(kind)
        object.__setattr__(new, "__dict__", state)
        return new

    replace_cached = lru_cache(maxsize=16384)(replace)
    """The same, one object for all who ask alike, whose hash is computed once."""


@cache
def _names(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """Of fields, and of what is computed once and kept beside them; none of a class with slots."""
    if kind.__dictoffset__ == 0:
        return frozenset(), frozenset()
    cached = {
        name
        for each in kind.__mro__
        for name, value in vars(each).items()
        if isinstance(value, cached_property)
    }
    return frozenset(field.name for field in dataclasses.fields(kind)), frozenset(cached)
