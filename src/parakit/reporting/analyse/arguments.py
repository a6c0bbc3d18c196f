"""Find the arguments in which lists of arguments differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def find_differing_arguments(
    lists: Sequence[Mapping[str, str]],
) -> dict[str, tuple[str, ...]]:
    """Return the arguments that differ between lists: for each name, one value per list.

    The names are in alphabetical order, and an empty value stands for a missing argument. A list with less than
    half as many arguments as the longest list may be shortened or a command line. An argument that such a list
    does not have is unknown and does not count as a difference. An argument that only such lists have is not
    compared.
    """
    longest = max((len(arguments) for arguments in lists), default=0)
    complete = [arguments for arguments in lists if len(arguments) >= longest / 2]
    shortened = [arguments for arguments in lists if len(arguments) < longest / 2]
    names: set[str] = set()
    for arguments in complete:
        names.update(arguments)
    differing = {}
    for name in sorted(names):
        texts = [arguments.get(name, "") for arguments in complete]
        texts += [arguments[name] for arguments in shortened if name in arguments]
        distinct_values = {_parse_argument(text) for text in texts}
        if len(distinct_values) > 1:
            differing[name] = tuple(arguments.get(name, "") for arguments in lists)
    return differing


def _parse_argument(text: str) -> float | str:
    """Return the number that an argument is, so that `0.0001` and `1e-4` are equal; else its text."""
    try:
        return float(text)
    except ValueError:
        return text
