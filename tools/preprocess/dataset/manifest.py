"""`P_text_document.manifest.json`: what a data set was made of, and hashes to prove it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.preprocess.errors import DatasetError

SUFFIX = ".manifest.json"


@dataclass(frozen=True)
class InputIdentity:
    """One input as it was when its documents were read."""

    name: str
    size_bytes: int
    modified_ns: int
    """Modification time, ns since the epoch; 0 where the input has none."""
    edges_sha256: str
    """Over the first and the last MiB: cheap, and different for nearly every change of content."""


@dataclass(frozen=True)
class RunIdentity:
    """Everything the bytes of a data set follow from; resuming under another one is refused."""

    inputs: tuple[InputIdentity, ...]
    tokenizer: str
    tokenizer_sha256: str
    vocabulary: int
    eod: int | None
    """Id appended to each document; None without `--append-eod`."""
    json_keys: tuple[str, ...]
    part: str
    """`i/n` of `--shard`; `0/1` is the whole input."""
    shard_bytes: int
    """Input between two commits."""
    max_document_bytes: int | None


@dataclass(frozen=True)
class ShardHash:
    """A stretch of the `.bin` that was committed at once, or came from one data set of a merge."""

    documents: int
    sequences: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the documents themselves."""
    sha256: str
    """Of the `.bin` from its very start to this stretch's end: one hash serves every stretch."""


@dataclass(frozen=True)
class Manifest:
    """The record beside a `.bin/.idx` pair."""

    json_key: str
    documents: int
    sequences: int
    tokens: int
    dtype: str
    text_bytes: int
    """UTF-8 bytes of the documents themselves."""
    bin_bytes: int
    idx_bytes: int
    bin_sha256: str
    idx_sha256: str
    engine: str
    """What encoded it: `gigatoken` or `tokenizers`."""
    problems: dict[str, int]
    """Documents left out or noteworthy, by kind."""
    identity: RunIdentity
    shards: tuple[ShardHash, ...]
    schema: int = 1


def manifest_path(prefix: Path) -> Path:
    """Where the manifest of the data set at `prefix` stands."""
    return prefix.with_name(prefix.name + SUFFIX)


def read_manifest(prefix: Path) -> Manifest | None:
    """Read the manifest beside a data set, None if there is none.

    Raises:
        DatasetError: It is there but is not readable.
    """
    path = manifest_path(prefix)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"{path} is not a manifest of this tool ({error}); remove it to do without."
        ) from None


def difference(ours: RunIdentity, theirs: RunIdentity) -> str | None:
    """Name the first thing two identities differ in, as `what: theirs, now ours`."""
    for name in RunIdentity.__dataclass_fields__:
        was, now = getattr(theirs, name), getattr(ours, name)
        if was == now:
            continue
        if name == "inputs":
            return _input_difference(was, now)
        return f"{_LABELS.get(name, name)} was {was}, now {now}"
    return None


_LABELS = {
    "tokenizer": "--tokenizer",
    "tokenizer_sha256": "the tokenizer's sha256",
    "eod": "--append-eod (end-of-document id)",
    "json_keys": "--json-keys",
    "part": "--shard",
    "shard_bytes": "--commit-mib (in bytes)",
    "max_document_bytes": "--max-document-mb (in bytes)",
}


def _input_difference(was: tuple[InputIdentity, ...], now: tuple[InputIdentity, ...]) -> str:
    if [i.name for i in was] != [i.name for i in now]:
        return f"the input was {_names(was)}, now {_names(now)}"
    old, new = next((o, n) for o, n in zip(was, now, strict=True) if o != n)
    if old.size_bytes != new.size_bytes:
        return f"input {new.name} was {old.size_bytes} bytes, now {new.size_bytes}"
    if old.edges_sha256 != new.edges_sha256:
        return f"the content of input {new.name} has changed"
    return f"input {new.name} was modified since (its time stamp differs)"


def _names(inputs: tuple[InputIdentity, ...]) -> str:
    shown = ", ".join(i.name for i in inputs[:3])
    return shown + (f" and {len(inputs) - 3} more" if len(inputs) > 3 else "")
