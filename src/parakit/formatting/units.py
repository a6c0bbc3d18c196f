"""Values as people read them. Unknown is a dash, never a zero; a minus is a minus sign, not a hyphen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

DASH = "–"
KIB, MIB, GIB = 2**10, 2**20, 2**30


def number(value: float | None) -> str:
    """Four significant digits, no exponent for usual magnitudes."""
    if value is None:
        return DASH
    if value != 0 and (abs(value) >= 1e7 or abs(value) < 1e-3):
        return f"{value:.3e}"
    magnitude = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    return f"{value:,.{max(0, 4 - magnitude)}f}"


def known(shape: str) -> Callable[[float | None], str]:
    """How a number is written, such as `{:.4f}`; a dash for one that is not known."""
    return lambda value: DASH if value is None else shape.format(value)


count = known("{:,}")
"""An exact count with separators."""
loss = known("{:.7g}")
"""A loss with all seven digits that Megatron prints."""
percent = known("{:.1%}")
"""A share of 1."""
times = known("{:.2f}x")
"""A factor: `1.23x`."""


def plural(number: int, noun: str) -> str:
    """`1 rank`, `2,048 ranks`, `2 batches`."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending * (number != 1)}"


def size(size_bytes: float | None) -> str:
    """Bytes in a table's column: GiB or MiB, with fixed decimals."""
    if size_bytes is None:
        return DASH
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"


def amount(size_bytes: float) -> str:
    """Bytes in a sentence: four digits, in the unit that leaves the fewest zeros."""
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.4g} {name}".replace("-", "−")
    return f"{size_bytes:.0f} bytes".replace("-", "−")


def gib(size_bytes: float, decimals: int = 1) -> str:
    """Bytes as a number of GiB, for a heading or a sentence that names the unit."""
    return f"{size_bytes / GIB:,.{decimals}f}"


def gb(size_bytes: float, decimals: int = 2) -> str:
    """Bytes as a number of GB (10^9), as links and networks count them."""
    return f"{size_bytes / 1e9:,.{decimals}f}"


def ms(seconds: float, decimals: int = 1) -> str:
    """Seconds as a number of milliseconds, for a heading or a sentence that names the unit."""
    return f"{1e3 * seconds:,.{decimals}f}"


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds in a sentence, three digits where there are as many."""
    value = 1000 * seconds
    text = f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms"
    return text.replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds in a sentence: milliseconds below ten of them."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{1e3 * seconds:.0f} ms"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: `2:03`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def interval(low: float | None, high: float | None) -> str:
    """`12.1–12.9`."""
    return DASH if low is None or high is None else f"{number(low)}–{number(high)}"


def signed(text: str) -> str:
    """A plus sign before what has no minus."""
    plain = text.replace("-", "−")
    return plain if plain.startswith("−") else f"+{plain}"


def joined(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def bracketed(value: float, low: float | None, high: float | None, shape: str) -> str:
    """`12.3 [12.1, 12.9]`, each by the format specification; without an interval the value alone."""
    text = format(value, shape)
    if low is None or high is None:
        return text
    return f"{text} [{format(low, shape)}, {format(high, shape)}]"


def rounded(value: float | None) -> str:
    """Three significant digits without trailing zeros, all digits from a thousand on."""
    return DASH if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def signed_percent(share: float | None, decimals: int = 1) -> str:
    """A share of 1 with its sign: `+9.1%`."""
    return DASH if share is None else f"{share:+.{decimals}%}".replace("-", "−")


def change(ratio: float | None, decimals: int = 0) -> str:
    """A ratio as what it adds or takes away: `+9%`."""
    return signed_percent(None if ratio is None else ratio - 1, decimals)


def megabytes(size_bytes: float | None) -> str:
    """Bytes in MB, as networks count them."""
    return DASH if size_bytes is None else f"{size_bytes / 1e6:.1f} MB"


def parameters(count: int) -> str:
    """The size of a model: `3.4M`, `1.3B`."""
    return f"{count / 1e9:.1f}B" if count >= 1_000_000_000 else f"{count / 1e6:.1f}M"


def bit_rate(bits_per_second: float) -> str:
    """A link's, as networks are named by: `2.5 Gbit/s`, `200 Mbit/s`."""
    giga = bits_per_second >= 1e9
    return f"{bits_per_second / (1e9 if giga else 1e6):g} {'G' if giga else 'M'}bit/s"
