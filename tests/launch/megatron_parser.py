"""Megatron's own argument parser in a process of its own, which answers many questions.

As a program it reads requests `{"devices": N, "words": […], "validate": bool}`, or `{}` for all of its
flags, one a line, and answers each by a line of JSON. Importing Megatron takes seconds, so tests share
one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parakit.config.files import ROOT

SEEN = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("data_parallel_size", "sequence_parallel", "micro_batch_size", "global_batch_size"),
)
KEPT = ("fp16", "bf16", "gradient_accumulation_fusion", "profile_step_end", "eval_iters")


class MegatronParser:
    """Asks the installed Megatron, or that of a checkout."""

    def __init__(self, checkout: Path | None = None) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.launch.megatron_parser", str(checkout or "")),
            env={**os.environ, "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def validated(self, requests: Sequence[tuple[int, Sequence[str]]]) -> list[list[int]]:
        """`SEEN` of each command on so many devices, after Megatron's own checks."""
        return [self._ask(devices=n, words=words, validate=True) for n, words in requests]

    def known(self, words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        """Words that the parser does not know, and `KEPT` of the others."""
        unknown, kept = self._ask(devices=1, words=words, validate=False)
        return unknown, kept

    def flags(self) -> dict[str, tuple[str, Any]]:
        """Kind and default of every flag, as the kit's table has them."""
        return {name: (kind, default) for name, (kind, default) in self._ask().items()}

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, **request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        last_lines = deque[str](maxlen=40)
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line.removeprefix("ANSWER "))
            last_lines.append(line)
        raise AssertionError("".join(last_lines))


def main(checkout: str) -> None:
    import argparse
    import types

    import torch

    if checkout:
        sys.path.insert(0, checkout)
    # Both are asked while validating.
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)
    from megatron.training.arguments import add_megatron_arguments, parse_args, validate_args

    for line in sys.stdin:
        request = json.loads(line)
        if not request:
            parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            answer: object = {
                name: [_kind(action), _plain(action.default)]
                for action in parser._actions
                for name in action.option_strings
            }
        elif request["validate"]:
            os.environ["WORLD_SIZE"] = str(request["devices"])
            sys.argv = ["pretrain_gpt.py", *request["words"]]
            args = parse_args()
            validate_args(args, {})
            answer = [int(getattr(args, name)) for name in SEEN]
        else:
            parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
            known, unknown = parser.parse_known_args(request["words"])
            answer = [unknown, {name: getattr(known, name) for name in KEPT}]
        print("ANSWER", json.dumps(answer), flush=True)


def _kind(action: Any) -> str:
    if action.nargs == 0:
        return "on" if action.const is True else "off"
    return {"int": "whole", "float": "decimal"}.get(getattr(action.type, "__name__", ""), "text")


def _plain(value: Any) -> object:
    """A list of one is what it holds, and nothing is None."""
    if isinstance(value, list):
        value = value[0] if value else None
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


if __name__ == "__main__":
    main(sys.argv[1])
