"""Paths as commands and records name them."""

from __future__ import annotations

from pathlib import Path

from tools.recipe.model import ROOT


def from_root(path: Path) -> str:
    """A path as the ranks see it: relative to the repository root where it lies inside."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)
