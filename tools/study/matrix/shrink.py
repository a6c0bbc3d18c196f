"""The least that still shows something: fewest parts (delta debugging), then smaller where it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def fewest[T](parts: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The parts of which none can be left out; all of them show it, and none of them alone may.

    Zeller and Hildebrandt's ddmin (IEEE TSE 28, 2002): halves first, so that one guilty part of n is
    found in about 2·log2(n) tries.

    Args:
        parts: What shows it together.
        shows: Whether some of the parts, in their order, show it as well.
    """
    if not parts or shows(()):
        return ()
    kept, pieces = tuple(parts), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(kept) and shows(chunk)), None)
        if smaller is not None:
            kept, pieces = smaller, 2
            continue
        rests = ((*kept[:at], *kept[at + size :]) for at in range(0, len(kept), size))
        # Of two halves each is the other's rest, and was tried.
        rest = next((one for one in rests if one and len(chunks) > 2 and shows(one)), None)
        if rest is not None:
            kept, pieces = rest, max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(len(kept), 2 * pieces)
    return kept


def smallest[T](steps: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The steps that can all be taken, each tried once after those that were: what still shows it."""
    taken: tuple[T, ...] = ()
    for step in steps:
        if shows((*taken, step)):
            taken = (*taken, step)
    return taken
