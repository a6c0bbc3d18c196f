"""Formatting of values with units."""

from __future__ import annotations

from parakit.formatting.units import change, signed_percent


def test_signed_percent_has_a_plus_or_a_minus_sign_and_no_hyphen() -> None:
    assert [signed_percent(share) for share in (0.0912, -0.5, None)] == ["+9.1%", "−50.0%", "–"]
    assert change(0.5) == "−50%"
