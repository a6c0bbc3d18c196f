"""What an experiment is, and how `examples/experiments/NAME.yaml` says it.

A file that holds a key or a setting that is not known is refused by that name.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from itertools import product
from typing import Any, Literal

import msgspec

from tools.launch.devices import visible_gpus
from tools.launch.job import Job, parse_devices, parse_target
from tools.launch.options import OF_A_RUN, Options, options_from_texts
from tools.plan.tensors import parameters_total
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT, read_yaml
from tools.spec.model import load_model
from tools.spec.run import Backend, DeviceKind, OptimizerName
from tools.spec.strategy import devices_of

FOLDER = ROOT / "examples" / "experiments"

SWEEP = "sweep"
"""The file whose axes a sweep has that has no file of its own; also the table of sweeps."""

_NEAR = 0.8
"""Likeness of a mistyped name: `siz` and `size` have 0.86."""
_NAME = re.compile(r"\w[\w.-]*")

VariableValue = str | int | float | bool
"""A make variable's value, as YAML has it."""


@dataclass(frozen=True)
class ExperimentCell:
    """One thing to train."""

    model: str
    strategy: str
    devices: int
    device: DeviceKind
    backend: Backend | None = None
    """None is the caller's BACKEND=."""
    optimizer: OptimizerName | None = None
    """None is the caller's OPTIMIZER=."""
    seed_offset: int = 0
    """Added to SEED=."""
    fused: bool = True
    """Whether FUSED= applies."""
    label: str = ""
    """What it is called, where strategy and backend do not tell cells apart."""
    settings: tuple[tuple[str, VariableValue], ...] = ()
    """Make variables of this cell alone, whatever the caller's say."""
    repeats: int | None = None
    """None is the caller's REPEATS=."""
    expected_seconds: float = 0.0
    """Of a run, while none was timed; an experiment with a time budget leaves out what does not fit."""

    @property
    def job(self) -> Job:
        """Without its variables, which the caller's complete (`cells.cell_job`)."""
        return Job(self.strategy, load_model(self.model), self.devices, self.device)

    @property
    def name(self) -> str:
        """In full, for people."""
        if self.label:
            return self.label
        backend = self.backend or Backend.MEGATRON
        return f"{backend} {self.strategy} {self.model} {self.devices}{self.device}"


@dataclass(frozen=True)
class Experiment:
    """Cells that are trained under common settings and compared."""

    report: str
    """Folder of its results in `reports/`."""
    cells: tuple[ExperimentCell, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Options` where the caller's variables do not set them."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Options` whatever the caller's variables say."""
    table: str = ""
    """What is made of the runs: a kind of table, as `commands.output_of` takes it."""
    evaluation_batches: int | None = None
    """Of one evaluation at the end; None leaves evaluation to the recipe."""
    takes_finished: bool = False
    """Whether a run that was made before is taken in place of another one."""
    skips_illegal: bool = False
    """Whether a cell that cannot work is left out; else it refuses the whole experiment."""
    instead: str = ""
    """What to run where this one is refused."""
    warm: bool = False
    """Whether ranks are forked from one process that has imported Megatron, where they can be."""
    budget_seconds: float | None = None
    """For all runs together; one that is not done by then is ended. None is no limit."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for the ranks."""
    left_out: tuple[str, ...] = ()
    """A sentence for each package that is not installed and the cells that need it."""

    def settings(self, options: Options) -> Options:
        """The caller's options with this experiment's settings."""
        unset = Options()
        chosen = {
            name: value
            for name, value in self.defaults.items()
            if getattr(options, name) == getattr(unset, name)
        }
        options = replace(options, **{**chosen, **self.fixed})
        if self.evaluation_batches is None:
            return options
        iterations = str(options.iterations)
        once = ("--eval-interval", iterations, "--eval-iters", str(self.evaluation_batches))
        return replace(options, extra=(*once, *options.extra))


class _Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    strategy: str
    backend: Backend | None = None
    optimizer: OptimizerName | None = None
    seed_offset: int = 0
    fused: bool = True
    settings: dict[str, VariableValue] = {}
    repeats: int | None = None
    needs: str = ""


class _ExperimentFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's keys; `examples/experiments/README.md` explains them."""

    report: str
    model: str = ""
    cells: list[str | _Cell] = []
    axes: dict[str, str] = {}
    device: Literal["cpu", "gpu", "any"] = "any"
    devices: int = 2
    batch: Literal["strategy", "model", "model_each_rank"] = "strategy"
    defaults: dict[str, VariableValue] = {}
    on_cpu: dict[str, VariableValue] = {}
    on_gpu: dict[str, VariableValue] = {}
    on_models: dict[str, dict[str, VariableValue]] = {}
    fixed: dict[str, VariableValue] = {}
    environment: dict[str, str] = {}
    warm: bool = False
    budget_seconds: float | None = None
    evaluation_batches: int | None = None
    repeats: int = 1
    repeats_change_seed: bool = False
    takes_finished: bool = False
    table: str = ""
    page: str = ""
    instead: str = ""
    packages: dict[str, str] = {}


def load_experiment(
    name: str, options: Options, model: str | None = None, trained: Job | None = None
) -> Experiment:
    """Read an experiment, for a model of the caller's or its own, on the devices that are here.

    With `trained` every cell trains that: its strategy and model on its devices.

    Raises:
        LaunchError: There is none of this name, or its file holds what is not known.
    """
    file, source = _read(name), f"{name}.yaml"
    if file.axes:
        return load_sweep(name, {})
    model = trained.model.name if trained else load_model(model or file.model).name
    device = trained.device if trained else _device(file)
    entries = [_Cell(entry) if isinstance(entry, str) else entry for entry in file.cells]
    lacking = {e.needs for e in entries if e.needs and importlib.util.find_spec(e.needs) is None}
    cells = [
        ExperimentCell(
            model,
            trained.strategy if trained else entry.strategy,
            trained.devices if trained else devices_of(entry.strategy, otherwise=file.devices),
            device,
            entry.backend,
            entry.optimizer,
            entry.seed_offset,
            entry.fused,
            settings=tuple(entry.settings.items()),
            repeats=entry.repeats,
        )
        for entry in entries
        if entry.needs not in lacking
    ]
    if file.repeats_change_seed:
        seeds = range(max(file.repeats, options.repeats))
        cells = [replace(c, seed_offset=c.seed_offset + seed) for seed in seeds for c in cells]
    return Experiment(
        report=file.report.format(model=model),
        cells=tuple(cells),
        defaults=_defaults(file, source, model, device),
        fixed=option_fields(file.fixed, source)
        | ({"repeats": 1} if file.repeats_change_seed else {}),
        table=file.table,
        evaluation_batches=file.evaluation_batches,
        takes_finished=file.takes_finished,
        instead=file.instead,
        warm=file.warm,
        budget_seconds=file.budget_seconds,
        environment=file.environment,
        left_out=tuple(file.packages[package] for package in sorted(lacking)),
    )


def load_sweep(name: str, given: Mapping[str, str]) -> Experiment:
    """Every combination of the axes of `NAME.yaml`, or of `sweep.yaml` where there is no such file.

    Backends of one model are beside one another, small models come first. Words may be apart by spaces
    or commas. The first backend is the one the others are compared with.

    Args:
        name: Of the file, and of the report's folder.
        given: Axes of the caller's, which count in place of the file's.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or the name is nearly a
            file's; it is named.
    """
    if not _NAME.fullmatch(name):
        raise LaunchError(f"NAME: {name} is not a folder's name.")
    own = _read(name) if (FOLDER / f"{name}.yaml").is_file() else None
    if own is None and not any(given.values()):
        _refuse_near(name)
    file = own if own and own.axes else _read(SWEEP)
    axes = {**file.axes, **{axis: words for axis, words in given.items() if words}}
    return Experiment(
        report=name,
        cells=_over_axes(axes, file),
        defaults=option_fields(file.defaults, f"{name}.yaml"),
        takes_finished=file.takes_finished,
        skips_illegal=True,
        table=file.table,
        warm=file.warm,
    )


def _refuse_near(name: str) -> None:
    """A name that was meant to be a file's would train the default axes instead."""
    names = [path.stem for path in FOLDER.glob("*.yaml")]
    if near := difflib.get_close_matches(name, names, n=1, cutoff=_NEAR):
        raise LaunchError(
            f"NAME={name} is no file of examples/experiments, but nearly {near[0]}.yaml; use "
            f"NAME={near[0]}, or say what to sweep: MODELS=, STRATEGIES=, BACKENDS=, DEVICES=."
        )


def _over_axes(axes: Mapping[str, str], file: _ExperimentFile) -> tuple[ExperimentCell, ...]:
    def words(axis: str) -> list[str]:
        return list(dict.fromkeys(axes[axis].replace(",", " ").split()))

    models, strategies = words("MODELS"), words("STRATEGIES")
    for model, strategy in product(models, strategies):
        parse_target(f"train-{strategy}-{model}-1cpu")
    backends = [_backend(word) for word in words("BACKENDS")]
    models.sort(key=lambda name: parameters_total(load_model(name).shape))
    if "DEVICES" in axes:
        devices = [parse_devices(word, "DEVICES") for word in words("DEVICES")]
        places = list(product(devices, strategies))
    else:
        numbers = [devices_of(strategy, otherwise=file.devices) for strategy in strategies]
        kind = _device(file)
        places = [((n, kind), each) for n, each in zip(numbers, strategies, strict=True)]
    return tuple(
        ExperimentCell(model, strategy, number, kind, backend)
        for model, ((number, kind), strategy), backend in product(models, places, backends)
    )


def _backend(word: str) -> Backend:
    try:
        return Backend(word)
    except ValueError:
        raise LaunchError(f"BACKENDS={word} is not megatron, native, deepspeed or bare.") from None


def _device(file: _ExperimentFile) -> DeviceKind:
    enough = len(visible_gpus()) >= file.devices if file.device == "any" else file.device == "gpu"
    return DeviceKind.GPU if enough else DeviceKind.CPU


def _read(name: str) -> _ExperimentFile:
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.yaml")))
        raise LaunchError(f"There is no experiment '{name}'; there are {known}.")
    try:
        return msgspec.convert(read_yaml(path), type=_ExperimentFile)
    except msgspec.ValidationError as error:
        raise LaunchError(f"{path.relative_to(ROOT)} is no experiment: {error}.") from None


def _defaults(file: _ExperimentFile, source: str, model: str, device: DeviceKind) -> dict[str, Any]:
    """Of the batch, then of all, of the device, of the model: a later one counts."""
    own = load_model(model).batch
    batch: dict[str, Any] = {}
    if file.batch != "strategy":
        ranks = file.devices if file.batch == "model_each_rank" else 1
        batch = {
            "micro_batch_size": own.micro_batch_size,
            "global_batch_size": own.global_batch_size * ranks,
        }
    of_device = file.on_cpu if device is DeviceKind.CPU else file.on_gpu
    return {
        **batch,
        **option_fields(file.defaults, source),
        **option_fields(of_device, source),
        **{
            field: value
            for pattern, variables in file.on_models.items()
            if fnmatch(model, pattern)
            for field, value in option_fields(variables, source).items()
        },
    }


def option_fields(variables: Mapping[str, VariableValue], source: str) -> dict[str, Any]:
    """Fields of `Options` that make variables set.

    Raises:
        LaunchError: One is not known or changes nothing; `source` says where it is set.
    """
    texts = {
        key: str(int(value)) if isinstance(value, bool) else str(value)
        for key, value in variables.items()
    }
    read, unset = options_from_texts(texts), Options()
    known = {setting.name for setting in OF_A_RUN}
    for key in texts:
        others = {other: text for other, text in texts.items() if other != key}
        if key not in known:
            raise LaunchError(f"{source} sets {key}, which is no variable of a training target.")
        if options_from_texts(others) == read:
            raise LaunchError(f"{source} sets {key} to its default, which changes nothing.")
    return {
        each.name: getattr(read, each.name)
        for each in fields(Options)
        if each.compare and getattr(read, each.name) != getattr(unset, each.name)
    }
