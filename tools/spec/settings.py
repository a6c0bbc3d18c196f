"""Every variable that a make target takes, once: name, kind, help, and which targets use it.

The options of planner, report and preprocessing, what launch reads from the environment, the variables
of `make help` (`settings.mk`) and the refusal of a variable that a target does not use all follow from
this table. `python -m tools.spec.settings` prints `settings.mk`.
"""

from __future__ import annotations

import difflib
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from tools.spec import variables
from tools.spec.recompute import Recompute
from tools.spec.run import Backend, OptimizerName, RuntimeName
from tools.spec.setting import (
    Setting,
    SettingError,
    above_zero,
    checkout,
    dataset_prefix,
    from_one,
    one_of,
    picture,
    positive,
    share,
    switch,
    whole_below,
    words,
)

_NUMBER, _SWITCH, _TEXT = "a whole number above 0", "0 or 1", "a text"
_COMPARE = ("compare-zero", "compare-backends", "compare-moe", "compare-pipelines")
_BENCH = ("loss-curve", "bench-gpu", "bench-ledger", "bench-auto")
_ONE_RUN = ("train-*", "trace-*", "resume", "sweep", "soak", *_BENCH)
_VERIFY = "verify-*-*"
_CELLS = ("verify-matrix", "verify-fuzz")
_MATRIX = (*_CELLS, "verify-bf16")
_HF = "verify-hf"
_TRAIN = (*_ONE_RUN, "demo", "parity", "reproduce", *_COMPARE, _VERIFY)
_OWN_BATCH = tuple(target for target in _TRAIN if target != "compare-pipelines")
"""Where a batch may be chosen: PipeDream's micro batch follows from the others' global one."""
_COUNTED = tuple(target for target in _TRAIN if target != "soak")
"""Where iterations and repetitions may be chosen: a soak's follow from its time."""
_DATA = ("prepare-ds", "prepare-ds-sample", "prepare-ds-openwebtext-10k")
_PLANS = ("plan", "advise")
_NODES = ("train-*", "resume")
_SLURM = ("train-*", "sweep", "doctor")

# What is trained.
ITERS = Setting("ITERS", positive, _NUMBER, "iterations (100; 25 for a tiny model)", _COUNTED)
MICRO_BATCH = Setting(
    "MICRO_BATCH",
    positive,
    _NUMBER,
    "samples in a rank's forward pass",
    (*_OWN_BATCH, "dryrun", "plan"),
    "--micro-batch",
)
GLOBAL_BATCH = Setting(
    "GLOBAL_BATCH",
    positive,
    _NUMBER,
    "samples in an iteration",
    (*_OWN_BATCH, *_PLANS, "dryrun"),
    "--global-batch",
)
SEED = Setting(
    "SEED",
    positive,
    _NUMBER,
    "seed of weights, dropout and sample order (1234)",
    (*_TRAIN, *_MATRIX, _HF),
    default=1234,
)
DROPOUT = Setting(
    "DROPOUT",
    share,
    "a number from 0 up to, not including, 1",
    "attention and hidden dropout",
    _TRAIN,
)
OPTIMIZER = Setting(
    "OPTIMIZER",
    OptimizerName,
    "adamw, muon or megatron-muon",
    "adamw, muon or megatron-muon, which is Megatron's rule under BACKEND=native too",
    _TRAIN,
    default=OptimizerName.ADAMW,
)
DATA = Setting(
    "DATA", str, "a prefix", "data set, such as owt-ds/mine_text_document", (*_TRAIN, _HF)
)
EXTRA: Setting[tuple[str, ...]] = Setting(
    "EXTRA",
    words,
    "flags with closed quotes",
    'further Megatron flags, "--lr 1e-4"',
    (*_TRAIN, _HF),
    default=(),
)
VERIFIED_DTYPE = Setting("DTYPE", str, "fp32 or bf16", "fp32 or bf16 (fp32)", (_VERIFY,))
REFERENCE = Setting(
    "REFERENCE",
    str,
    _TEXT,
    "strategy to compare with (baseline, on one rank), native: plain PyTorch, or hf: transformers",
    (_VERIFY,),
)
RESUMED = Setting(
    "RESUMED",
    str,
    "1 or a strategy",
    "1 compares a resumed run with the undisturbed one; a strategy: the one that saved",
    (_VERIFY,),
)
VERIFY_BROKEN = Setting(
    "VERIFY",
    switch,
    _SWITCH,
    "1 finds the first wrong tensor of a strategy whose losses differ",
    ("parity",),
    default=False,
)
EXTRA_B: Setting[tuple[str, ...]] = Setting(
    "EXTRA_B",
    words,
    "flags with closed quotes",
    "flags of the layout alone, not of its reference",
    (_VERIFY, _HF),
    default=(),
)
MEGATRON_LM_B = Setting(
    "MEGATRON_LM_B",
    checkout,
    "a folder with pretrain_gpt.py",
    "the checkout of the layout alone, not of its reference",
    (_VERIFY,),
)
PLANT = Setting(
    "PLANT",
    str,
    "a Python file, or several with commas between them",
    "Python files, with commas, that each rank runs before it trains",
    (*_TRAIN, _HF),
)
SHARED_START = Setting(
    "SHARED_START", switch, _SWITCH, "start from the shared weights (1 on CPU ranks)", _TRAIN
)
BACKEND = Setting(
    "BACKEND",
    Backend,
    "megatron, native, deepspeed, bare or transformers",
    "megatron, native (PyTorch), deepspeed, or transformers for an imported model",
    _ONE_RUN,
    default=Backend.MEGATRON,
)
FUSED = Setting("FUSED", str, _TEXT, "kernels without Transformer Engine: norm,adamw,…", _TRAIN)
MEGATRON_LM = Setting(
    "MEGATRON_LM",
    checkout,
    "a folder with pretrain_gpt.py",
    "a Megatron-LM checkout, not the wheel",
    (*_TRAIN, *_MATRIX, _HF, "bench-preprocess", "list", "test-slow"),
)
UNTRIED = Setting(
    "UNTRIED",
    switch,
    _SWITCH,
    "1 trains with a Megatron version that was not tried",
    (*_TRAIN, *_MATRIX, _HF),
    default=False,
)

# The parity matrix.
FEATURES: Setting[tuple[str, ...]] = Setting(
    "FEATURES", words, _TEXT, "families, features, levels of the matrix (all)", _CELLS, default=()
)
LAYOUTS: Setting[tuple[str, ...]] = Setting(
    "LAYOUTS", words, _TEXT, "layouts of the matrix (all)", _MATRIX, default=()
)
PAGE = Setting(
    "PAGE",
    Path,
    "a folder",
    "folder of the matrix's pages (beside its cells)",
    _MATRIX,
)
MINUTES = Setting("MINUTES", positive, _NUMBER, "minutes after which no cell is begun", _CELLS)

# Where and how.
DRY_RUN = Setting(
    "DRY_RUN",
    switch,
    _SWITCH,
    "1 prints the command and trains nothing",
    (*_TRAIN, *_CELLS, *_DATA, "image"),
    default=False,
)
RUNS = Setting(
    "RUNS",
    str,
    "a folder",
    "folder of run folders (runs)",
    (*_TRAIN, *_MATRIX, _HF, "status", "report", "explain", "calibrate"),
    "--runs",
)
EXPLAINED = Setting("RUN", words, _TEXT, "run folders to explain (all)", ("explain",), "*")
RUNTIME = Setting(
    "RUNTIME", RuntimeName, "docker or host", "docker or host, on GPUs", (*_TRAIN, *_DATA)
)
IMAGE = Setting(
    "IMAGE", str, "an NGC tag", "one of docker/versions.env", (*_TRAIN, *_DATA, "image")
)
HOST_NETWORK = Setting(
    "HOST_NETWORK", switch, _SWITCH, "1 gives containers this host's network", _TRAIN, default=False
)
SHARE_GPU = Setting(
    "SHARE_GPU", switch, _SWITCH, "1 puts all ranks on one GPU", _TRAIN, default=False
)
NET = Setting(
    "NET",
    str,
    "a rate such as 1gbps or 200mbps",
    "shaped link between CPU ranks, 1gbps; needs root",
    _TRAIN,
)
REPEATS = Setting(
    "REPEATS",
    positive,
    _NUMBER,
    "repetitions of the run; the report pools them",
    _COUNTED,
    default=1,
)
WANDB = Setting("WANDB", switch, _SWITCH, "1 logs to Weights & Biases", _TRAIN, default=False)
WANDB_PROJECT = Setting("WANDB_PROJECT", str, _TEXT, "the names in W&B", _TRAIN)
WANDB_ENTITY = Setting("WANDB_ENTITY", str, _TEXT, "the names in W&B", _TRAIN)
WANDB_MODE = Setting(
    "WANDB_MODE",
    one_of("online", "offline", "disabled"),
    "online, offline or disabled",
    "online, offline or disabled",
    _TRAIN,
)
LEDGER = Setting("LEDGER", switch, _SWITCH, "0 switches the ledgers off", _TRAIN, default=True)
CALIBRATE = Setting(
    "CALIBRATE",
    switch,
    _SWITCH,
    "1 measures this machine before planning",
    ("train-auto-*",),
    default=False,
)
HANG_TIMEOUT = Setting(
    "HANG_TIMEOUT",
    positive,
    "a whole number of seconds above 0",
    "seconds without a log line before the run is ended (900)",
    _TRAIN,
)
SAVE_EVERY = Setting(
    "SAVE_EVERY",
    positive,
    "a whole number of iterations above 0",
    "iterations between checkpoints",
    _ONE_RUN,
)
KEEP = Setting("KEEP", positive, _NUMBER, "checkpoints to keep (2)", _ONE_RUN)
ASYNC_SAVE = Setting(
    "ASYNC_SAVE", switch, _SWITCH, "1 saves in the background, on GPUs", _ONE_RUN, default=False
)
RUN_FOLDER = Setting(
    "RUN_FOLDER", Path, "a folder", "an existing folder for this run", ("train-*",)
)
RUN = Setting("RUN", str, _TEXT, "the run folder to resume or stop", ("resume", "stop"), "*")
STRATEGY = Setting("STRATEGY", str, _TEXT, "resume in another layout", ("resume",), "--strategy")
SOAKED = Setting("STRATEGY", str, _TEXT, "what to train for HOURS=", ("soak",))
HOURS = Setting("HOURS", above_zero, "a number above 0", "hours of a soak, 0.33 or 24", ("soak",))

# Several machines.
NNODES = Setting(
    "NNODES",
    whole_below(100_000, 1),
    "a whole number from 1 to 99999",
    "number of machines",
    _NODES,
)
NODE_RANK = Setting("NODE_RANK", str, _TEXT, "0 to NNODES-1, another on each machine", _NODES)
MASTER_ADDR = Setting("MASTER_ADDR", str, _TEXT, "address of the machine with NODE_RANK=0", _NODES)
MASTER_PORT = Setting(
    "MASTER_PORT",
    whole_below(65536, 1024),
    "a whole number from 1024 to 65535",
    "port on that machine (29500)",
    _NODES,
)
RENDEZVOUS = Setting("RENDEZVOUS", str, "static or c10d", "torchrun's: static or c10d", _NODES)
LAUNCHER = Setting(
    "LAUNCHER",
    one_of("torchrun", "slurm"),
    "torchrun or slurm",
    "slurm submits a job instead of training here",
    _SLURM,
)
NODES = Setting("NODES", positive, _NUMBER, "machines", (*_SLURM, *_PLANS), "--nodes")
SLURM_PARTITION = Setting("SLURM_PARTITION", str, _TEXT, "as in sbatch", _SLURM)
SLURM_ACCOUNT = Setting("SLURM_ACCOUNT", str, _TEXT, "as in sbatch", _SLURM)
SLURM_QOS = Setting("SLURM_QOS", str, _TEXT, "as in sbatch", _SLURM)
SLURM_TIME = Setting("SLURM_TIME", str, _TEXT, "as in sbatch", _SLURM)
SLURM_LINES = Setting("SLURM_LINES", str, _TEXT, 'further sbatch options, "--exclusive"', _SLURM)
SLURM_IMAGE = Setting("SLURM_IMAGE", str, _TEXT, "container image, for Pyxis", _SLURM)
SLURM_SITE = Setting(
    "SLURM_SITE", str, _TEXT, "file of shell lines for every job (site.slurm)", _SLURM
)

# Several runs.
_AXES = 'every combination is trained, DEVICES="1cpu 2cpu"'
MODELS = Setting("MODELS", str, _TEXT, _AXES, ("sweep", "bench-auto"))
STRATEGIES = Setting("STRATEGIES", str, _TEXT, _AXES, ("sweep",))
BACKENDS = Setting("BACKENDS", str, _TEXT, _AXES, ("sweep",))
DEVICES = Setting("DEVICES", str, _TEXT, _AXES, ("sweep", "bench-auto"))
MEASURED_DEVICES = Setting(
    "DEVICES", str, "devices such as 2gpu", "2gpu or 2cpu (all of this machine)", ("calibrate",)
)
ONLY = Setting("ONLY", str, _TEXT, "these settings alone", ("bench-gpu",))
BUDGET = Setting(
    "BUDGET", above_zero, "a number above 0", "seconds for all settings (510)", ("bench-gpu",)
)
TARGET = Setting("TARGET", str, _TEXT, "the training target to use", ("loss-curve", "bench-ledger"))

# Before a run: planner, dry run, schedules.
MODEL = Setting(
    variables.MODEL,
    str,
    _TEXT,
    "a model of make list, or an .args file or config.json (not compare-*)",
    (*_PLANS, "dryrun", *_COMPARE, _VERIFY, "soak", "train-*", "trace-*", "resume"),
    "--model",
)
GPUS = Setting(
    "GPUS", int, "a whole number", "number of devices", (*_PLANS, "import-recipe"), "--gpus"
)
GPU = Setting("GPU", str, _TEXT, "h200, a100-80g, … (h200)", (*_PLANS, "compare-zero"), "--gpu")
GPUS_PER_NODE = Setting(
    "GPUS_PER_NODE",
    int,
    "a whole number",
    "devices per NVLink domain (8, of GB200 72)",
    _PLANS,
    "--gpus-per-node",
)
INTRA = Setting("INTRA", str, _TEXT, "link inside a machine", _PLANS, "--intra")
INTER = Setting("INTER", str, _TEXT, "link between machines", _PLANS, "--inter")
OVERSUBSCRIPTION = Setting(
    "OVERSUBSCRIPTION",
    from_one,
    "a number from 1 up",
    "ports' rate over uplinks' between machines (1)",
    _PLANS,
    "--oversubscription",
)
IMBALANCE = Setting(
    "IMBALANCE",
    from_one,
    "a number from 1 up",
    "tokens of the busiest rank of experts, for the mean (1)",
    _PLANS,
    "--imbalance",
)
SEQ = Setting("SEQ", int, "a whole number", "sequence length", (*_PLANS, "dryrun"), "--seq")
DTYPE = Setting(
    "DTYPE", str, _TEXT, "fp16, bf16 or fp32", (*_PLANS, "dryrun", "compare-zero"), "--dtype"
)
TOKENS = Setting(
    "TOKENS", above_zero, "a number above 0", "tokens to train on", ("plan",), "--tokens"
)
CALIBRATION = Setting(
    "CALIBRATION", Path, "a file", "file of measured constants", _PLANS, "--calibration"
)
VERIFY = Setting(
    "VERIFY",
    whole_below(11),
    "a whole number from 0 to 10",
    "dry-run this many of the best",
    ("plan",),
    "--verify",
    default=0,
)
ALPA = Setting("ALPA", switch, _SWITCH, "1 also solves Alpa's dynamic program", ("plan",), "--alpa")
DP = Setting("DP", positive, _NUMBER, "data-parallel replicas", ("dryrun",), "--data", default=1)
TP = Setting("TP", positive, _NUMBER, "TP degree", ("dryrun",), "--tensor", default=1)
PP = Setting("PP", positive, _NUMBER, "pipeline stages", ("dryrun", "schedules"), "--pipeline")
CP = Setting("CP", positive, _NUMBER, "CP degree", ("dryrun",), "--context", default=1)
EP = Setting(
    "EP", positive, _NUMBER, "EP degree, inside DP and CP", ("dryrun",), "--expert", default=1
)
VPP = Setting(
    "VPP", positive, _NUMBER, "virtual stages per rank", ("dryrun", "schedules"), "--virtual"
)
SP = Setting(
    "SP", switch, _SWITCH, "1 adds sequence parallelism", ("dryrun",), "--sequence-parallel"
)
ZERO1 = Setting(
    "ZERO1", switch, _SWITCH, "1 shards optimizer states", ("dryrun",), "--distributed-optimizer"
)
RECOMPUTE = Setting(
    "RECOMPUTE",
    Recompute.parse,
    "none, selective, full, full block 2 or modules",
    'none, selective, full, "full block 2" or modules, "layernorm mlp"',
    ("dryrun", "plan"),
    "--recompute",
)
RANKS = Setting("RANKS", str, _TEXT, "first,middle,last or numbers", ("dryrun",), "--ranks")
MICROBATCHES = Setting(
    "MICROBATCHES",
    positive,
    _NUMBER,
    "microbatches in an iteration",
    ("schedules",),
    "--microbatches",
)
SVG = Setting(
    "SVG", picture, "a file", "write a picture to this file", ("plan", "schedules"), "--svg"
)
JSON = Setting(
    "JSON",
    switch,
    _SWITCH,
    "1 prints JSON",
    (*_PLANS, "dryrun", "schedules", "validate", "audit", "compare-zero"),
    "--json",
)
LAYOUT = Setting(
    "LAYOUT", str, _TEXT, "times this layout alone, tp8pp16dp8-zero1", ("plan",), "--layout"
)
WHAT_IF = Setting(
    "WHAT_IF",
    str,
    _TEXT,
    'another beside LAYOUT=, "GPU=b200 MICRO_BATCH=2"',
    ("plan",),
    "--what-if",
)
PLANNED_EXTRA = Setting(
    "EXTRA", str, _TEXT, "Megatron flags of the planned model and layout", _PLANS, "--extra"
)
TABLE = Setting("TABLE", str, "a file", "a CSV or Markdown table of figures", ("audit",), "*")
LEAVE_OUT = Setting(
    "LEAVE_OUT",
    str,
    _TEXT,
    "the source that constants are fitted without (each reading's own)",
    ("validate",),
    "--leave-out",
)
READINGS = Setting(
    "READINGS",
    Path,
    "a file",
    "your own readings (all but validate: readings/mine.csv)",
    ("validate", *_PLANS, "report"),
    "--readings",
)

# Weights from and to others.
HF = Setting(
    "HF",
    str,
    _TEXT,
    "a folder with config.json and safetensors, or its name on the hub",
    ("import-hf", _HF),
)
PROVED = Setting("STRATEGIES", str, _TEXT, "layouts to compare with transformers (seven)", (_HF,))
IMPORTED = Setting("NAME", str, _TEXT, "name of the model (HF's)", ("import-hf",))
EXPORTED = Setting("RUN", str, _TEXT, "a run folder, or hub/NAME", ("export-hf",))
TO = Setting("TO", str, _TEXT, "the folder to write", ("export-hf",))

# Recipes of Megatron-Bridge.
RECIPE_OF = Setting(
    "RUN", str, _TEXT, "a run folder, or a target that need not have run", ("export-recipe",), "*"
)
RECIPE_KIND = Setting(
    "TO",
    one_of("bridge", "nemo"),
    "bridge or nemo",
    "bridge, or nemo for nemo-run's entry too",
    ("export-recipe",),
    "--to",
)
RECIPE_FILE = Setting(
    "FILE", str, _TEXT, "recipe.py, recipe.py:function or Bridge's YAML", ("import-recipe",), "*"
)
RECIPE_NAME = Setting(
    "NAME", str, _TEXT, "name of the model (the file's)", ("import-recipe",), "--name"
)

# After a run, and data.
LOGS = Setting("LOGS", words, _TEXT, "Megatron logs, wherever they were made", ("report",), "*")
NAME = Setting("NAME", str, _TEXT, "name of the report or sweep", ("report", "sweep"), "--name")
BASELINE = Setting(
    "BASELINE", str, _TEXT, "an earlier report to compare with", ("report",), "--baseline"
)
LOGS_DEVICE = Setting(
    "DEVICE", str, _TEXT, "GPU that the logs were made on, such as h100", ("report",), "--device"
)
STRICT = Setting(
    "STRICT", switch, _SWITCH, "1 exits with an error on a finding", ("report",), "--strict"
)
DATASET = Setting(
    "NAME", dataset_prefix, _TEXT, "name of the data set", ("prepare-ds",), "--output-prefix"
)
INPUT = Setting(
    "INPUT", str, _TEXT, "text files: JSONL, also .gz or .zst; parquet", ("prepare-ds",), "--input"
)
TOKENIZER = Setting(
    "TOKENIZER", str, _TEXT, "gpt2, or a folder with tokenizer.json", ("prepare-ds",), "--tokenizer"
)
HF_ENDPOINT = Setting(
    "HF_ENDPOINT",
    str,
    _TEXT,
    "mirror of the Hugging Face hub",
    ("prepare-ds-openwebtext-10k", "doctor"),
)
MEGATRON_URL = Setting("MEGATRON_URL", str, _TEXT, "mirror of Megatron-LM's repository", ("image",))

SETTINGS: tuple[Setting[object], ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Setting)
)
"""All of them, in the order of `make help`."""

_OTHERS_VARIABLES = (
    "HF_*",
    "NCCL_*",
    "GLOO_*",
    "TP_SOCKET_*",
    "UCX_*",
    "FI_*",
    "CUDA_*",
    "NVIDIA_*",
    "TORCH*",
    "OMP_*",
    "MKL_*",
    "DS_*",
    "WANDB_*",
    "SLURM_*",
    "SBATCH_*",
    "PYTHON*",
    "PIP_*",
    "UV_*",
    "http*",
    "HTTP*",
    "no_proxy",
    "NO_PROXY",
    "NO_COLOR",
    "COLUMNS",
    "SHELL",
    "KIT_*",
    "VENV_PYTHON",
    "MEGATRON_LM_CHECKOUTS",
)
"""What other programs read, and the Makefile's own."""


def check_given(names: Iterable[str], target: str) -> None:
    """Refuse variables that a target would ignore.

    Args:
        names: Variables given on make's command line.
        target: The make target.

    Raises:
        SettingError: One that no target knows, with the near name, or that this one does not use.
    """
    known = {setting.name for setting in SETTINGS}
    used = {setting.name for setting in SETTINGS if setting.used_by(target)}
    for name in names:
        others = any(fnmatchcase(name, pattern) for pattern in _OTHERS_VARIABLES)
        if name in used or (others and name not in known):
            continue
        near = difflib.get_close_matches(name, sorted(used or known), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}=?" if near else "'make help-all' names those that it takes."
        if name not in known:
            raise SettingError(f"There is no variable {name}; {hint}")
        raise SettingError(f"'make {target}' does not use {name}=; {hint}")


def options_of(target: str, environment: Mapping[str, str]) -> list[str]:
    """The options of a target's tool for the variables that are set; positional words come last.

    Raises:
        SettingError: A value is not of its kind.
    """
    options: list[str] = []
    positional: list[str] = []
    for setting in SETTINGS:
        text = environment.get(setting.name, "")
        if not text or not setting.option or not setting.used_by(target):
            continue
        value = setting.value(environment)
        if setting.option == "*":
            positional += value if isinstance(value, tuple) else [text]
        elif isinstance(value, bool):
            options += [setting.option] if value else []
        else:
            joined = str(value).startswith("-")  # argparse takes such a word for an option.
            options += [f"{setting.option}={value}"] if joined else [setting.option, str(value)]
    return [*options, *positional]


def program(module: str) -> str:
    """What a tool's usage calls it: `parakit plan` where that was typed, else `python -m tools.plan`."""
    return os.environ.get(variables.COMMAND) or f"python -m {module}"


def add_options(
    parser: ArgumentParser, target: str, required: Collection[str] = (), **defaults: object
) -> None:
    """Give a tool's parser the options that the target's variables become.

    Args:
        parser: The tool's.
        target: The make target that calls the tool.
        required: Variables without which the tool cannot run.
        defaults: By variable, where this tool's default is not the table's.
    """
    for setting in SETTINGS:
        if not setting.option.startswith("--") or not setting.used_by(target):
            continue
        default = defaults.get(setting.name, setting.default)
        if setting.read is switch:
            parser.add_argument(setting.option, action="store_true", help=setting.help)
        else:
            parser.add_argument(
                setting.option,
                type=_argument(setting),
                default=default,
                required=setting.name in required,
                help=setting.help,
            )


def _argument[T](setting: Setting[T]) -> Callable[[str], T]:
    def read(text: str) -> T:
        try:
            return setting.read(text)
        except SettingError as error:  # A reader that has a sentence of its own.
            raise ArgumentTypeError(str(error)) from None
        except ValueError:
            raise ArgumentTypeError(f"{text} is not {setting.wanted}") from None

    return read


def make_help() -> str:
    """`settings.mk`: what `make help` prints of the variables.

    A heading names the targets that use its variables; a variable that others use as well, or others
    alone, names them in brackets. Neighbours with the same help share a line.
    """
    lines = ["# Made by `python -m tools.spec.settings > tools/spec/settings.mk`; a test compares."]
    usual: tuple[str, ...] = ()
    for (targets, text), neighbours in groupby(SETTINGS, lambda each: (each.targets, each.help)):
        settings = tuple(neighbours)
        if section := _SECTIONS.get(settings[0]):
            title, usual = section
            lines.append(f"## {title} [{_short(usual)}]")
        names = " ".join(setting.name for setting in settings)
        lines.append(f"##   {names:<15}  {text}{_others(targets, usual)}")
    return "\n".join(lines) + "\n"


_SECTIONS: Mapping[object, tuple[str, tuple[str, ...]]] = {
    ITERS: ("Variables: what is trained", _TRAIN),
    FEATURES: ("Variables: the parity matrix", _MATRIX),
    DRY_RUN: ("Variables: where and how it is trained", _TRAIN),
    SAVE_EVERY: ("Variables: checkpoints", _ONE_RUN),
    NNODES: ("Variables: several machines without Slurm", _NODES),
    LAUNCHER: ("Variables: Slurm", _SLURM),
    MODELS: ("Variables: several runs", ("sweep",)),
    MODEL: ("Variables: planning", ("plan",)),
    DP: ("Variables: dry run and schedules", ("dryrun",)),
    HF: ("Variables: weights from and to Hugging Face", ("import-hf",)),
    RECIPE_OF: ("Variables: recipes of Megatron-Bridge", ("export-recipe",)),
    LOGS: ("Variables: reports", ("report",)),
    DATASET: ("Variables: data", ("prepare-ds",)),
}
"""Headings of `make help`, by the first variable below each, with the targets that mostly use them."""


def _short(targets: Iterable[str]) -> str:
    text = " ".join(targets)
    for group, name in (
        (_TRAIN, "every training target"),
        (_OWN_BATCH, "every training target but compare-pipelines,"),
        (_DATA, "prepare-ds*"),
        (_COMPARE, "compare-*"),
    ):
        text = text.replace(" ".join(group), name)
    return text


def _others(targets: tuple[str, ...], usual: tuple[str, ...]) -> str:
    if targets == usual:
        return ""
    if set(usual) <= set(targets):
        return f" [also {_short(target for target in targets if target not in usual)}]"
    if len(targets) > 4 and set(targets) <= set(usual):
        return f" [not {_short(target for target in usual if target not in targets)}]"
    return f" [{_short(targets)}]"


if __name__ == "__main__":
    print(make_help(), end="")
