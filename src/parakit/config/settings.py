"""The list of make's variables: the name, the kind of value, the meaning and the default of each.

`src/parakit/cli/commands.py` lists which command takes which variable, and `setting.py` parses the
values. This module must run on every Python from 3.6 on, because `make help` prints the list before
anything is set up.
"""

from typing import Any, NamedTuple

NUMBER, SWITCH, TEXT = "a whole number above 0", "0 or 1", "a text"
WORDS, PATH, FOLDER = "flags with closed quotes", "a file", "a folder"
CHECKOUT = "a folder with pretrain_gpt.py"
COUNTS = "a whole number or several with commas"
PLAIN_NAME = "a plain name of letters, digits, '.', '_' and '-'"
"""Kind of a name for a file or a folder. Such a name has no slash, so it cannot point elsewhere."""


class Setting(NamedTuple):
    """Variable of make that users set.

    A command that uses the variable with another meaning or default has a changed copy (`_replace`).
    """

    name: str
    kind: str
    """Kind of value, as an error names it (`ITERS=x is not a whole number above 0.`). `a, b or c`
    is a choice.
    """
    help: str
    """What the variable means. `{default}` stands for the default value."""
    default: Any = None
    """Default value, or a text that is parsed as the kind says. None leaves the choice to the command."""
    option: str = ""
    """Option on a command line; empty means the name, such as `--global-batch`."""
    make_equivalent: str = ""
    """What make takes instead, for an option of `parakit` that is no variable of make; empty for a
    variable.
    """

    @property
    def meaning(self) -> str:
        """The help text with the default value."""
        return self.help.replace("{default}", str(self.default))


# What is trained.
ITERS = Setting("ITERS", NUMBER, "iterations (100; 25 for a tiny model)")
MICRO_BATCH = Setting("MICRO_BATCH", NUMBER, "samples in a rank's forward pass")
GLOBAL_BATCH = Setting("GLOBAL_BATCH", NUMBER, "samples in an iteration")
SEED = Setting("SEED", NUMBER, "seed of weights, dropout and sample order ({default})", 1234)
DROPOUT = Setting(
    "DROPOUT", "a number from 0 up to, not including, 1", "attention and hidden dropout"
)
OPTIMIZER = Setting(
    "OPTIMIZER",
    "adamw, muon or megatron-muon",
    "adamw, muon or megatron-muon, which is Megatron's rule under BACKEND=native too",
)
DATA = Setting(
    "DATA",
    "a data set, or several with weights",
    'data set: NAME= of prepare-ds, or any prefix of .bin/.idx; a blend is "0.3 a 0.7 b"',
)
EXTRA = Setting("EXTRA", WORDS, 'further Megatron flags, "--lr 1e-4"', ())
DTYPE = Setting("DTYPE", TEXT, "fp16, bf16 or fp32")
REFERENCE = Setting(
    "REFERENCE",
    TEXT,
    "strategy to compare with (baseline, on one rank), native: plain PyTorch, or hf: transformers",
)
TRAIN = Setting("TRAIN", TEXT, "strategy of the trainer, such as ep2pp2")
SERVE = Setting(
    "SERVE", TEXT, "engine that serves: hf, megatron, a strategy, or a folder that an engine wrote"
)
RESUMED = Setting(
    "RESUMED",
    "1 or a strategy",
    "1 compares a resumed run with the undisturbed one; a strategy: the one that saved",
)
EXTRA_B = Setting("EXTRA_B", WORDS, "flags of the strategy alone, not of its reference", ())
MEGATRON_LM_B = Setting(
    "MEGATRON_LM_B",
    CHECKOUT,
    "the checkout of the strategy alone, not of its reference",
    make_equivalent='ARGS="--megatron-lm-b FOLDER"',
)
PATCH_FILE = Setting(
    "PATCH_FILE",
    "a Python file, or several with commas between them",
    "Python files, with commas, that each rank runs before it trains",
)
SHARED_START = Setting("SHARED_START", SWITCH, "start from the shared weights (1 on CPU ranks)")
BACKEND = Setting(
    "BACKEND",
    "megatron, native, deepspeed, bare or transformers",
    "megatron, native (PyTorch), deepspeed, or transformers for an imported model",
)
FUSED = Setting("FUSED", TEXT, "kernels without Transformer Engine: norm,adamw,…")
MEGATRON_LM = Setting("MEGATRON_LM", CHECKOUT, "a Megatron-LM checkout, not the wheel")
ALLOW_UNKNOWN_MEGATRON = Setting(
    "ALLOW_UNKNOWN_MEGATRON",
    SWITCH,
    "1 trains with a Megatron version that the kit does not know",
    False,
)

# A search in Megatron's history.
GOOD = Setting("GOOD", TEXT, "a commit of MEGATRON_LM=, where the search begins")
BAD = Setting("BAD", TEXT, "a commit that is verified otherwise, before or after GOOD=")
AGAINST = Setting(
    "AGAINST",
    "reference or good",
    "good compares with the same strategy in GOOD='s Megatron ({default})",
    "reference",
)

# Two versions of Megatron.
A = Setting(
    "A", TEXT, "first version: the installed release, or a release or commit of MEGATRON_LM="
)
B = Setting("B", TEXT, "second version, which is compared with A=")

# The parity matrix.
FEATURES = Setting("FEATURES", "words", "families, features, levels of the matrix (all)", ())
PAGE = Setting(
    "PAGE",
    FOLDER,
    "folder of the matrix's pages (beside its cells)",
    make_equivalent='ARGS="--page docs"',
)
CHANGED = Setting(
    "CHANGED",
    "words",
    "files of Megatron, or a range of its commits: only cells that execute them",
    (),
)
EXECUTED = Setting(
    "EXECUTED",
    SWITCH,
    "1 records which files of Megatron each strategy and level executes",
    False,
    make_equivalent="ARGS=--executed",
)
MINUTES = Setting("MINUTES", NUMBER, "minutes after which no cell is begun")

# Where and how.
DRY_RUN = Setting("DRY_RUN", SWITCH, "1 prints the command and trains nothing", False)
RUNS = Setting("RUNS", FOLDER, "folder of run folders (runs)")
RUNTIME = Setting(
    "RUNTIME",
    "docker, podman, apptainer or host",
    "docker, podman, apptainer or host; CPU ranks run on the host unless a container is asked for",
)
IMAGE = Setting("IMAGE", "an NGC tag", "a tag of docker/versions.env, 25.06-py3 to 26.06-py3")
BASE_IMAGE = Setting("BASE_IMAGE", TEXT, "nvcr.io/nvidia/pytorch on a mirror registry, without tag")
HOST_NETWORK = Setting("HOST_NETWORK", SWITCH, "1 gives containers this host's network", False)
SHARE_GPU = Setting("SHARE_GPU", SWITCH, "1 puts all ranks on one GPU", False)
NET = Setting(
    "NET", "a rate such as 1gbps or 200mbps", "shaped link between CPU ranks, 1gbps; needs root"
)
REPEATS = Setting("REPEATS", NUMBER, "repetitions of the run; the report pools them", 1)
WANDB = Setting("WANDB", SWITCH, "1 logs to Weights & Biases", False)
LEDGER = Setting("LEDGER", SWITCH, "0 switches the ledgers off", True)
CALIBRATE = Setting("CALIBRATE", SWITCH, "1 measures this machine before planning", False)
HANG_TIMEOUT = Setting(
    "HANG_TIMEOUT",
    "a whole number of seconds above 0",
    "seconds without a log line before the run is ended ({default})",
    900,
)
SAVE_EVERY = Setting(
    "SAVE_EVERY", "a whole number of iterations above 0", "iterations between checkpoints"
)
KEEP = Setting("KEEP", NUMBER, "checkpoints to keep ({default})", 2)
GRACE = Setting(
    "GRACE",
    "a whole number of seconds above 0",
    "seconds for a last checkpoint when the run is stopped (as long as saves took)",
)
ASYNC_SAVE = Setting("ASYNC_SAVE", SWITCH, "1 saves in the background, on GPUs", False)
RUN_FOLDER = Setting("RUN_FOLDER", FOLDER, "an existing folder for this run")
RUN = Setting("RUN", TEXT, "a run folder")
STRATEGY = Setting("STRATEGY", TEXT, "a strategy")
HOURS = Setting(
    "HOURS",
    "a number above 0",
    "hours of a soak, 0.33 or 24",
    make_equivalent='ARGS="--hours 0.33"',
)

# Several machines.
NNODES = Setting("NNODES", "a whole number from 1 to 99999", "number of machines")
NODE_RANK = Setting("NODE_RANK", TEXT, "0 to NNODES-1, another on each machine")
MASTER_ADDR = Setting("MASTER_ADDR", TEXT, "address of the machine with NODE_RANK=0")
MASTER_PORT = Setting(
    "MASTER_PORT",
    "a whole number from 1024 to 65535",
    "port on that machine ({default})",
    29500,
)
RENDEZVOUS = Setting("RENDEZVOUS", "static or c10d", "torchrun's: static or c10d")
LAUNCHER = Setting("LAUNCHER", "torchrun or slurm", "slurm submits a job instead of training here")
NODES = Setting("NODES", NUMBER, "machines")
SLURM_PARTITION = Setting("SLURM_PARTITION", TEXT, "as in sbatch")
SLURM_ACCOUNT = Setting("SLURM_ACCOUNT", TEXT, "as in sbatch")
SLURM_QOS = Setting("SLURM_QOS", TEXT, "as in sbatch")
SLURM_TIME = Setting("SLURM_TIME", TEXT, "as in sbatch (04:00:00)")
SLURM_GRES = Setting("SLURM_GRES", TEXT, "GPUs of a node as in sbatch, gpu:h200:8")
SLURM_LINES = Setting("SLURM_LINES", TEXT, 'further sbatch options, "--exclusive"')
SLURM_IMAGE = Setting("SLURM_IMAGE", TEXT, "container image, for Pyxis")
SLURM_SITE = Setting("SLURM_SITE", TEXT, "file of shell lines for every job (site.slurm)")

# Several runs.
MODELS = Setting("MODELS", TEXT, 'every combination is trained, DEVICES="1cpu 2cpu"')
STRATEGIES = Setting("STRATEGIES", TEXT, 'every combination is trained, DEVICES="1cpu 2cpu"')
BACKENDS = Setting("BACKENDS", TEXT, 'every combination is trained, DEVICES="1cpu 2cpu"')
DEVICES = Setting("DEVICES", TEXT, 'every combination is trained, DEVICES="1cpu 2cpu"')
ONLY = Setting("ONLY", TEXT, "these settings alone", make_equivalent='ARGS="--only tuned"')
BUDGET = Setting(
    "BUDGET",
    "a number above 0",
    "seconds for all settings (510)",
    make_equivalent='ARGS="--budget 300"',
)
TARGET = Setting(
    "TARGET",
    TEXT,
    "the training target to use",
    make_equivalent='ARGS="--target train-tp2-gpt2-tiny-2cpu"',
)

# Before a run: planner, dry run, schedules.
MODEL = Setting(
    "MODEL", TEXT, "a model of make list, or an .args file or config.json (not compare-*)"
)
GPUS = Setting("GPUS", "a whole number", "number of devices")
GPU = Setting("GPU", TEXT, "h200, a100-80g, …")
GPUS_PER_NODE = Setting(
    "GPUS_PER_NODE",
    "a whole number",
    "devices per NVLink domain (8, of GB200 72)",
    make_equivalent='ARGS="--gpus-per-node 8"',
)
INTRA = Setting("INTRA", TEXT, "link inside a machine", make_equivalent='ARGS="--intra nvlink4"')
INTER = Setting("INTER", TEXT, "link between machines")
NICS = Setting("NICS", "a whole number", "network ports of a machine (one a device)")
OVERSUBSCRIPTION = Setting(
    "OVERSUBSCRIPTION",
    "a number from 1 up",
    "ports' rate over uplinks' between machines (1)",
    make_equivalent='ARGS="--oversubscription 4"',
)
IMBALANCE = Setting(
    "IMBALANCE", "a number from 1 up", "tokens of the busiest rank of experts, for the mean (1)"
)
SEQ = Setting("SEQ", "a whole number", "sequence length")
TOKENS = Setting(
    "TOKENS", "a number above 0", "tokens to train on", make_equivalent='ARGS="--tokens 300e9"'
)
CALIBRATION = Setting(
    "CALIBRATION", PATH, "file of measured constants", make_equivalent='ARGS="--calibration FILE"'
)
PEFT = Setting(
    "PEFT", TEXT, 'lora trains adapters alone: "lora rank=16 targets=linear_qkv weights=nf4"'
)
DOCUMENT_LENGTH = Setting(
    "DOCUMENT_LENGTH",
    NUMBER,
    "mean tokens of the documents that a sample packs; attention stays inside documents",
    make_equivalent='ARGS="--document-length 512"',
)
RECIPE = Setting(
    "RECIPE",
    "defaults, tuned or all",
    "switches that a search tries: tuned, or all with fp8 (defaults)",
)
VERIFY = Setting("VERIFY", "a whole number from 0 to 10", "dry-run this many of the best", 0)
ALPA = Setting("ALPA", SWITCH, "1 also solves Alpa's dynamic program", False)
ALL = Setting("ALL", SWITCH, "1 also prints the tables and further answers", False)
FOR = Setting(
    "FOR",
    "megatron, bridge or torchtitan",
    "prints the planned run as all of Megatron's flags, Megatron-Bridge's overrides or torchtitan's TOML",
)
MTBF = Setting(
    "MTBF", "a number above 0", "hours between failures of one GPU, for GPUS= with several numbers"
)
CHECKPOINT_SECONDS = Setting(
    "CHECKPOINT_SECONDS",
    "a number above 0",
    "seconds for which a checkpoint stops training, for MTBF= ({default})",
    60.0,
    make_equivalent='ARGS="--checkpoint-seconds 30"',
)
RESTART_SECONDS = Setting(
    "RESTART_SECONDS",
    "a number above 0",
    "seconds from a failure to the next step, for MTBF= ({default})",
    600.0,
    make_equivalent='ARGS="--restart-seconds 300"',
)
LARGEST = Setting("LARGEST", SWITCH, "1 sizes the largest model that fits, by strategy", False)
DP = Setting(
    "DP", NUMBER, "data-parallel replicas", 1, "--data", make_equivalent="STRATEGY=tp8pp16dp8-zero1"
)
TP = Setting("TP", NUMBER, "TP degree", 1, "--tensor", make_equivalent="STRATEGY=tp8pp16dp8-zero1")
PP = Setting(
    "PP",
    NUMBER,
    "pipeline stages",
    1,
    "--pipeline",
    make_equivalent='STRATEGY=tp8pp16dp8-zero1 of dryrun, and ARGS="--pipeline 4" of schedules',
)
CP = Setting("CP", NUMBER, "CP degree", 1, "--context", make_equivalent="STRATEGY=tp8pp16dp8-zero1")
EP = Setting(
    "EP",
    NUMBER,
    "EP degree, inside DP and CP",
    1,
    "--expert",
    make_equivalent="STRATEGY=tp8pp16dp8-zero1",
)
VPP = Setting(
    "VPP",
    NUMBER,
    "virtual stages per rank",
    1,
    "--virtual",
    make_equivalent='STRATEGY=tp8vpp2dp8-zero1 of dryrun, and ARGS="--virtual 2" of schedules',
)
SP = Setting(
    "SP",
    SWITCH,
    "1 adds sequence parallelism",
    False,
    "--sequence-parallel",
    make_equivalent="STRATEGY=tp8pp16dp8-zero1",
)
ZERO1 = Setting(
    "ZERO1",
    SWITCH,
    "1 shards optimizer states",
    False,
    "--distributed-optimizer",
    make_equivalent="STRATEGY=tp8pp16dp8-zero1",
)
RECOMPUTE = Setting(
    "RECOMPUTE",
    "none, selective, full, full block 2 or modules",
    'none, selective, full, "full block 2" or modules, "layernorm mlp"',
)
RANKS = Setting(
    "RANKS",
    TEXT,
    "first,middle,last or numbers",
    "first,last",
    make_equivalent='ARGS="--ranks first,middle,last"',
)
MICROBATCHES = Setting(
    "MICROBATCHES",
    NUMBER,
    "microbatches in an iteration",
    make_equivalent='ARGS="--microbatches 8"',
)
SVG = Setting("SVG", "a file to write", "write a picture to this file")
JSON = Setting("JSON", SWITCH, "1 prints JSON", False)
WHAT_IF = Setting("WHAT_IF", TEXT, 'another beside STRATEGY=, "GPU=b200 MICRO_BATCH=2"')
LEAVE_OUT = Setting(
    "LEAVE_OUT",
    TEXT,
    "the source that constants are fitted without (each measurement's own)",
    make_equivalent='ARGS="--leave-out SOURCE"',
)
READINGS = Setting("READINGS", PATH, "your own measurements (all but validate: readings/mine.csv)")

# Weights from and to other formats, and recipes.
HF = Setting("HF", TEXT, "a folder with config.json and safetensors, or its name on the hub")
TO = Setting("TO", TEXT, "the folder to write")
CKPT = Setting(
    "CKPT", FOLDER, "a checkpoint, a folder or a run that holds some, or a captured step"
)
COMPARE = Setting(
    "COMPARE", FOLDER, "another checkpoint, a folder of Hugging Face's, a reference's step"
)
DUMPS = Setting(
    "DUMPS", "words", "flight recorder dumps, stacks, logs of a hang; folders or files", ()
)

# After a run, and data.
SCRAPE = Setting(
    "SCRAPE",
    SWITCH,
    "print what the logs say and write no report",
    False,
    make_equivalent="ARGS=--scrape",
)
LOGS = Setting("LOGS", "words", "training logs, wherever made; repeats as tp2=1.log,2.log", ())
NAME = Setting("NAME", PLAIN_NAME, "name of the report or sweep")
CHAPTER = Setting("CHAPTER", TEXT, "chapter of the tutorial: dp, tp, sp, cp, pp or ep (all)")
BASELINE = Setting("BASELINE", TEXT, "an earlier report to compare with")
DEVICE = Setting("DEVICE", TEXT, "GPU that the logs were made on, such as h100")
STRICT = Setting(
    "STRICT",
    SWITCH,
    "1 exits with 1 on any change but a new row, with 3 on an undecided time",
    False,
)
CALCULON = Setting(
    "CALCULON",
    FOLDER,
    "a checkout of calculon-ai/calculon",
    make_equivalent='ARGS="--calculon ../calculon"',
)
SIMUMAX = Setting(
    "SIMUMAX",
    FOLDER,
    "a checkout of MooreThreads/SimuMax",
    make_equivalent='ARGS="--simumax ../SimuMax"',
)
TOKENIZER = Setting(
    "TOKENIZER",
    TEXT,
    "gpt2, or a folder with tokenizer.json",
    make_equivalent='ARGS="--tokenizer FOLDER"',
)
PORT = Setting(
    "PORT",
    "a whole number from 1024 to 65535",
    "port of this machine ({default})",
    8000,
    make_equivalent='ARGS="--port 8001"',
)
INPUT = Setting("INPUT", TEXT, "text files: JSONL, also .gz or .zst; parquet; .txt")

# Options without a variable of their own.
ARGS = Setting(
    "ARGS", WORDS, 'further options of the command, as its --help lists them: "--hours 0.33"', ()
)

NODE_SETTINGS = (NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, RENDEZVOUS)
SLURM_RESOURCES = (SLURM_PARTITION, SLURM_ACCOUNT, SLURM_QOS, SLURM_TIME, SLURM_GRES)
"""Options of sbatch, named without `SLURM_`."""
SLURM_SETTINGS = (LAUNCHER, NODES, *SLURM_RESOURCES, SLURM_LINES, SLURM_IMAGE, SLURM_SITE)

_ALL = tuple(value for value in list(globals().values()) if isinstance(value, Setting))

SETTINGS = tuple(setting for setting in _ALL if not setting.make_equivalent)
"""Every variable of make, in the order of `make help-all`."""

OPTIONS = tuple(setting for setting in _ALL if setting.make_equivalent)
"""Options of `parakit` that are no variables of make."""

RENAMED = {
    "FILE": "INPUT",
    "LAYOUT": "STRATEGY",
    "LAYOUTS": "STRATEGIES",
    "PLANT": "PATCH_FILE",
    "UNTRIED": "ALLOW_UNKNOWN_MEGATRON",
}
"""Old names of variables, with the present names; the old names are refused."""

REPLACED = {
    **{setting.name: setting.make_equivalent for setting in OPTIONS},
    "TABLE": "READINGS=figures.csv of validate",
}
"""Old variables that no variable replaces, with what to use instead; the old variables are refused.
"""
