"""The kit's YAML files, by a loader that makes nothing but plain data of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

try:  # libyaml's is ten times as fast, and not in every build of PyYAML.
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]


def read_yaml(path: Path) -> Any:
    """What a file holds.

    Raises:
        OSError: It cannot be read.
        yaml.YAMLError: It is no YAML, or names a Python object.
    """
    return yaml.load(path.read_text(), Loader=SafeLoader)
