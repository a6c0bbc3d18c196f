"""The public functions of `parakit` for programs and notebooks; `parakit.capture` is in another module.

    import parakit

    parakit.plan("llama3-8b", gpus=8, gpu="h100")
    parakit.estimate("llama3-8b", "tp4dp2", gpu="h100", micro_batch=1)
    parakit.read_logs("run.log")

Each function does what the command of its name does, and returns the value that the command prints. Every value has
a text (`print`), HTML for notebooks and `to_dict()`. A value that holds a table also has `to_pandas()` and
`to_polars()`. A refusal is a ValueError with one sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parakit.artifacts.verdict import VerifyVerdict
    from parakit.checkpoint import CheckpointInspection
    from parakit.config.settings import Setting
    from parakit.hang import HangDiagnosis
    from parakit.logs import TrainingLog
    from parakit.planner import PlanOptions, PlanResult, TimedStrategy
    from parakit.reporting import FinishedReport

type AnyPath = str | PathLike[str]
type Paths = AnyPath | Iterable[AnyPath]


def plan(
    model: AnyPath,
    *,
    gpus: int | None = None,
    gpu: str = "h200",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    nics: int | None = None,
    oversubscription: float | None = None,
    imbalance: float | None = None,
    global_batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    tokens: float | None = None,
    recipe: str | None = None,
    peft: str | None = None,
    document_length: int | None = None,
    extra: str | Sequence[str] | None = None,
    calibration: AnyPath | None = None,
    calibrate: str | None = None,
    readings: AnyPath | None = None,
) -> PlanResult:
    """Rank every legal strategy for a model on a number of devices by predicted time.

    Args:
        model: Name of a model of the kit or of published measurements (`deepseek-v3`), or the path of an `.args`
            file or of a Hugging Face `config.json`.
        gpus: The total number of devices. None takes nodes times devices per node, or else one device.
        gpu: Key of the device, such as `h100`, `a100-80g` or `cpu`.
        nodes: The number of machines.
        gpus_per_node: Devices per machine; None takes the number of devices in an NVLink domain.
        intra: Key of the link inside a machine; None takes the device's usual link.
        inter: Key of the network between machines; None takes the device's usual network.
        nics: Network ports per machine; None takes one port per device.
        oversubscription: Bandwidth of the network's edge divided by the bandwidth of its core, at least 1.
        imbalance: Tokens of the busiest expert-parallel rank divided by the mean over ranks, at least 1. Only
            for models with experts.
        global_batch: Samples per iteration on all devices; None takes the number that the model's flags state.
        seq: Tokens per sample; None takes the number that the model's flags state.
        dtype: `bf16`, `fp16`, `fp32` or `fp8`; None takes the dtype that the model's flags state.
        tokens: Number of tokens to train on. If given, the result has the number of days that the training
            takes.
        recipe: `tuned` also tries flags that change how an iteration is computed and communicated. `all` tries
            fewer bits as well. None keeps Megatron's defaults.
        peft: `lora` trains adapters alone, with the rank and the layers of Megatron-Bridge's defaults. Others are
            stated as in "lora rank=16 targets=linear_qkv,linear_proj weights=nf4". None trains all weights.
        document_length: Mean tokens of the documents that a sample packs. Attention then stays inside documents.
            None takes each sample as one document.
        extra: Further flags of Megatron for the model, as one text or as a list of arguments.
        calibration: File of constants that `make calibrate` has measured on the machine.
        calibrate: What was measured on the devices: rates such as "700 TFLOP/s on 4k x 4k x 4k", or the time of a
            step such as "200 ms on STRATEGY=tp8 MODEL=gpt3-13b", which tells the host's time per layer.
        readings: CSV file of your own measurements, by which every predicted time is corrected.

    Raises:
        ValueError: There is no such model or device, the numbers contradict each other, or nothing fits
            (`parakit.planner.NothingFitsError`, which says how many devices are needed).
    """
    # The arguments by name. This is the first line, because locals() holds every name that is bound so far.
    arguments = locals()
    from parakit.planner import plan_strategies

    with _refusals_name_arguments():
        return plan_strategies(_parse_plan_options(arguments))


def estimate(
    model: AnyPath,
    strategy: str,
    *,
    gpus: int | None = None,
    gpu: str = "h200",
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    intra: str | None = None,
    inter: str | None = None,
    nics: int | None = None,
    oversubscription: float | None = None,
    imbalance: float | None = None,
    global_batch: int | None = None,
    micro_batch: int | None = None,
    recompute: str | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    peft: str | None = None,
    document_length: int | None = None,
    extra: str | Sequence[str] | None = None,
    calibration: AnyPath | None = None,
    calibrate: str | None = None,
    readings: AnyPath | None = None,
) -> TimedStrategy:
    """Estimate the memory and the time per iteration of one strategy.

    Args:
        model: Name of a model of the kit or of published measurements (`deepseek-v3`), or the path of an `.args`
            file or of a Hugging Face `config.json`.
        strategy: A strategy's name, such as `tp4pp2dp2-zero1`.
        gpus: The total number of devices; None takes the product of the strategy's parallel sizes.
        gpu: Key of the device, such as `h100`, `a100-80g` or `cpu`.
        nodes: The number of machines. The arguments that are not listed here have the same meaning as in
            `plan`.
        micro_batch: Samples per micro batch; None takes the number that the model's flags state.
        recompute: `none`, `selective` or `full`; None takes the recomputation that the model's flags state.

    Raises:
        ValueError: There is no such model, device or strategy, Megatron refuses the strategy, or the numbers
            contradict each other. A strategy that needs too much memory raises no error.
    """
    # The arguments by name. This is the first line, because locals() holds every name that is bound so far.
    arguments = locals()
    from parakit.planner import time_strategy

    with _refusals_name_arguments():
        return time_strategy(_parse_plan_options(arguments))


def read_logs(paths: Paths) -> tuple[TrainingLog, ...]:
    """Read the training runs in log files of any trainer that the report knows.

    Returns:
        One log per run, in the order of the files. A file with several runs gives several logs. `to_pandas()`
        of a log returns a table with one row per iteration and times in milliseconds.

    Raises:
        ValueError: A file cannot be read.
    """
    from parakit.logs import read_training_logs

    with _refusals_name_arguments():
        return tuple(log for path in _list_paths(paths) for log in read_training_logs(path))


def report(
    paths: Paths = (),
    *,
    runs: AnyPath = "runs",
    baseline: AnyPath | None = None,
    device: str | None = None,
    all_conditions: bool = False,
    readings: AnyPath | None = None,
) -> FinishedReport:
    """Compare runs and logs with one another. Nothing is written until you call the result's `write`.

    Args:
        paths: Run folders, logs and patterns; `name=1.log,2.log` makes two logs repeats of one run.
            If empty, every run folder in `runs` is compared.
        runs: The folder that holds run folders.
        baseline: Folder of an earlier report, or its `results.json`, with which the rows are compared.
        device: Key of the device, such as `h100`, for logs that do not name a device.
        all_conditions: True to include runs of older versions of the code or of Megatron, and of other machines.
        readings: CSV file of your own measurements, by which the predicted times are corrected.

    Raises:
        ValueError: There is no such device, or the baseline cannot be read.
    """
    from dataclasses import replace

    from parakit.reporting import finish_report, report_options

    with _refusals_name_arguments():
        options = replace(
            report_options([str(path) for path in _list_paths(paths)], device),
            runs_root=Path(runs),
            baseline=Path(baseline) if baseline else None,
            all_conditions=all_conditions,
            readings=Path(readings) if readings else None,
        )
        return finish_report("report", options)


def why_hang(paths: Paths) -> HangDiagnosis:
    """Find the rank that stopped a training job, and where it stopped, from the files that the job left.

    Args:
        paths: Flight recorder dumps, stacks of py-spy, logs, and folders of such files.

    Raises:
        ValueError: No file has evidence of a rank.
    """
    from parakit.hang import diagnose_hang

    with _refusals_name_arguments():
        return diagnose_hang(_list_paths(paths))


def inspect_checkpoint(
    path: AnyPath,
    *,
    compare: AnyPath | None = None,
    strategy: str | None = None,
    verify: bool = False,
) -> CheckpointInspection:
    """Describe a checkpoint and find its faults. Nothing that the checkpoint holds is executed.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints or a run, whose newest checkpoint is read.
        compare: Another checkpoint, with which every tensor is compared; None compares nothing.
        strategy: A strategy to judge: can it load the checkpoint? None judges nothing.
        verify: True to read every piece and compare it with its checksum, which takes longer.

    Raises:
        ValueError: A path holds no checkpoint, or a checkpoint of a format that the kit does not read.
    """
    from parakit.checkpoint import inspect_folder

    (folder,) = _list_paths(path)
    other = Path(compare).expanduser() if compare else None
    with _refusals_name_arguments():
        return inspect_folder(folder, compare=other, strategy=strategy, verify=verify)


def compare_captures(reference: AnyPath, other: AnyPath) -> VerifyVerdict:
    """Find the first tensor of a training step that differs from a reference by more than rounding.

    Args:
        reference: Folder of the reference's capture. It must include the measured effect of rounding, as
            captures by `capture` do.
        other: Folder of the capture to judge.

    Returns:
        The verdict: no tensor is wrong, the first wrong tensor, or the reason why the captures are not comparable.
    """
    from parakit.experiments import judge_captures

    with _refusals_name_arguments():
        return judge_captures(Path(reference).expanduser(), Path(other).expanduser()).verdict


def _parse_plan_options(arguments: Mapping[str, Any]) -> PlanOptions:
    """Convert the arguments of `plan` or `estimate`, by name, to the planner's options.

    Each value is checked like the make variable of the same name. Arguments that are None are left out.

    Raises: ValueError: A value is of the wrong kind, such as a text in place of a number.
    """
    from parakit.config.setting import format_setting, parse_setting
    from parakit.config.variable_groups import PLAN
    from parakit.planner import PlanOptions, resolve_measured_step

    options: dict[str, Any] = {}
    for setting in PLAN:
        name = setting.name.lower()
        value = arguments.get(name)
        if value is not None:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            text = format_setting(tuple(value) if is_list else value)
            options[name] = parse_setting(setting, text)
    return resolve_measured_step(PlanOptions(**options))


def _list_paths(paths: Paths) -> list[Path]:
    """Return a path, or several, as a list with the user's home expanded."""
    path_list = [paths] if isinstance(paths, str | PathLike) else paths
    return [Path(path).expanduser() for path in path_list]


@contextmanager
def _refusals_name_arguments() -> Iterator[None]:
    """Raise a ValueError of the `with` block again, with names of arguments in place of make variables.

    If torch cannot be imported in the block, the ModuleNotFoundError is raised again with a sentence on how to
    install torch. All other errors pass through.
    """
    try:
        yield
    except ValueError as error:
        text = name_arguments(str(error))
        if error.args != (str(error),) or text == str(error):
            raise
        raise type(error)(text) from None
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "torch is not installed, which this reads tensors with: pip install 'parakit[train]'.",
            name="torch",
        ) from None


def name_arguments(text: str) -> str:
    """Return a sentence in which make variables and options are replaced by the arguments of this module.

    `GPUS=8` becomes `gpus=8`, and `STRATEGY=tp2` becomes `strategy="tp2"`. Commands in single quotes, such as
    'make report', stay unchanged.
    """
    from parakit.config.settings import OPTIONS, SETTINGS
    from parakit.config.spelling import rewrite_variables

    for setting in OPTIONS:
        option = "--" + setting.name.lower().replace("_", "-")
        text = text.replace(f"{option} ", f"{setting.name.lower()}= ")
    parts = _COMMANDS.split(text)
    # Every second part is a command.
    parts[::2] = [rewrite_variables(part, SETTINGS, _write_argument) for part in parts[::2]]
    return "".join(parts)


def _write_argument(setting: Setting, value: str | None) -> str:
    """Return a variable and its value as an argument of a function; None gives the name alone."""
    argument = _ARGUMENT_NAMES.get(setting.name, setting.name.lower())
    if value is None:
        return argument
    is_plain = not value or value.startswith('"') or _NUMBER.fullmatch(value)
    return f"{argument}={value}" if is_plain else f'{argument}="{value}"'


_ARGUMENT_NAMES = {"DUMPS": "paths", "LOGS": "paths", "CKPT": "path"}
"""Arguments whose name is not the variable's name in lower case, by variable."""
_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
_COMMANDS = re.compile(r"('make [^']*')")
