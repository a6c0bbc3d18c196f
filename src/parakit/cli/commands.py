"""The table of commands: name, handler, help, and the variables that each takes with their meaning.

`make NAME`, `parakit NAME`, `make help`, `--help`, completion and the refusal of unused variables follow from this
table. A new command is an entry here and a handler. The module is plain data for any Python from 3.6 on, like
`src/parakit/config/settings.py` and `variable_groups.py`, which have the variables.
"""

from typing import NamedTuple

from parakit.config import settings as v
from parakit.config.settings import Setting
from parakit.config.variable_groups import (
    BATCH,
    COMPARED,
    LASTING,
    MEGATRON,
    ONE_RUN,
    PLAN_CALIBRATE,
    PLAN_COMMAND,
    READ_RUNS,
    SAVING,
    TRAIN,
    TRAINING,
)
from parakit.config.variable_groups import replace_meaning as _meaning


class Command(NamedTuple):
    """One command. A `*` in its name stands for any text."""

    name: str
    handler: str
    """`module:function`, called by `dispatch.call_handler`; empty if the Makefile has the command's recipe."""
    help: str
    variables: "tuple[Setting, ...]" = ()
    required: "tuple[str, ...]" = ()
    """Names of variables that must be set. `A|B` means that one of two must be set."""
    example: str = ""
    """An example of variables, for the refusal if a required one is missing."""
    fixed: "tuple[tuple[str, object], ...]" = ()
    """Names and values of further arguments of the handler."""
    in_clone: str = ""
    """`module:function` that fills in variables from files of this clone; empty if nothing is filled in."""
    packages: "tuple[str, ...] | None" = None
    """Packages beyond the wheel's base that the command needs; None if it needs a clone of the repository."""
    is_usual: bool = False
    """True if `make help` shows the command. `make help-all` shows all."""
    on_host: bool = False
    """True if the kit's image lacks what the command needs."""


_OF_MATRIX = _meaning(v.STRATEGIES, "strategies of the matrix (all)", kind="words", default=())
_CELLS = (v.FEATURES, _OF_MATRIX, v.PAGE, v.MINUTES, v.SEED, *MEGATRON, v.DRY_RUN, v.RUNS)
_CONTAINER = (v.DRY_RUN, v.RUNTIME, v.IMAGE)
_PREDICTION = (
    _meaning(v.GPU, "predicts for this device, such as h200, and trains nothing"),
    v.DTYPE,
    v.JSON,
)
"""Variables of an experiment that can also be predicted."""
BENCH_NAME = _meaning(v.NAME, "the bench (all that take minutes)", option="NAME")
BENCH = Command(
    "bench",
    "parakit.cli.bench:run_default_benches",
    "run the benches scrape, plan, preprocess and ledger, or one of the list below: NAME=soak",
    (BENCH_NAME,),
)
_A_PLAN = "MODEL=gpt2-large GPUS=2 GPU=h200"
_EXPERIMENT = "parakit.experiments.commands:run_named_experiment"
_CLONE = "parakit.cli.clone"

# fmt: off
SECTIONS = {
    "First steps": (
        Command("setup", "", "install requirements.txt into .venv; other targets do so if needed"),
        Command("demo", _EXPERIMENT, "train six strategies of gpt2-tiny on CPU ranks, and write a report", TRAINING,
            fixed=(("name", "demo"),), is_usual=True),
        Command("parity", "parakit.experiments.commands:run_parity_check",
            "check that losses of all strategies agree: MEGATRON_LM= VERIFY=",
            (*TRAINING, _meaning(v.VERIFY,
             "1 finds the first wrong tensor of a strategy whose losses differ", kind=v.SWITCH,
             default=False)),
            is_usual=True),
        Command("doctor", "", "check what this machine has and lacks, with fixes: LAUNCHER=slurm",
            v.SLURM_SETTINGS, is_usual=True),
        Command("list", "parakit.launch.listing:print_list",
            "list models, strategies, and the targets that this machine can run", (v.MEGATRON_LM,), is_usual=True),
    ),
    "Data": (
        Command("prepare-ds-sample", "parakit.launch.runtime:prepare_dataset",
            "make owt-ds/sample from text that comes with Python", _CONTAINER,
            fixed=(("module_arguments", ("sample", "--output-prefix", "owt-ds/sample")),)),
        Command("prepare-ds-openwebtext-10k", "parakit.launch.runtime:prepare_dataset",
            "download and prepare the published data set", _CONTAINER,
            fixed=(("module_arguments", ("hub", "vuiseng9/openwebtext-10k", "--output-prefix",
             "owt-ds/openwebtext-10k")),)),
        Command("prepare-ds", "parakit.launch.runtime:prepare_own_text",
            "make owt-ds/NAME from your own text: INPUT=file.jsonl NAME=name",
            (_meaning(v.NAME, "name of the data set"), v.INPUT, v.TOKENIZER, *_CONTAINER, _meaning(v.ARGS,
             'further options of python -m tools.preprocess')),
            required=("INPUT", "NAME"), example="INPUT=file.jsonl NAME=name", is_usual=True),
        Command("install-dependencies", "", "the name of setup in the published kit"),
        Command("setup-deepspeed", "", "install the package that BACKEND=deepspeed needs into .venv"),
        Command("setup-hf", "", "install transformers, the reference of verify-hf, into .venv"),
        Command("setup-bridge", "", "install .venv-bridge, which checks and reads recipes of Megatron-Bridge"),
    ),
    "Training, on one machine or several": (
        Command("train-auto-*", "parakit.launch.auto:train_auto",
            "train with the strategy that the planner chooses for this machine", (*TRAIN, v.CALIBRATE)),
        Command("train-*", "parakit.launch.train:start_target",
            "train <strategy>-<model>-<N>cpu or gpu: ITERS= DATA= EXTRA= …", TRAIN, is_usual=True),
        Command("trace-*", f"{_CLONE}:train_and_trace",
            "train a few iterations, and draw one as a picture and for Perfetto", (*ONE_RUN, v.MODEL)),
        Command("verify-matrix", "parakit.experiments.matrix.commands:verify_matrix",
            "verify each pair of a feature and a strategy; resumable: FEATURES= CHANGED= MINUTES=",
            (*_CELLS, v.CHANGED, v.EXECUTED)),
        Command("verify-fuzz", "parakit.experiments.matrix.commands:run_fuzz",
            "verify random configurations, and shrink wrong ones: SEED= MINUTES=30", _CELLS),
        Command("verify-history", "tests.verify.history:verify_history",
            "verify Megatron-LM before and after its merged fixes: wrong, then right", (v.MEGATRON_LM,)),
        Command("verify-hf", "parakit.experiments.verify.hf:verify_hf",
            "compare 20 steps of seven strategies with transformers: HF= or random models",
            (v.HF, _meaning(v.STRATEGIES, "strategies to compare with transformers (seven)"), *(v.SEED,
             v.DATA, v.EXTRA, v.EXTRA_B, v.PATCH_FILE, *MEGATRON, v.RUNS))),
        Command("verify-logprob", "parakit.experiments.logprob.command:verify_logprob",
            "explain why log probabilities of training and generation differ: TRAIN=tp2 SERVE=hf MODEL=",
            (v.TRAIN, v.SERVE, v.MODEL, _meaning(v.CKPT, "the trainer's checkpoint"),
             _meaning(v.HF, "the model that is served, a folder or its name on the hub"),
             _meaning(v.DTYPE, "fp32 or bf16 (fp32)", kind="fp32 or bf16"), *(v.SEED, v.DATA, v.DROPOUT, v.EXTRA,
             _meaning(v.EXTRA_B, "flags of the serving side alone"), v.PATCH_FILE, *MEGATRON, v.RUNS, v.JSON)),
            required=("TRAIN", "SERVE"), example="TRAIN=tp2 SERVE=hf MODEL=gpt2-tiny"),
        Command("bisect", "parakit.experiments.verify.bisect:bisect_megatron",
            "find the commit of Megatron with which a verification changes: GOOD= BAD= STRATEGY=",
            (_meaning(v.MEGATRON_LM, "a clone of Megatron-LM with its history"), v.GOOD, v.BAD, v.AGAINST,
             _meaning(v.STRATEGY, "the strategy to verify"), *(v.MODEL, v.ITERS, *BATCH, v.SEED, v.DATA, v.EXTRA),
             _meaning(v.DTYPE, "fp32 or bf16 (fp32)", kind="fp32 or bf16"),
             *(v.REFERENCE, v.RESUMED, v.EXTRA_B, v.PATCH_FILE, v.RUNS)),
            required=("MEGATRON_LM", "GOOD", "BAD", "STRATEGY"),
            example="MEGATRON_LM=../Megatron-LM GOOD=core_v0.18.0 BAD=core_v0.19.0 STRATEGY=tp2"),
        Command("changed", "parakit.experiments.matrix.changed:compare_versions",
            "list what cells of the matrix do differently in two versions of Megatron: A= B=",
            (_meaning(v.MEGATRON_LM, "a clone of Megatron-LM that has A= and B="), v.A, v.B,
             *(v.FEATURES, _OF_MATRIX, v.PAGE, v.MINUTES, v.DRY_RUN, v.RUNS)),
            required=("A", "B"), example="MEGATRON_LM=../Megatron-LM A=0.18.2 B=0.19.2"),
        Command("verify-*", "parakit.experiments.verify.command:verify",
            "find the first wrong tensor of a run: DTYPE= REFERENCE= EXTRA_B=",
            (*TRAINING, v.MODEL, _meaning(v.DTYPE, "fp32 or bf16 (fp32)", kind="fp32 or bf16"),
             *(v.REFERENCE, v.RESUMED, v.EXTRA_B, v.MEGATRON_LM_B)),
            is_usual=True),
        Command("status", "parakit.launch.status:watch_runs",
            "show all runs: queued, running, ended; loss, time left", (READ_RUNS,), is_usual=True),
        Command("stop", "parakit.launch.stop:stop_run", "end a running run from any terminal: RUN=runs/…",
            (_meaning(v.RUN, "the run folder to stop", option="RUN"),), required=("RUN",),
            example="RUN=runs/…; 'make status' shows those that are running"),
        Command("resume", "parakit.launch.resume:resume_run",
            "resume a run from its newest checkpoint: RUN=runs/… STRATEGY=pp2",
            (_meaning(v.RUN, "the run folder to resume", option="RUN"), _meaning(v.STRATEGY,
             "resume in another strategy"), _meaning(v.CKPT, "a folder written by 'make reshard', to resume from"),
             *(*ONE_RUN, v.MODEL, *v.NODE_SETTINGS)),
            required=("RUN",), example="RUN=runs/…", is_usual=True),
        Command("image", "parakit.cluster.container.image:build_image", "build the image for RUNTIME=docker or podman",
            (v.IMAGE, v.BASE_IMAGE, v.RUNTIME, v.DRY_RUN), on_host=True),
        Command("[1-5][0-9][0-9]*", "parakit.experiments.tutorial.commands:train_row",
            "train a run of the tutorial by its id: make 446", (*ONE_RUN, *v.NODE_SETTINGS, *v.SLURM_SETTINGS)),
        Command("reproduce", "parakit.experiments.commands:reproduce",
            "train the six published runs on two GPUs, or NAME=tutorial CHAPTER=pp; resumable",
            (*TRAINING, _meaning(v.NAME, "published (the default) or tutorial"), v.CHAPTER,
             _meaning(v.DEVICES, "8cpu runs the tutorial in small on CPU ranks (8gpu)"), v.MODEL)),
    ),
    "Weights from and to Hugging Face, without a GPU": (
        Command("import-hf", "parakit.launch.hub:import_hf",
            "import a folder of Hugging Face as a model: HF= NAME=",
            (v.HF, _meaning(v.NAME, "name of the model (HF's)")), required=("HF",),
            example="HF=folder (or org/name on the hub) NAME=name", is_usual=True),
        Command("export-hf", "parakit.launch.hub:export_hf",
            "export the weights of a run or a checkpoint as such a folder: RUN=runs/… TO=folder",
            (_meaning(v.RUN, "a run folder, or hub/NAME"),
             _meaning(v.CKPT, "any checkpoint of Megatron, in place of RUN="), v.TO), required=("TO",),
            example="RUN=runs/… (or RUN=hub/NAME, or CKPT=folder) TO=folder"),
    ),
    "Recipes of Megatron-Bridge and nemo-run": (
        Command("export-recipe", "parakit.launch.recipe:export_recipe",
            "write a run or a target as a recipe: RUN=runs/… TO=bridge or nemo",
            (_meaning(v.RUN, "a run folder, or a target that need not have run", option="RUN"),
             _meaning(v.TO, "bridge, or nemo for nemo-run's entry too", kind="bridge or nemo"), *TRAIN),
            required=("RUN", "TO"), example="RUN=runs/… TO=bridge (or nemo)"),
        Command("import-recipe", "parakit.launch.recipe:import_recipe",
            "read a recipe, or Bridge's YAML, as a model and a target: INPUT= NAME= GPUS=",
            (_meaning(v.INPUT, "recipe.py, recipe.py:function or Bridge's YAML"), _meaning(v.NAME,
             "name of the model (the file's)"), v.GPUS), required=("INPUT",),
            example="INPUT=recipe.py (or Megatron-Bridge's YAML)"),
    ),
    "Comparisons from the same weights, batches and schedule": (
        Command("compare-zero", _EXPERIMENT,
            "compare data parallel, pipeline and ZeRO-1/2/3 as the DeepSpeed report does; GPU= predicts",
            (*TRAINING, v.MODEL, *_PREDICTION), fixed=(("name", "zero"),)),
        Command("compare-backends", _EXPERIMENT,
            "compare Megatron, plain PyTorch, DeepSpeed, and forward and backward alone", (*TRAINING, v.MODEL),
            fixed=(("name", "backends"),)),
        Command("compare-moe", _EXPERIMENT,
            "compare Megatron and plain PyTorch on experts, as the Blueberry experiment does",
            (*TRAINING, v.MODEL), fixed=(("name", "moe"),)),
        Command("compare-pipelines", _EXPERIMENT,
            "compare schedules: Megatron's, GPipe, 1F1B, interleaved, PipeDream with and without flushes",
            # PipeDream's micro batch follows from the others' global one.
            (*COMPARED, v.MODEL), fixed=(("name", "pipelines"),)),
        Command("sweep", "parakit.experiments.commands:run_sweep",
            "train every combination of MODELS=, STRATEGIES=, BACKENDS= and DEVICES=; resumable",
            (*ONE_RUN, *(v.MODELS, v.STRATEGIES, v.BACKENDS, v.DEVICES, v.NAME), *v.SLURM_SETTINGS)),
        Command("experiment", _EXPERIMENT, "run an experiment of examples/experiments: NAME=blueberry",
            (*TRAINING, _meaning(v.NAME, "name of its file", option="NAME"), v.MODEL, *_PREDICTION,
             PLAN_CALIBRATE),
            required=("NAME",), example="NAME=blueberry"),
    ),
    "Planning, without devices": (
        Command("plan", "parakit.planner.command:plan",
            "rank strategies by predicted time: MODEL= GPUS= GPU= …",
            PLAN_COMMAND, required=("MODEL|LARGEST",), example=_A_PLAN,
            in_clone=f"{_CLONE}:add_own_measurements", packages=(), is_usual=True),
        Command("dryrun", "parakit.planner.dryrun.command:dryrun",
            "run an iteration of Megatron without devices: MODEL= STRATEGY= …",
            (v.MODEL, _meaning(v.STRATEGY, "the strategy to run (the baseline)"), *BATCH,
             *(v.SEQ, v.DTYPE, v.DP, v.TP, v.PP, v.CP, v.EP, v.VPP, v.SP, v.ZERO1),
             *(v.RECOMPUTE, v.RANKS, v.JSON)),
            required=("MODEL",), example="MODEL=gpt3-175b STRATEGY=tp8pp16dp8",
            packages=("torch", "megatron"), is_usual=True, on_host=True),
        Command("calibrate", "parakit.launch.calibrate:calibrate_machine",
            "measure the planner's constants on this machine, and keep them: DEVICES=2cpu",
            (_meaning(v.DEVICES, "2gpu or 2cpu (all of this machine)", kind="devices such as 2gpu"),
             READ_RUNS)),
        Command("validate", "parakit.planner.readings.command:validate",
            "predict every published measurement, and show the errors; READINGS= for your own",
            (v.JSON, v.LEAVE_OUT, v.READINGS), packages=()),
        Command("schedules", "parakit.planner.schedules.command:schedules",
            "draw GPipe, 1F1B, interleaved and PipeDream, on four stages without ARGS=",
            (v.PP._replace(default=4), v.MICROBATCHES._replace(default=8), v.VPP._replace(default=2),
             *(v.SVG, v.JSON)),
            packages=()),
    ),
    "Results": (
        Command("report", "parakit.reporting.command:report",
            'compare all runs, or logs of any trainer: LOGS="a.log b.log"',
            (READ_RUNS, v.READINGS, v.LOGS._replace(option="RUN_OR_LOG"), v.NAME, v.BASELINE, v.DEVICE,
             v.STRICT, v.SCRAPE, _meaning(v.JSON, "1 prints the content of logs as JSON"),
             _meaning(v.ALL, "1 shows rows of older versions and other machines too")),
            in_clone=f"{_CLONE}:add_own_runs", packages=(), is_usual=True),
        Command("explain", "parakit.reporting.command:explain",
            "explain why runs differ, from their measurements: RUN=",
            (_meaning(v.RUN, "run folders to explain (all)", kind="words", default=(), option="RUN"),
             READ_RUNS),
            in_clone=f"{_CLONE}:move_run_folders", packages=(), is_usual=True),
        Command("why-hang", "parakit.hang.command:why_hang",
            "find the rank that hangs, from dumps, stacks or logs: DUMPS=",
            (v.DUMPS, _meaning(v.PAGE, "the page to write", kind=v.TEXT), v.JSON),
            required=("DUMPS",), example="DUMPS=folder", packages=(), is_usual=True),
    ),
    "Checkpoints, without a GPU": (
        Command("inspect", "parakit.experiments.captures:inspect_checkpoint_or_capture",
            "describe a checkpoint and find its faults: CKPT= COMPARE=",
            (v.CKPT, v.COMPARE, _meaning(v.STRATEGY, "also judge whether this strategy can load it"),
             _meaning(v.VERIFY, "1 reads every piece and checks it", kind=v.SWITCH, default=False),
             v.JSON),
            required=("CKPT",), example="CKPT=runs/…/checkpoints", packages=("torch",), is_usual=True),
        Command("reshard", "parakit.checkpoint:reshard_command",
            "convert a checkpoint to another strategy: CKPT= STRATEGY= TO=folder",
            (v.CKPT, _meaning(v.STRATEGY, "the strategy that is written"), v.TO),
            required=("CKPT", "STRATEGY", "TO"), packages=("torch",),
            example="CKPT=runs/…/checkpoints STRATEGY=tp2dp2-zero1 TO=folder"),
    ),
    "For agents": (
        Command("mcp", "parakit.mcp_server:serve",
            "serve plan, estimate, report, why-hang, inspect and verify results as tools over stdin and stdout",
            packages=("mcp",)),
    ),
    "Working on the kit": (
        Command("test", "", "run the default tests"),
        Command("test-slow", "", "run the long tests", (v.MEGATRON_LM,)),
        BENCH,
        Command("docs", "", "build site/: the documentation, and the planner in the browser"),
        Command("serve", "parakit.site.server:serve_site",
            "build site/ and show it at a local address, with the planner", (v.PORT,), on_host=True),
        Command("lint", "", "run ruff, mypy, shellcheck, hadolint and import-linter"),
        Command("clean", "", "remove runs, reports and caches; keep .venv, owt-ds and readings"),
    ),
}
"""The public commands by section, in the order of `make help-all`."""

BENCHES = (
    Command("bench NAME=scrape", "tests.bench.scrape:main",
        "measure the lines per second that the report reads from a log"),
    Command("bench NAME=plan", "tests.bench.plan:main",
        "time the planner's search and a report of 100 runs, relative to a plain loop"),
    Command("bench NAME=preprocess", "tests.bench.preprocess:main",
        "compare text per second with Hugging Face tokenizers and Megatron's script", (v.MEGATRON_LM,)),
    Command("bench NAME=ledger", _EXPERIMENT,
        "measure the cost of counting, which is on in every other iteration", (*ONE_RUN, v.TARGET),
        fixed=(("name", "bench_ledger"),)),
    Command("bench NAME=planners", "tests.bench.planners:main",
        "compare our planner with Calculon and SimuMax on published measurements",
        (v.CALCULON, v.SIMUMAX, v.READINGS), required=("CALCULON|SIMUMAX",),
        example='ARGS="--calculon ../calculon --simumax ../SimuMax"'),
    Command("bench NAME=questions", "tests.bench.questions:bench_questions",
        "grade the planner by 120 questions with measured answers", (v.SEED, v.JSON)),
    Command("bench NAME=verify", "tests.verify.bench:main",
        "check that verify finds injected bugs, and none in healthy strategies", on_host=True),
    Command("bench NAME=bf16", "parakit.experiments.matrix.commands:run_bf16_bench",
        "compare 200 losses of each strategy in fp32 and bf16: STRATEGIES=",
        (_OF_MATRIX, v.PAGE, v.SEED, *MEGATRON, v.RUNS)),
    Command("bench NAME=loss-curve", _EXPERIMENT,
        "compare 200 losses with FUSED= to those of another seed", (*ONE_RUN, v.TARGET),
        fixed=(("name", "loss_curve"),)),
    Command("bench NAME=soak", "tests.faults.soak:soak_strategy",
        "train a STRATEGY= for hours, with random kills: does memory grow, time rise, a loss change?",
        (_meaning(v.STRATEGY, "the strategy to train for hours"), *(v.HOURS, v.MODEL, *BATCH, *LASTING,
         v.BACKEND, *SAVING)),
        required=("STRATEGY", "HOURS"), example='STRATEGY=dp2 ARGS="--hours 0.33"'),
    Command("bench NAME=auto", "tests.bench.auto:bench_auto",
        "compare the planner's times and choice with measurements here: MODELS= DEVICES=",
        (*ONE_RUN, v.MODELS, v.DEVICES)),
    Command("bench NAME=gpu", "tests.bench.gpu:bench_gpu",
        "train Megatron on one GPU without Transformer Engine, in under 9 minutes",
        (*ONE_RUN, v.ONLY, v.BUDGET), on_host=True),
)
"""The benches of `make bench NAME=…`. `make bench` alone runs the first BENCHED_BY_DEFAULT of them."""

BENCHED_BY_DEFAULT = 4

REMOVED = {
    "advise": "plan MODEL=gpt2-large GPUS=2",
    "audit": "validate READINGS=figures.csv",
    "bench-auto": "bench NAME=auto",
    "bench-gpu": "bench NAME=gpu",
    "bench-ledger": "bench NAME=ledger",
    "bench-plan": "bench NAME=plan",
    "bench-planners": "bench NAME=planners",
    "bench-preprocess": "bench NAME=preprocess",
    "bench-scrape": "bench NAME=scrape",
    "bench-verify": "bench NAME=verify",
    "loss-curve": "bench NAME=loss-curve",
    "prepare": "prepare-ds INPUT=file.jsonl NAME=name",
    "scrape": "report LOGS=a.log ARGS=--scrape",
    "soak": "bench NAME=soak",
    "verify-bf16": "bench NAME=bf16",
}
"""Replacements of commands that older versions had, by the old name."""

INTERNAL = (
    Command("run", "parakit.launch.train:run_strategy", "train the run of a launch script", TRAIN),
    Command("trace", "parakit.reporting.command:trace", "draw one iteration of a run",
        (_meaning(v.RUN, "a run folder or a target (the newest run)", option="RUN"), READ_RUNS)),
    Command("idle", "parakit.launch.stop:refuse_running", "refuse if a run is running, for clean",
        (READ_RUNS,)),
    Command("module", "parakit.launch.runtime:run_module",
        "run a module of the kit on the host or in the image, by RUNTIME=",
        _CONTAINER),
)
"""Commands for scripts, the Makefile and authors of the kit's pages. Help texts leave them out."""

# fmt: on

COMMANDS = (*(command for section in SECTIONS.values() for command in section), *INTERNAL)
"""All commands but the benches."""
