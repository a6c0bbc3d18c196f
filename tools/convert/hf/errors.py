"""What stops a conversion."""

from __future__ import annotations


class ConversionError(ValueError):
    """A model that cannot be converted; one sentence that names the thing, the value and the remedy."""
