"""The public functions of `parakit` for programs and notebooks, beside `parakit.capture`.

    import parakit

    parakit.plan("llama3-8b", gpus=8, gpu="h100")
    parakit.estimate("llama3-8b", "tp4dp2", gpu="h100", micro_batch=1)
    parakit.read_logs("run.log")

Each function calls what the command of that name calls, and returns the value that the command prints. Every
value has a text (`print`), HTML for notebooks, `to_dict()`, and where it holds a table `to_pandas()` and
`to_polars()`. What cannot be is refused by a ValueError with one sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parakit.artifacts.verdict import VerifyVerdict
    from parakit.checkpoint import CheckpointInspection
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
    extra: str | Sequence[str] | None = None,
    calibration: AnyPath | None = None,
    calibrate: str | None = None,
    readings: AnyPath | None = None,
) -> PlanResult:
    """Rank every legal way to split a model over devices by predicted time.

    Args:
        model: Name of a model, or the path of an `.args` file or of a Hugging Face `config.json`.
        gpus: Devices in all. Without it: nodes times devices per node, or one device.
        gpu: Key of the device, such as `h100`, `a100-80g` or `cpu`.
        nodes: Machines.
        gpus_per_node: Devices per machine; without it those of an NVLink domain.
        intra: Key of the link inside a machine; without it the device's own.
        inter: Key of the network between machines; without it the device's usual one.
        nics: Network ports per machine; without it one per device.
        oversubscription: Factor by which the network's core is narrower than its edge, from 1.
        imbalance: Tokens of the busiest rank of experts over the mean, from 1; of models with experts.
        global_batch: Samples per iteration of all devices; without it the model's own.
        seq: Tokens per sample; without it the model's own.
        dtype: `bf16`, `fp16`, `fp32` or `fp8`; without it the model's own.
        tokens: Tokens to train on; the result then has the days that this takes.
        recipe: `tuned` also tries flags that change how an iteration is computed and sent; `all` also
            tries fewer bits. Without it Megatron's defaults stay.
        extra: Further flags of Megatron for the model, as one text or as words.
        calibration: File of constants that were measured on the machine.
        calibrate: Rates that the devices reach, such as "700 TFLOP/s on 4k x 4k x 4k".
        readings: CSV file of one's own measurements, which correct every time.

    Raises:
        ValueError: There is no such model or device, the numbers contradict each other, or nothing fits
            (`parakit.planner.NothingFitsError`, which says how many devices are needed).
    """
    from parakit.planner import plan_strategies

    with _python_words():
        return plan_strategies(
            _plan_options(
                model=model,
                gpus=gpus,
                gpu=gpu,
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                intra=intra,
                inter=inter,
                nics=nics,
                oversubscription=oversubscription,
                imbalance=imbalance,
                global_batch=global_batch,
                seq=seq,
                dtype=dtype,
                tokens=tokens,
                recipe=recipe,
                extra=extra,
                calibration=calibration,
                calibrate=calibrate,
                readings=readings,
            )
        )


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
    extra: str | Sequence[str] | None = None,
    calibration: AnyPath | None = None,
    calibrate: str | None = None,
    readings: AnyPath | None = None,
) -> TimedStrategy:
    """Estimate memory and time of one strategy.

    Args:
        model: Name of a model, or the path of an `.args` file or of a Hugging Face `config.json`.
        strategy: A strategy's name, such as `tp4pp2dp2-zero1`.
        gpus: Devices in all; without it as many as the strategy's degrees multiply to.
        gpu: Key of the device, such as `h100`, `a100-80g` or `cpu`.
        nodes: As in `plan`, like all arguments that are not listed here.
        micro_batch: Samples per micro batch; without it the model's own.
        recompute: `none`, `selective` or `full`; without it as the model's flags state.

    Raises:
        ValueError: There is no such model, device or strategy, Megatron refuses the strategy, or the
            numbers contradict each other. A strategy that needs too much memory is no error.
    """
    from parakit.planner import time_strategy

    with _python_words():
        return time_strategy(
            _plan_options(
                model=model,
                strategy=strategy,
                gpus=gpus,
                gpu=gpu,
                nodes=nodes,
                gpus_per_node=gpus_per_node,
                intra=intra,
                inter=inter,
                nics=nics,
                oversubscription=oversubscription,
                imbalance=imbalance,
                global_batch=global_batch,
                micro_batch=micro_batch,
                recompute=recompute,
                seq=seq,
                dtype=dtype,
                extra=extra,
                calibration=calibration,
                calibrate=calibrate,
                readings=readings,
            )
        )


def read_logs(paths: Paths) -> tuple[TrainingLog, ...]:
    """Read the training runs of log files of any trainer that the report knows.

    Returns:
        A log for each run, in order; a file with several runs gives several. Its `to_pandas()` has a row
        per iteration, with times in milliseconds.

    Raises:
        ValueError: A file cannot be read.
    """
    from parakit.logs import read_training_logs

    with _python_words():
        return tuple(log for path in _paths(paths) for log in read_training_logs(path))


def report(
    paths: Paths = (),
    *,
    runs: AnyPath = "runs",
    baseline: AnyPath | None = None,
    device: str | None = None,
    all_conditions: bool = False,
    readings: AnyPath | None = None,
) -> FinishedReport:
    """Compare runs and logs with one another; write nothing (the result's `write` writes the folder).

    Args:
        paths: Run folders, logs and patterns; `name=1.log,2.log` makes two logs repeats of one run.
            None of them means every run folder in `runs`.
        runs: The folder that holds run folders.
        baseline: Folder of an earlier report, or its `results.json`, with which rows are compared.
        device: Key of the device of logs that do not name theirs, such as `h100`.
        all_conditions: Also rows of older versions and other machines.
        readings: CSV file of one's own measurements, which correct the predicted times.

    Raises:
        ValueError: There is no such device, or the baseline cannot be read.
    """
    from dataclasses import replace

    from parakit.reporting import finish_report, report_options

    with _python_words():
        options = replace(
            report_options([str(path) for path in _paths(paths)], device),
            runs_root=Path(runs),
            baseline=Path(baseline) if baseline else None,
            all_conditions=all_conditions,
            readings=Path(readings) if readings else None,
        )
        return finish_report("report", options)


def why_hang(paths: Paths) -> HangDiagnosis:
    """Judge which rank of a training job stopped, and where, from what the job left.

    Args:
        paths: Flight recorder dumps, stacks of py-spy, logs, and folders of them.

    Raises:
        ValueError: Nothing there says anything of a rank.
    """
    from parakit.hang import diagnose_hang

    with _python_words():
        return diagnose_hang(_paths(paths))


def inspect_checkpoint(
    path: AnyPath,
    *,
    compare: AnyPath | None = None,
    strategy: str | None = None,
    verify: bool = False,
) -> CheckpointInspection:
    """Read what a checkpoint holds and what is wrong with it; execute nothing that it holds.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints or a run, of which the newest is read.
        compare: Another checkpoint, with which every tensor is compared.
        strategy: A strategy of which the result says whether it can load the checkpoint.
        verify: Whether every piece is read and compared with its checksum, which takes longer.

    Raises:
        ValueError: A path is no checkpoint, or of a format that is not read.
    """
    from parakit.checkpoint import inspect_folder

    (folder,) = _paths(path)
    other = Path(compare).expanduser() if compare else None
    with _python_words():
        return inspect_folder(folder, compare=other, strategy=strategy, verify=verify)


def compare_captures(reference: AnyPath, other: AnyPath) -> VerifyVerdict:
    """Find the first tensor of a training step that differs from a reference by more than rounding.

    Args:
        reference: Folder of a capture that measured how far rounding moves tensors, as `capture` does.
        other: Folder of the capture that is judged.

    Returns:
        The verdict: held, the first wrong tensor, or not comparable with the reason.
    """
    from parakit.experiments import judge_captures

    with _python_words():
        return judge_captures(Path(reference).expanduser(), Path(other).expanduser()).verdict


def _plan_options(**arguments: Any) -> PlanOptions:
    """Return the options of the planner, each value checked as that of the command's variable is.

    Raises:
        ValueError: A value is not of its kind.
    """
    from parakit.config import settings
    from parakit.config.setting import format_setting, parse_setting
    from parakit.planner import PlanOptions

    options: dict[str, Any] = {}
    for name, value in arguments.items():
        if value is None:
            continue
        if name == "extra":
            options[name] = value if isinstance(value, str) else shlex.join(value)
        elif name == "calibrate":
            options[name] = value
        else:
            options[name] = parse_setting(getattr(settings, name.upper()), format_setting(value))
    return PlanOptions(**options)


def _paths(paths: Paths) -> list[Path]:
    """Return one path or several as a list."""
    several = [paths] if isinstance(paths, str | PathLike) else paths
    return [Path(path).expanduser() for path in several]


@contextmanager
def _python_words() -> Iterator[None]:
    """Raise refusals again in Python's words: arguments for make's variables, and how to install torch."""
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
    """Return a sentence with arguments of this module in place of make's variables.

    `GPUS=8` becomes `gpus=8` and `STRATEGY=tp2` becomes `strategy="tp2"`. Commands in single quotes, such as
    'make report', stay.
    """
    from parakit.config.settings import OPTIONS, SETTINGS

    known = {setting.name for setting in SETTINGS}

    def argument(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in known:
            return match[0]
        lower = _ARGUMENTS.get(name, name.lower())
        if value is None:
            return lower
        end = "." if value.endswith(".") else ""
        value = value.removesuffix(".")
        is_plain = not value or value.startswith('"') or _NUMBER.fullmatch(value)
        return f"{lower}={value}{end}" if is_plain else f'{lower}="{value}"{end}'

    for setting in OPTIONS:
        option = "--" + setting.name.lower().replace("_", "-")
        text = text.replace(f"{option} ", f"{setting.name.lower()}= ")
    return _VARIABLE.sub(argument, text)


_ARGUMENTS = {"DUMPS": "paths", "LOGS": "paths", "CKPT": "path"}
"""Names of arguments that are not those of the variables in lower case."""
_NUMBER = re.compile(r"-?[\d.]+(e[+-]?\d+)?")
_VARIABLE = re.compile(
    r"'make [^']*'"
    r"|\b(?P<name>[A-Z][A-Z_0-9]+)(?:=(?P<value>\"[^\"]*\"|[^\s\"',;:()]*)|(?= (?:has|begins|cannot) ))"
)
