"""Format numbers as people read them: bytes, times, percentages, counts and lists.

A value of None is unknown and becomes a dash, never a zero. Functions for sentences and for changes (`amount`,
`milliseconds`, `signed`, `signed_percent`, `change`) write a minus sign (−) and not a hyphen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DASH = "–"
"""Text of an unknown value."""
KIB, MIB, GIB = 2**10, 2**20, 2**30
"""Bytes per KiB, MiB and GiB."""


def number(value: float | None) -> str:
    """Return a number with four significant digits and thousands separators; None gives a dash.

    Numbers of 1e7 and more, and below 1e-3, have an exponent, such as `1.234e+07`.
    """
    if value is None:
        return DASH
    if value != 0 and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3e}"
    integer_digits = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    decimals = max(0, 4 - integer_digits)
    return f"{value:,.{decimals}f}"


def known(shape: str) -> Callable[[float | None], str]:
    """Return a function that formats a number by a format string such as `{:.4f}`, and None as a dash."""
    return lambda value: DASH if value is None else shape.format(value)


count = known("{:,}")
"""Function that formats an exact count with thousands separators; None gives a dash."""
loss = known("{:.7g}")
"""Function that formats a loss with all seven digits that Megatron prints; None gives a dash."""
percent = known("{:.1%}")
"""Function that formats a fraction of 1 as a percentage, such as `12.3%`; None gives a dash."""
times = known("{:.2f}x")
"""Function that formats a factor, such as `1.23x`; None gives a dash."""


def plural(number: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural, such as `1 rank`, `2,048 ranks`, `2 batches`."""
    if number == 1:
        return f"{number:,} {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def size(size_bytes: float | None) -> str:
    """Return bytes for a table's column: GiB with two decimals, or MiB with one; None gives a dash."""
    if size_bytes is None:
        return DASH
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"


def amount(size_bytes: float) -> str:
    """Return bytes for a sentence: four significant digits in the largest fitting unit up to GiB."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.4g} {name}".replace("-", "−")
    return f"{size_bytes:.0f} bytes".replace("-", "−")


def gib(size_bytes: float, decimals: int = 1) -> str:
    """Return bytes as a number of GiB without the unit, for a text that names the unit."""
    return f"{size_bytes / GIB:,.{decimals}f}"


def gb(size_bytes: float, decimals: int = 2) -> str:
    """Return bytes as a number of GB (10^9 bytes) without the unit, as links and networks are measured."""
    return f"{size_bytes / 1e9:,.{decimals}f}"


def ms(seconds: float, decimals: int = 1) -> str:
    """Return seconds as a number of milliseconds without the unit, for a text that names the unit."""
    return f"{1e3 * seconds:,.{decimals}f}"


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds for a sentence: no decimals from 100 ms on, one decimal below."""
    value = 1000 * seconds
    text = f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"
    return text.replace("-", "−")


def duration(seconds: float) -> str:
    """Return a time for a sentence: seconds from 10 s on, milliseconds below."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.0f} ms"


def clock(seconds: float) -> str:
    """Return a time as a clock shows it, such as `2:03` or `1:02:03`."""
    all_minutes, clock_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(all_minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{clock_seconds:02}"
    return f"{minutes}:{clock_seconds:02}"


def interval(low: float | None, high: float | None) -> str:
    """Return the bounds of an interval, such as `12.10–12.90`; a dash if a bound is None."""
    return DASH if low is None or high is None else f"{number(low)}–{number(high)}"


def signed(text: str) -> str:
    """Return a number's text with a plus sign, or with a minus sign instead of hyphens."""
    plain = text.replace("-", "−")
    return plain if plain.startswith("−") else f"+{plain}"


def joined(parts: Sequence[str]) -> str:
    """Return an enumeration: `a`, `a and b`, `a, b and c`; empty for no parts."""
    all_but_last = ", ".join(parts[:-1])
    last = "".join(parts[-1:])
    return " and ".join(text for text in (all_but_last, last) if text)


def bracketed(value: float, low: float | None, high: float | None, shape: str) -> str:
    """Return a value with its interval, such as `12.3 [12.1, 12.9]`.

    Args:
        value: The value.
        low: Lower bound; if a bound is None, the value alone is returned.
        high: Upper bound.
        shape: Format specification of all three numbers, such as `.1f`.
    """
    text = format(value, shape)
    if low is None or high is None:
        return text
    return f"{text} [{format(low, shape)}, {format(high, shape)}]"


def rounded(value: float | None) -> str:
    """Return a number with three significant digits, without trailing zeros; None gives a dash.

    Numbers from 1000 on are rounded to integers.
    """
    if value is None:
        return DASH
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def signed_percent(share: float | None, decimals: int = 1) -> str:
    """Return a fraction of 1 as a percentage with its sign, such as `+9.1%`; None gives a dash."""
    return DASH if share is None else f"{share:+.{decimals}%}".replace("-", "−")


def change(ratio: float | None, decimals: int = 0) -> str:
    """Return a ratio as the relative change from 1, such as `+9%` for 1.09; None gives a dash."""
    return signed_percent(None if ratio is None else ratio - 1, decimals)


def megabytes(size_bytes: float | None) -> str:
    """Return bytes as MB (10^6 bytes) with the unit, as networks are measured; None gives a dash."""
    return DASH if size_bytes is None else f"{size_bytes / 1e6:.1f} MB"


def parameters(count: int) -> str:
    """Return a number of parameters in millions or billions, such as `3.4M` or `1.3B`."""
    return f"{count / 1e9:.1f}B" if count >= 1_000_000_000 else f"{count / 1e6:.1f}M"


def bit_rate(bits_per_second: float) -> str:
    """Return the rate of a link as networks are named, such as `2.5 Gbit/s` or `200 Mbit/s`."""
    if bits_per_second >= 1e9:
        return f"{bits_per_second / 1e9:g} Gbit/s"
    return f"{bits_per_second / 1e6:g} Mbit/s"
