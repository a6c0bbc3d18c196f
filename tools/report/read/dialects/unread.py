"""Trainers whose logs are not read: a reader is not told that theirs is broken."""

from __future__ import annotations

import re

from tools.report.read.dialects import Dialect

_NO_TIME = "it prints no time of an iteration"

_UNREAD = (
    (
        *("torchtitan", _NO_TIME),
        r"step: {1,8}\d{1,9} {1,4}loss: {1,4}[\d.nai]{1,20} .{0,200}(?:tps|wps): ",
    ),
    (
        *("nanotron", "its numbers are rounded to three digits"),
        r"iteration: \d{1,9} / \d{1,9} \| consumed_tokens: ",
    ),
    (
        *("NeMo's progress bar", "it is rewritten in place"),
        r"Epoch \d{1,6}: .{0,200}(?:train_step_timing in s|reduced_train_loss)=",
    ),
    (
        *(
            "MLPerf's results",
            "no time of a step is in it or follows from its blocks and its batch",
        ),
        r':::MLLOG \{.{0,200}"key": "(?:tracked_stats|run_start)"',
    ),
    (
        *("the Hugging Face Trainer", _NO_TIME),
        r"\{'loss': '?[\d.]{1,20}'?, '(?:grad_norm|learning_rate)': ",
    ),
    ("LLM Foundry", _NO_TIME, r"\[batch=\d{1,9}/\d{1,9}\]:?\s*(?:\Z|Train)"),
    (
        *("nanoGPT", "it is one process's estimate"),
        r"iter \d{1,9}: loss [\d.]{1,12}, time [\d.]{1,12}ms",
    ),
    (
        *("DeepSpeed without Megatron", _NO_TIME),
        r"RunningAvgSamplesPerSec=[\d.]{1,30}, CurrSamplesPerSec="
        r"|rank=\d{1,6} time \(ms\) \| \w{1,30}: ",
    ),
)
DIALECT = Dialect(
    "not read",
    unread=tuple((trainer, why, re.compile(line)) for trainer, why, line in _UNREAD),
)
