"""A recipe as the Python file that Megatron-Bridge trains with, and nemo-run's entry for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import TextWrapper

from tools.convert.recipe.fields import Recipe
from tools.convert.recipe.joint import shown
from tools.convert.recipe.table import BRIDGE_VERSION, ROWS, Symbol, Value
from tools.spec.run import RunSpec

RECIPE_FILE, ENTRY_FILE = "bridge_recipe.py", "nemo_entry.py"
NEMO_VERSION = "0.11.1"
GPUS_OF_A_MACHINE = 8

_CONFIG = "megatron.bridge.training.config"
_CLASSES = {
    "model": "megatron.bridge.models.gpt_provider.GPTModelProvider",
    "train": f"{_CONFIG}.TrainingConfig",
    "optimizer": f"{_CONFIG}.OptimizerConfig",
    "scheduler": f"{_CONFIG}.SchedulerConfig",
    "dataset": f"{_CONFIG}.GPTDatasetConfig",
    "tokenizer": "megatron.bridge.training.tokenizers.config.TokenizerConfig",
    "mixed_precision": "megatron.bridge.training.mixed_precision.MixedPrecisionConfig",
    "ddp": f"{_CONFIG}.DistributedDataParallelConfig",
    "dist": f"{_CONFIG}.DistributedInitConfig",
    "checkpoint": f"{_CONFIG}.CheckpointConfig",
    "logger": f"{_CONFIG}.LoggerConfig",
    "rng": f"{_CONFIG}.RNGConfig",
    "rerun_state_machine": f"{_CONFIG}.RerunStateMachineConfig",
}
"""The class of each section, in the order in which they are written."""

_ALWAYS = frozenset(
    ("model", "train", "optimizer", "scheduler", "dataset", "tokenizer", "checkpoint", "logger")
)
"""Sections that a container does not make by itself."""

_WIDTH = 100


def written_recipe(recipe: Recipe, spec: RunSpec, origin: str, path: str) -> str:
    """The Python file.

    Args:
        recipe: The run as a recipe.
        spec: The run.
        origin: The command that makes the file.
        path: Where the file will be, from the repository's root.
    """
    sections = _by_section(recipe.fields)
    used = [name for name in _CLASSES if name in sections or name in _ALWAYS]
    ranks = spec.parallelism.world_size
    lines = [
        *_docstring(recipe, spec, origin, path),
        *_imports(sections, used),
        "",
        f"DEVICES = {ranks}",
        "",
        "",
        "def pretrain_config() -> ConfigContainer:",
        f'    """{_title(spec)}."""',
        "    return ConfigContainer(",
        *(line for name in used for line in _section(name, sections.get(name, {}))),
        "    )",
        "",
        "",
        'if __name__ == "__main__":',
        "    from megatron.bridge.training.gpt_step import forward_step",
        "    from megatron.bridge.training.pretrain import pretrain",
        "",
        "    pretrain(pretrain_config(), forward_step)",
        "",
    ]
    return "\n".join(lines)


def written_entry(
    spec: RunSpec, name: str, environment: Mapping[str, str], origin: str, path: str
) -> str:
    """nemo-run's entry, which trains the recipe beside it on this machine.

    Args:
        spec: The run.
        name: Of nemo-run's experiment.
        environment: Variables of the run that its ranks need on GPUs.
        origin: The command that makes the file.
        path: Where the file will be, from the repository's root.
    """
    ranks = spec.parallelism.world_size
    title = f"{_title(spec)}, with nemo-run {NEMO_VERSION} on this machine"
    variables = ", ".join(f'"{key}": "{value}"' for key, value in sorted(environment.items()))
    return f'''"""{title}.

Made by `{origin}`.
Trains where the data set's path begins, in an image with Megatron-Bridge and nemo-run:

    python {path}    # --dryrun shows the command and starts nothing

Another executor (run.SlurmExecutor, run.DockerExecutor) takes the place of LocalExecutor.
"""

import sys
from pathlib import Path

import nemo_run as run

DEVICES = {ranks}
RECIPE = Path(__file__).with_name("{RECIPE_FILE}").resolve()


def executor() -> run.LocalExecutor:
    """torchrun with one rank a GPU."""
    return run.LocalExecutor(
        ntasks_per_node=DEVICES,
        launcher="torchrun",
        env_vars={{{variables}}},
    )


if __name__ == "__main__":
    with run.Experiment("{name}") as experiment:
        recipe = run.Script(path=str(RECIPE), entrypoint="python")
        experiment.add(recipe, executor=executor(), name="train")
        if "--dryrun" in sys.argv:
            experiment.dryrun()
        else:
            experiment.run(sequential=True, tail_logs=True)
'''


def _title(spec: RunSpec) -> str:
    ranks = spec.parallelism.world_size
    return f"{spec.model or 'A GPT'}, {spec.name}, on {ranks} GPU{'s' if ranks > 1 else ''}"


def _docstring(recipe: Recipe, spec: RunSpec, origin: str, path: str) -> Iterable[str]:
    ranks = spec.parallelism.world_size
    yield f'"""{_title(spec)}: a recipe of Megatron-Bridge {BRIDGE_VERSION}.'
    yield ""
    yield f"Made by `{origin}`."
    yield "Trains where its data set's path begins, in an image with Megatron-Bridge:"
    yield ""
    yield f"    torchrun {_machines(ranks)} {path}"
    yield ""
    yield "Fields that are not here have Megatron-Bridge's defaults, which are Megatron-LM's too."
    if recipe.left_out:
        yield "Without a counterpart:"
        yield ""
        for sentence in recipe.left_out:
            plain = sentence.replace("\\", "/").replace('"', "'")  # It stands in a docstring.
            words = TextWrapper(_WIDTH, initial_indent="- ", subsequent_indent="  ")
            words.break_long_words = words.break_on_hyphens = False
            yield words.fill(plain)
    yield '"""'
    yield ""


def _machines(ranks: int) -> str:
    """torchrun's options for one machine, or several."""
    if ranks <= GPUS_OF_A_MACHINE:
        return f"--standalone --nproc-per-node {ranks}"
    nodes = -(-ranks // GPUS_OF_A_MACHINE)
    rendezvous = "--node-rank … --master-addr …"
    return f"--nnodes {nodes} --nproc-per-node {ranks // nodes} {rendezvous}"


def _by_section(fields: Mapping[str, Value]) -> dict[str, dict[str, Value]]:
    sections: dict[str, dict[str, Value]] = {}
    for place, value in fields.items():
        section, _, field = place.partition(".")
        sections.setdefault(section, {})[field] = value
    return sections


def _imports(sections: Mapping[str, Mapping[str, Value]], used: Sequence[str]) -> Iterable[str]:
    symbols = [
        value.path
        for section in sections.values()
        for value in section.values()
        if isinstance(value, Symbol)
    ]
    if any(path.startswith("torch.") for path in symbols):
        yield "import torch"
        yield ""
    names: dict[str, set[str]] = {_CONFIG: {"ConfigContainer"}}
    for path in (*(_CLASSES[name] for name in used), *symbols):
        module, name = _module_and_name(path)
        if module:
            names.setdefault(module, set()).add(name)
    for module in sorted(names):
        line = f"from {module} import {', '.join(sorted(names[module]))}"
        if len(line) <= _WIDTH:
            yield line
        else:
            yield f"from {module} import ("
            yield from (f"    {name}," for name in sorted(names[module]))
            yield ")"


def _module_and_name(path: str) -> tuple[str, str]:
    """Where a name is imported from; nothing for torch's, which are written in full."""
    if path.startswith("torch."):
        return "", path
    parts = path.split(".")
    cut = next((at for at, part in enumerate(parts) if part[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:cut]), parts[cut]


def _section(name: str, fields: Mapping[str, Value]) -> Iterable[str]:
    made = _module_and_name(_CLASSES[name])[1]
    if not fields:
        yield f"        {name}={made}(),"
        return
    yield f"        {name}={made}("
    for field, value in fields.items():
        unit = _UNITS.get(f"{name}.{field}", "")
        said = value is None or unit[:4] in field  # `train_iters` says iterations.
        comment = "" if said or not unit else f"  # {unit}"
        yield f"            {field}={_python(value)},{comment}"
    yield "        ),"


def _python(value: Value) -> str:
    if isinstance(value, Symbol):
        module, _ = _module_and_name(value.path)
        return value.path.removeprefix(f"{module}.") if module else value.path
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, list):
        return f"[{', '.join(_python(each) for each in value)}]"
    return shown(value)


_UNITS = {place.removeprefix("!"): row.unit for row in ROWS for place in row.recipe if row.unit}
