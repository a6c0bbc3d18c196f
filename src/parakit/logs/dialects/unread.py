"""Trainers whose logs are recognised and not read, so that users learn why there is no result."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect

_NO_TIME = "it prints no time of an iteration"
_OTHER_REASONS = {
    "nanotron": "its numbers are rounded to three digits",
    "NeMo's progress bar": "it is rewritten in place",
    "MLPerf's results": "no time of a step is in it or follows from its blocks and its batch",
    "nanoGPT": "it is one process's estimate",
}
_LINES = {
    "torchtitan": r"step: {1,8}\d{1,9} {1,4}loss: {1,4}[\d.nai]{1,20} .{0,200}(?:tps|wps): ",
    "nanotron": r"iteration: \d{1,9} / \d{1,9} \| consumed_tokens: ",
    "NeMo's progress bar": (
        r"Epoch \d{1,6}: .{0,200}(?:train_step_timing in s|reduced_train_loss)="
    ),
    "MLPerf's results": r':::MLLOG \{.{0,200}"key": "(?:tracked_stats|run_start)"',
    "the Hugging Face Trainer": r"\{'loss': '?[\d.]{1,20}'?, '(?:grad_norm|learning_rate)': ",
    "LLM Foundry": r"\[batch=\d{1,9}/\d{1,9}\]:?\s*(?:\Z|Train)",
    "nanoGPT": r"iter \d{1,9}: loss [\d.]{1,12}, time [\d.]{1,12}ms",
    "DeepSpeed without Megatron": (
        r"RunningAvgSamplesPerSec=[\d.]{1,30}, CurrSamplesPerSec="
        r"|rank=\d{1,6} time \(ms\) \| \w{1,30}: "
    ),
}
DIALECT = Dialect(
    "not read",
    unread=tuple(
        (trainer, _OTHER_REASONS.get(trainer, _NO_TIME), re.compile(line))
        for trainer, line in _LINES.items()
    ),
)
