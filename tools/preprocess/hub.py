"""Data sets of the Hugging Face hub (or a folder like one), streamed, never loaded whole."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.preprocess.errors import InputError
from tools.preprocess.inputs import Blocks, Format, Slice
from tools.preprocess.manifest import InputIdentity

PREFIX = "hub:"
_ROWS = 64
"""Rows asked for at a time; few, because one may be large."""


@dataclass(frozen=True)
class HubInput:
    """`--input hub:NAME`, with `--hub-config` and `--hub-split`."""

    name: str
    config: str | None
    split: str

    @property
    def label(self) -> str:
        """How messages and manifests call it."""
        return (
            f"{PREFIX}{self.name}" + (f"/{self.config}" if self.config else "") + f":{self.split}"
        )


def open_hub(hub: HubInput) -> HubSource:
    """Look a data set up.

    Raises:
        InputError: It is not found, has no such split, or the hub cannot be reached.
    """
    import datasets  # seconds that other inputs need not pay

    try:
        builder = datasets.load_dataset_builder(hub.name, hub.config)
        stream = builder.as_streaming_dataset(split=hub.split)
    except Exception as error:
        raise _refused(hub, error) from None
    return HubSource(hub, builder, stream)


class HubSource:
    """A split that is read as a stream of rows."""

    def __init__(self, hub: HubInput, builder: Any, stream: Any) -> None:
        self.hub = hub
        self._builder = builder
        self._stream = stream

    def identity(self) -> InputIdentity:
        """Of the split's files: on the hub their commit, in a folder their time stamps."""
        files = (self._builder.config.data_files or {}).get(self.hub.split)
        origin = getattr(files, "origin_metadata", None) or [self._builder.hash]
        digest = hashlib.sha256(repr(sorted(map(str, origin))).encode()).hexdigest()
        return InputIdentity(self.hub.label, 0, 0, digest)

    def slice(self, part: int, parts: int) -> Slice:
        """Rows of one part of several.

        Raises:
            InputError: The number of rows is not known, so it cannot be cut.
        """
        if parts == 1:
            return Slice(self.hub.label, Format.HUB, 0, None, 0)
        splits = self._builder.info.splits or {}
        rows = splits[self.hub.split].num_examples if self.hub.split in splits else 0
        if not rows:
            raise InputError(
                f"{self.hub.label} does not tell its number of rows, so --shard cannot cut it; "
                "download it and give its files with --input."
            )
        return Slice(
            self.hub.label, Format.HUB, rows * part // parts, rows * (part + 1) // parts, 0
        )

    def blocks(self, slice_: Slice, offset: int, keys: Sequence[str]) -> Blocks:
        """Blocks of a slice, from row `offset` on.

        Raises:
            InputError: A column is missing, or the connection failed.
        """
        from tools.preprocess import tables  # imports pyarrow

        stream = self._stream.skip(offset)
        if slice_.stop is not None:
            stream = stream.take(slice_.stop - offset)
        row = offset
        try:
            for table in stream.with_format("arrow").iter(_ROWS):
                missing = [key for key in keys if key not in table.column_names]
                if missing:
                    raise InputError(
                        f"{slice_.name} has no column '{missing[0]}', only "
                        f"{', '.join(table.column_names)}; name the right one with --json-keys."
                    )
                yield from tables.record_blocks(table.select(list(keys)), keys, row, 0)
                row += table.num_rows
        except InputError:
            raise
        except Exception as error:
            raise _refused(self.hub, error) from None


def _refused(hub: HubInput, error: Exception) -> InputError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError(
        f"{hub.label} cannot be read ({type(error).__name__}: {reason}); check name, split and "
        "network, or download it and give its files with --input."
    )
