"""Check every byte of a data set; exits with 1 if anything is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.preprocess.dataset import strip_suffix
from tools.preprocess.verify import Verdict, verify


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("prefix", type=Path, nargs="+", help="such as owt-ds/sample_text_document")
    parser.add_argument("--vocabulary", type=int, help="entries; the manifest's if not given")


def run(flags: argparse.Namespace) -> int:
    """Carry it out."""
    status = 0
    for path in flags.prefix:
        prefix = strip_suffix(path)
        verdict = verify(prefix, flags.vocabulary)
        for problem in verdict.problems:
            print(f"damaged: {problem}")
        if verdict.problems:
            status = 1
        else:
            print(f"{prefix}: {_describe(verdict)}")
    return status


def _describe(verdict: Verdict) -> str:
    dataset = verdict.dataset
    assert dataset is not None
    how = (
        "every byte is the manifest's (sha256), and the structure is sound"
        if verdict.hashed
        else "the structure is sound; without a manifest, changed tokens inside the vocabulary "
        "cannot be told"
    )
    ids = (
        f"ids below {verdict.vocabulary:,}"
        if verdict.vocabulary
        else "vocabulary unknown, so ids unchecked (give --vocabulary)"
    )
    return f"{how}. {dataset.documents:,} documents, {dataset.tokens:,} tokens, {ids}."
