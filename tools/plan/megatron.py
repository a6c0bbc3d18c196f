"""The Megatron-LM versions whose calls the closed forms know."""

from __future__ import annotations

from enum import StrEnum


class Megatron(StrEnum):
    """A version of Megatron-LM, by what it is checked out as."""

    F4FA7D6B = "f4fa7d6b"
    """Main of 2025-09-01, 0.15.0rc2: the published runs."""
    V0_19 = "core_v0.19.0"


LATEST = Megatron.V0_19
