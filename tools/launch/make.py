"""From a make target to its commands: variables are checked against the table and become options.

Every recipe of the Makefile calls `python -m tools.launch make TARGET`. `TOOLS` names the tool behind a
target; which option a variable becomes is in `tools/spec/settings.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.launch.errors import LaunchError, wrong_settings_refused
from tools.records.run import is_run_folder
from tools.spec import settings
from tools.spec.files import OWN_READINGS, ROOT
from tools.spec.hardware import UnknownHardwareError, calibration_file, device_by_key
from tools.spec.setting import Setting
from tools.spec.settings import check_given, options_of

TRACE, VERIFY = "trace-", "verify-"
TRACED_ITERATIONS = "6"
"""Enough for one steady iteration after the first."""

_VARIABLE = re.compile(r"((?:\\.|\S)+?)=(?:\\.|\S)*")


@dataclass(frozen=True)
class ToolCall:
    """`python -m MODULE WORDS`; `defaults` are variables to set where make was not given them."""

    module: str
    words: tuple[str, ...] = ()
    defaults: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tool:
    """A module of the kit with a command line of its own."""

    module: str
    words: tuple[str, ...] = ()
    needs: tuple[tuple[Setting[str], str], ...] = ()
    """Variables that the target requires, each with the sentence that asks for it."""
    given: tuple[Setting[Any], ...] | None = None
    """Variables that become its words; it reads the others from the environment. None is all."""


_MODEL_OF_PLAN = "Say what: make plan MODEL=gpt2-large GPUS=2 GPU=h200"
_MODEL_OF_ADVISE = "Say what: make advise MODEL=gpt2-large GPUS=2 GPU=h200"
_MODEL_OF_ZERO = "Say what: make compare-zero MODEL=gpt3-355m GPU=a100-80g"
_MODEL_OF_DRYRUN = "Say what: make dryrun MODEL=gpt3-175b TP=8 PP=16 DP=8"
_WHICH_TABLE = "Say which table: make audit TABLE=figures.md (Markdown or CSV)"
_WHICH_RUN = "Say which run: make resume RUN=runs/…"
_WHICH_TO_STOP = "Say which run: make stop RUN=runs/…; 'make status' shows those that are running."
_WHICH_RECIPE = "Say which run: make export-recipe RUN=runs/… TO=bridge (or nemo)"
_WHICH_KIND = "Say what for: TO=bridge, or TO=nemo for nemo-run's entry too."
_WHICH_FILE = "Say which recipe: make import-recipe FILE=recipe.py (or Megatron-Bridge's YAML)"
_WHICH_TEXT = "Say which text: make prepare-ds INPUT=file.jsonl NAME=name"
_WHICH_NAME = "Say its name: make prepare-ds INPUT=file.jsonl NAME=name"

_OF_EXPERIMENTS = (settings.MODEL,)
_OF_PREDICTED_ZERO = (
    settings.MODEL,
    settings.GPU,
    settings.DTYPE,
    settings.JSON,
    settings.MICRO_BATCH,
    settings.GLOBAL_BATCH,
)
_OF_RESUME = (settings.RUN, settings.STRATEGY)

TOOLS = {
    "plan": Tool("tools.plan", needs=((settings.MODEL, _MODEL_OF_PLAN),)),
    "dryrun": Tool("tools.plan", ("dryrun",), needs=((settings.MODEL, _MODEL_OF_DRYRUN),)),
    "schedules": Tool("tools.plan", ("schedules",)),
    "advise": Tool("tools.plan", ("advise",), needs=((settings.MODEL, _MODEL_OF_ADVISE),)),
    "validate": Tool("tools.plan", ("validate",)),
    "audit": Tool("examples.studies.audit", needs=((settings.TABLE, _WHICH_TABLE),)),
    "report": Tool("tools.report", ("build",)),
    "explain": Tool("tools.report", ("explain",)),
    "bench-scrape": Tool("tests.bench.scrape"),
    "bench-plan": Tool("tests.bench.plan"),
    "bench-preprocess": Tool("tests.bench.preprocess"),
    "compare-zero": Tool("tools.launch", ("experiment", "zero"), given=_OF_EXPERIMENTS),
    "compare-backends": Tool("tools.launch", ("experiment", "backends"), given=_OF_EXPERIMENTS),
    "compare-moe": Tool("tools.launch", ("experiment", "moe"), given=_OF_EXPERIMENTS),
    "compare-pipelines": Tool("tools.launch", ("experiment", "pipelines"), given=_OF_EXPERIMENTS),
    "resume": Tool(
        "tools.launch", ("resume",), needs=((settings.RUN, _WHICH_RUN),), given=_OF_RESUME
    ),
    "stop": Tool("tools.launch", ("stop",), needs=((settings.RUN, _WHICH_TO_STOP),)),
    "export-recipe": Tool(
        "tools.launch",
        ("export-recipe",),
        needs=((settings.RECIPE_OF, _WHICH_RECIPE), (settings.RECIPE_KIND, _WHICH_KIND)),
    ),
    "import-recipe": Tool(
        "tools.launch", ("import-recipe",), needs=((settings.RECIPE_FILE, _WHICH_FILE),)
    ),
    "prepare-ds": Tool(
        "tools.launch",
        ("module", "tools.preprocess", "--append-eod", "--tokenizer", "gpt2"),
        needs=((settings.INPUT, _WHICH_TEXT), (settings.DATASET, _WHICH_NAME)),
    ),
    "prepare-ds-sample": Tool(
        "tools.launch",
        ("module", "tools.preprocess", "sample", "--output-prefix", "owt-ds/sample"),
    ),
    "prepare-ds-openwebtext-10k": Tool(
        "tools.launch",
        (
            "module",
            "tools.preprocess",
            "hub",
            "vuiseng9/openwebtext-10k",
            "--output-prefix",
            "owt-ds/openwebtext-10k",
        ),
    ),
}
"""Targets with another command than their name; the rest are commands of `tools.launch`, or train."""

COMMANDS = frozenset(
    (
        "demo",
        "parity",
        "list",
        "image",
        "reproduce",
        "sweep",
        "soak",
        "status",
        "calibrate",
        "import-hf",
        "export-hf",
        "verify-hf",
        "verify-matrix",
        "verify-fuzz",
        "verify-bf16",
        "bench-gpu",
        "bench-ledger",
        "bench-auto",
        "loss-curve",
    )
)


def calls_of(target: str, environment: Mapping[str, str]) -> list[ToolCall]:
    """The commands of a make target, in order.

    Args:
        target: Its name.
        environment: Variables as make exports them, its command line's among them.

    Raises:
        LaunchError: The target does not use a variable, a variable is not of its kind, or one that the
            target needs is missing.
    """
    with wrong_settings_refused():
        check_given(given_names(environment.get("MAKEFLAGS", "")), target)
        for setting in settings.SETTINGS:
            if setting.used_by(target):
                setting.value(environment)  # Some are read only after hours of training.
        if target.startswith(TRACE):
            return _trace(target, environment)
        if target == "explain":
            environment = _single_runs_named(environment)
        call = _call_of(target, environment)
    runs = ROOT / (settings.RUNS.value(environment) or "runs")
    if target == "report" and any(runs.glob("*/job.json")):
        return [
            ToolCall("tools.launch", ("status", "--quiet")),
            call,
        ]  # Record jobs that Slurm ended.
    return [call]


def given_names(makeflags: str) -> list[str]:
    """Names of the variables on make's command line, from the environment's MAKEFLAGS."""
    return [match[1] for match in _VARIABLE.finditer(makeflags.partition("-- ")[2])]


def _call_of(target: str, environment: Mapping[str, str]) -> ToolCall:
    tool = _predicting(environment) if target == "compare-zero" else TOOLS.get(target)
    if tool is None:
        command = "verify" if target.startswith(VERIFY) else "target"
        return ToolCall("tools.launch", (target,) if target in COMMANDS else (command, target))
    for setting, sentence in tool.needs:
        if setting.value(environment) is None:
            raise LaunchError(sentence)
    known = None if tool.given is None else {setting.name for setting in tool.given}
    passed = {k: v for k, v in environment.items() if known is None or k in known}
    words = [*tool.words, *options_of(target, passed)]
    planning = target in ("plan", "advise")
    if planning and settings.CALIBRATION.value(environment) is None:
        words += _measured_here(environment)
    if settings.READINGS.value(environment) is None:
        # Runs of another folder may be somebody else's: READINGS= adds them.
        reporting = target == "report" and settings.RUNS.value(environment) is None
        if reporting or (planning and OWN_READINGS.is_file()):
            words += ["--readings", str(OWN_READINGS)]
    return ToolCall(tool.module, tuple(words))


def _predicting(environment: Mapping[str, str]) -> Tool:
    """`compare-zero` trains; with GPU= it is a prediction for that device."""
    if settings.GPU.value(environment) is None:
        for setting in (settings.DTYPE, settings.JSON):
            if setting.value(environment):
                raise LaunchError(
                    f"{setting.name}= of compare-zero is the prediction's; name a device too, such as "
                    "GPU=a100-80g."
                )
        return TOOLS["compare-zero"]
    return Tool(
        "examples.studies.zero", (), ((settings.MODEL, _MODEL_OF_ZERO),), _OF_PREDICTED_ZERO
    )


def _single_runs_named(environment: Mapping[str, str]) -> Mapping[str, str]:
    """RUNS= of `explain` is the runs folder; words that are run folders, as it once took, are RUN='s."""
    text = environment.get(settings.RUNS.name, "")
    named = text.split()
    if not named or not all(is_run_folder(ROOT / word) for word in named):
        return environment
    every = " ".join(filter(None, (environment.get(settings.EXPLAINED.name), text)))
    return {**environment, settings.RUNS.name: "", settings.EXPLAINED.name: every}


def _measured_here(environment: Mapping[str, str]) -> list[str]:
    """What `make calibrate` measured on this machine's own devices, if it did."""
    try:
        gpu = device_by_key(settings.GPU.value(environment) or "h200")
    except UnknownHardwareError:  # The planner says so, for every way to call it.
        return []
    path = Path("runs") / calibration_file(gpu.key)
    return ["--calibration", str(path)] if (ROOT / path).is_file() else []


def _trace(target: str, environment: Mapping[str, str]) -> list[ToolCall]:
    traced = target.removeprefix(TRACE)
    train = ToolCall(
        "tools.launch", ("target", f"train-{traced}"), ((settings.ITERS.name, TRACED_ITERATIONS),)
    )
    if settings.DRY_RUN.value(environment):
        return [train]
    return [train, ToolCall("tools.report", ("trace", traced, *options_of(target, environment)))]
