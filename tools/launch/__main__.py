"""The command line behind the Makefile.

python -m tools.launch make TARGET                            what every recipe of the Makefile calls
python -m tools.launch target train-tp2-gpt2-tiny-2cpu       a training target
python -m tools.launch verify verify-tp2-gpt2-tiny-2cpu      two layouts, tensor by tensor
python -m tools.launch verify-matrix | verify-fuzz | verify-bf16   many of them
python -m tools.launch run tp2 gpt2-tiny 2cpu -- FLAGS…       what the launch scripts call
python -m tools.launch module tools.preprocess sample …      a module, where RUNTIME says
python -m tools.launch experiment NAME [--model NAME]        a file of examples/experiments
python -m tools.launch resume runs/…  [--strategy pp2]       continue from the newest valid checkpoint
python -m tools.launch export-recipe runs/… --to bridge      a run as a recipe of Megatron-Bridge
python -m tools.launch import-recipe recipe.py              such a recipe as a model and a target
python -m tools.launch stop runs/…                           end a run that is on
python -m tools.launch idle                                  refuses where a run is on
python -m tools.launch demo | parity | list | image | reproduce | sweep | soak | status | calibrate
python -m tools.launch import-hf | export-hf | verify-hf
python -m tools.launch bench-gpu | bench-ledger | bench-auto | loss-curve
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from rich.console import Console

from tools.launch.errors import LaunchError
from tools.launch.make import calls_of
from tools.launch.options import Options, options_from_environment
from tools.launch.supervise.interruption import Interrupted, interruptible
from tools.launch.target import Target, parse_devices
from tools.spec.model import load_model
from tools.spec.settings import MEASURED_DEVICES, RECIPE_FILE, RECIPE_OF, add_options
from tools.text.terminal import say

INTERRUPTED_EXIT = 130


def main(arguments: Sequence[str]) -> int:
    """Run one command; 0 if it went well, 2 if it was refused, 130 if it was interrupted."""
    console = Console(markup=False)  # log lines must not be read as markup
    try:
        with interruptible():
            return _dispatch(_parser().parse_args(arguments), console)
    except (LaunchError, ValueError) as error:
        say(console, str(error), "red")
        return 2
    except Interrupted:
        console.print("Interrupted; all ranks have ended.")
        return INTERRUPTED_EXIT


def _make(target: str, console: Console) -> int:
    """Run the commands of a make target; the last one replaces this process."""
    *before, last = calls_of(target, os.environ)
    for call in (*before, last):
        for name, value in call.defaults:
            os.environ.setdefault(name, value)
    for call in before:
        # Ctrl-C reaches the command too, which handles it itself; a Python handler is not inherited.
        signal.signal(signal.SIGINT, lambda *_: None)
        if code := subprocess.call((sys.executable, "-m", call.module, *call.words)):
            return code
    if last.module != "tools.launch":
        os.execv(sys.executable, (sys.executable, "-m", last.module, *last.words))
    return _dispatch(_parser().parse_args(last.words), console)


def _dispatch(command: argparse.Namespace, console: Console) -> int:
    if command.command == "make":
        return _make(command.target, console)
    # Each command imports what it needs, so that `list` starts without what `demo` loads.
    if command.command == "list":
        from tools.launch.listing import show_list

        show_list(console)
        return 0
    options = options_from_environment()
    if options.nodes and command.command not in SPREADING:
        raise LaunchError(f"'{command.command}' runs on this machine alone; leave NNODES= out.")
    if options.slurm and command.command not in SUBMITTING:
        raise LaunchError(
            f"'{command.command}' runs on this machine alone; leave LAUNCHER= to train-… targets and "
            "sweep ('scontrol requeue' continues a job)."
        )
    return _HANDLERS[command.command](command, options, console)


def _parity(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.commands import parity

    return parity(options, console)


def _image(_: argparse.Namespace, options: Options, __: Console) -> int:
    from tools.launch.container.image import build

    return build(options.image, options.dry_run)


def _module(command: argparse.Namespace, options: Options, _: Console) -> int:
    from tools.launch.runtime import run_module

    return run_module(command.words, options)


def _experiment(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.commands import run_named

    return run_named(command.name, options, console, command.model)


def _sweep(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.sweep import sweep, sweep_from_environment

    return sweep(sweep_from_environment(), options, console)


def _bench_gpu(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.bench_gpu.run import bench_gpu

    return bench_gpu(options.runs, options.dry_run, console)


def _bench_auto(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.bench_auto import bench_auto

    return bench_auto(options, console)


def _on_target(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.experiment.commands import run_on_target

    return run_on_target(command.name, options, console)


def _verify(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.verify import verify

    return verify(command.name, options, console)


def _status(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.status import follow, watch

    if command.quiet:
        follow(options.runs)
    else:
        watch(options.runs, console)
    return 0


def _train(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.train import start_target, train

    if command.command == "target" and command.name.startswith("train-auto-"):
        from tools.launch.auto import train_auto

        return train_auto(command.name, options, console)
    if command.command == "target":
        return start_target(command.name, options, console)
    target = Target(
        command.strategy, load_model(command.model).name, *parse_devices(command.devices)
    )
    return train(target, command.flags, options, console)


def _calibrate(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.calibrate import calibrate_here

    return calibrate_here(MEASURED_DEVICES.value(os.environ), options.runs, console)


def _resume(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.resume import resume

    return resume(command.run, command.strategy, options, console)


def _matrix(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.matrix.commands import matrix

    return matrix(options, console)


def _bf16(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.matrix.commands import bf16

    return bf16(options, console)


def _fuzz(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.matrix.commands import fuzz

    return fuzz(options, console)


def _export_recipe(command: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.recipe import export_recipe

    return export_recipe(command.run, command.to, options, console)


def _import_recipe(command: argparse.Namespace, _: Options, console: Console) -> int:
    from tools.launch.recipe import import_recipe

    return import_recipe(command.file, command.name, command.gpus, console)


def _soak(_: argparse.Namespace, options: Options, console: Console) -> int:
    # A test of the launcher: by name, because tools import no tests.
    code: int = import_module("tests.faults.soak").soak(options, console)
    return code


def _stop(command: argparse.Namespace, _: Options, console: Console) -> int:
    from tools.launch.stop import stop

    return stop(command.run, console)


def _idle(_: argparse.Namespace, options: Options, __: Console) -> int:
    from tools.launch.stop import refuse_running

    refuse_running(options.runs)
    return 0


def _import_hf(_: argparse.Namespace, __: Options, console: Console) -> int:
    from tools.launch.hub import import_hf

    return import_hf(console)


def _export_hf(_: argparse.Namespace, __: Options, console: Console) -> int:
    from tools.launch.hub import export_hf

    return export_hf(console)


def _verify_hf(_: argparse.Namespace, options: Options, console: Console) -> int:
    from tools.launch.verify_hf import verify_hf

    return verify_hf(options, console)


_HANDLERS = {
    "demo": _experiment,
    "parity": _parity,
    "image": _image,
    "module": _module,
    "reproduce": _experiment,
    "experiment": _experiment,
    "sweep": _sweep,
    "target": _train,
    "verify": _verify,
    "run": _train,
    "status": _status,
    "calibrate": _calibrate,
    "resume": _resume,
    "export-recipe": _export_recipe,
    "import-recipe": _import_recipe,
    "soak": _soak,
    "verify-matrix": _matrix,
    "verify-fuzz": _fuzz,
    "verify-bf16": _bf16,
    "stop": _stop,
    "idle": _idle,
    "import-hf": _import_hf,
    "export-hf": _export_hf,
    "verify-hf": _verify_hf,
    "bench-gpu": _bench_gpu,
    "bench-auto": _bench_auto,
    "bench-ledger": _on_target,
    "loss-curve": _on_target,
}
SPREADING = ("target", "run", "resume", "stop", "idle")
SUBMITTING = ("target", "run", "sweep", "status", "stop", "idle")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.launch")
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("make", help="what a make target is, with make's variables")
    made.add_argument("target")
    commands.add_parser("target", help="run a training target").add_argument("name")
    verified = commands.add_parser(
        "verify", help="compare a layout with a reference, tensor by tensor"
    )
    verified.add_argument("name")
    run = commands.add_parser("run", help="run a strategy with the Megatron flags that make it up")
    run.add_argument("strategy")
    run.add_argument("model")
    run.add_argument("devices", help="such as 2gpu or 2cpu")
    run.add_argument("flags", nargs="*", help="after --")
    resume = commands.add_parser("resume", help="continue a run from its newest valid checkpoint")
    resume.add_argument("run", type=_absolute, help="its folder")
    resume.add_argument("--strategy", help="another layout")
    _add_recipes(commands)
    stop = commands.add_parser("stop", help="end a run that is on, also one of another terminal")
    stop.add_argument("run", type=_absolute, help="its folder")
    commands.add_parser("idle", help="refuse if a run is on, before its folder is removed")
    demo = commands.add_parser("demo", help="six strategies on CPU ranks, and a report")
    demo.set_defaults(name="demo", model=None)
    commands.add_parser("parity", help="the demo as a check of the losses")
    named = commands.add_parser(
        "experiment", help="one of examples/experiments, by its file's name"
    )
    named.add_argument("name")
    named.add_argument("--model", help="instead of its own")
    commands.add_parser("sweep", help="MODELS= × STRATEGIES= × BACKENDS= × DEVICES=, measured")
    commands.add_parser("verify-matrix", help="FEATURES= × LAYOUTS=, each pair verified")
    commands.add_parser("verify-bf16", help="losses of 200 iterations in fp32 and bf16")
    commands.add_parser("verify-fuzz", help="what is drawn with SEED=, for MINUTES=, verified")
    commands.add_parser("bench-auto", help="the planner's times and choice, measured")
    commands.add_parser("soak", help="STRATEGY= for HOURS=, undisturbed and with processes killed")
    commands.add_parser(
        "bench-gpu", help="Megatron on one GPU without Transformer Engine, measured"
    )
    ledger = commands.add_parser("bench-ledger", help="what the ledger costs, on against off")
    ledger.set_defaults(name="bench_ledger")
    curve = commands.add_parser(
        "loss-curve", help="what FUSED= does to the losses, compared with another seed"
    )
    curve.set_defaults(name="loss_curve")
    commands.add_parser("list", help="models, strategies, and what runs here")
    status = commands.add_parser("status", help="every run: waiting, running or ended")
    status.add_argument("--quiet", action="store_true", help="only record which jobs Slurm ended")
    commands.add_parser("calibrate", help="measure the planner's constants on this machine")
    commands.add_parser("import-hf", help="HF= as the model hub/NAME, with its weights")
    commands.add_parser("export-hf", help="the weights of RUN= as the folder TO=")
    commands.add_parser("verify-hf", help="HF=, or random models, compared with transformers")
    commands.add_parser("image", help="build the container's image")
    reproduce = commands.add_parser("reproduce", help="the six published runs, then the report")
    reproduce.set_defaults(name="published", model=None)
    module = commands.add_parser("module", help="run a module of the kit where RUNTIME says")
    module.add_argument("words", nargs=argparse.REMAINDER, help="its name and arguments")
    return parser


def _add_recipes(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    exported = commands.add_parser("export-recipe", help="a run as a recipe of Megatron-Bridge")
    exported.add_argument("run", help=RECIPE_OF.help)
    add_options(exported, "export-recipe", required={"TO"})
    recipe = commands.add_parser("import-recipe", help="such a recipe as a model and a target")
    recipe.add_argument("file", help=RECIPE_FILE.help)
    add_options(recipe, "import-recipe", NAME="")


def _absolute(text: str) -> Path:
    return Path(text).absolute()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
