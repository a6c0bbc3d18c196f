"""Amounts and lists as sentences say them."""

from __future__ import annotations

from collections.abc import Sequence


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, three digits where there are as many."""
    value = 1000 * seconds
    text = f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"
    return text.replace("-", "−")


def amount(size_bytes: float) -> str:
    """Bytes with four digits, in the unit that leaves the fewest zeros; the sign only if negative."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.4g} {name}".replace("-", "−")
    return f"{size_bytes:.0f} bytes".replace("-", "−")


def signed(text: str) -> str:
    """A plus sign before what has no minus."""
    plain = text.replace("-", "−")
    return plain if plain.startswith("−") else f"+{plain}"


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
