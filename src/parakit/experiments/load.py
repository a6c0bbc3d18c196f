"""`examples/experiments/NAME.yaml` and the caller's variables as cells with everything resolved.

A file that holds a key or a setting that is not known is refused by that name. A field of a cell that is
a list is an axis: every combination is a cell.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import cached_property
from itertools import product
from typing import Any

import msgspec

from megatron_patches.fusions import NAMES
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_yaml
from parakit.config.model import Model, load_model
from parakit.config.run import Backend, DeviceKind, OptimizerName
from parakit.config.strategy import count_devices
from parakit.costs import total_parameters
from parakit.experiments.definition import (
    FOLDER,
    SWEEP,
    Cell,
    Experiment,
    ExperimentFile,
    VariableValue,
)
from parakit.launch import (
    RUN_SETTINGS,
    Job,
    Options,
    options_from_texts,
    parse_devices,
    parse_target,
    visible_gpus,
)

AXES = {"MODELS": "model", "DEVICES": "devices", "STRATEGIES": "strategy", "BACKENDS": "backend"}
"""The caller's axes, and the fields of a cell for which they count; the last one is the fastest."""

_MIN_SIMILARITY = 0.8
"""Likeness of a mistyped name: `siz` and `size` have 0.86."""


class _CellEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `cells`, with one value of each axis."""

    strategy: str = "baseline"
    model: str = ""
    devices: str = ""
    label: str = ""
    why: str = ""
    backend: Backend | None = None
    optimizer: OptimizerName | None = None
    seed_offset: int = 0
    fused: bool = True
    base: str = ""
    without: str = ""
    settings: dict[str, VariableValue] = {}
    repeats: int | None = None
    needs: str = ""
    on_request: bool = False


def load_experiment(
    name: str,
    options: Options,
    model: str | None = None,
    trained: Job | None = None,
    only: Sequence[str] = (),
) -> Experiment:
    """Read an experiment, for a model of the caller's or its own, on the devices that are here.

    With `trained` every cell trains that: its strategy and model on its devices. With `only` there are
    the cells of these labels, else all but those on request.

    Raises:
        LaunchError: There is none of this name, or its file holds what is not known.
    """
    return _Loader(name, read_experiment_file(name), options, model, trained, only).experiment({})


def load_sweep(name: str, options: Options, axes: Mapping[str, str]) -> Experiment:
    """The cells of `NAME.yaml`, or of `sweep.yaml` where that is no sweep, over the caller's axes.

    Axes are by the names of `AXES` and count in place of the file's. Words may be apart by spaces or
    commas. The first backend is the one the others are compared with.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or the name is nearly a
            file's; it is named.
    """
    names = [path.stem for path in FOLDER.glob("*.yaml")]
    own = read_experiment_file(name) if name in names else None
    near = difflib.get_close_matches(name, names, n=1, cutoff=_MIN_SIMILARITY)
    if own is None and near and not any(axes.values()):  # It would train the default axes.
        raise LaunchError(
            f"NAME={name} is no file of examples/experiments, but nearly {near[0]}.yaml; use "
            f"NAME={near[0]}, or say what to sweep: MODELS=, STRATEGIES=, BACKENDS=, DEVICES=."
        )
    file = own if own and own.table == SWEEP else read_experiment_file(SWEEP)
    given = {
        field: list(dict.fromkeys(words.replace(",", " ").split()))
        for axis, field in AXES.items()
        if (words := axes.get(axis))
    }
    for word in given.get("backend", []):
        if word not in list(Backend):
            raise LaunchError(f"BACKENDS={word} is not megatron, native, deepspeed or bare.")
    for word in given.get("devices", []):
        parse_devices(word, "DEVICES")
    return replace(_Loader(name, file, options).experiment(given), report=name)


def read_experiment_file(name: str) -> ExperimentFile:
    """A file's keys.

    Raises:
        LaunchError: There is none of this name, or it holds what is not known.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.yaml")))
        raise LaunchError(f"There is no experiment '{name}'; there are {known}.")
    return _convert(ExperimentFile, read_yaml(path), name)


def _convert[T](kind: type[T], data: object, name: str) -> T:
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        file = (FOLDER / f"{name}.yaml").relative_to(ROOT)
        raise LaunchError(f"{file} is no experiment: {error}.") from None


@dataclass(frozen=True)
class _Loader:
    """One file under one caller's variables."""

    name: str
    file: ExperimentFile
    options: Options
    model: str | None = None
    trained: Job | None = None
    only: Sequence[str] = ()

    def experiment(self, axes: Mapping[str, list[str]]) -> Experiment:
        file = self.file
        entries = [entry for each in file.cells for entry in self._entries(each, axes)]
        needed = {entry.needs for entry in entries if entry.needs}
        lacking = {name for name in needed if importlib.util.find_spec(name) is None}
        known = [entry.label for entry in entries if entry.label]
        for name in self.only:
            if name not in known:
                raise LaunchError(f"ONLY knows no setting '{name}'; it knows {', '.join(known)}.")
        entries = [
            entry
            for entry in entries
            if (entry.label in self.only if self.only else not entry.on_request)
            and entry.needs not in lacking
        ]
        seeds = max(file.repeats, self.options.repeats) if file.repeats_change_seed else 1
        cells = tuple(self._cell(entry, seed) for seed in range(seeds) for entry in entries)
        return Experiment(
            report=file.report.format(model=cells[0].job.model.name),
            cells=cells,
            file=file,
            budget_seconds=file.budget_seconds,
            left_out=tuple(file.packages[package] for package in sorted(lacking)),
        )

    def _entries(
        self, given: str | Mapping[str, Any], axes: Mapping[str, list[str]]
    ) -> Iterator[_CellEntry]:
        """Every combination; models from small to large, the others in their order."""
        fields = {"strategy": given} if isinstance(given, str) else {**given, **axes}
        ordered = {name: fields[name] for name in AXES.values() if name in fields} | fields
        settings = ordered.pop("settings", {})
        ordered |= settings
        if isinstance(models := ordered.get("model"), list):
            strategies = ordered.get("strategy", ())
            for strategy in (strategies,) if isinstance(strategies, str) else strategies:
                for model in models:  # What is not known is refused.
                    parse_target(f"train-{strategy}-{model}-1cpu")
            sizes = {model: total_parameters(load_model(model).shape) for model in models}
            ordered["model"] = sorted(models, key=sizes.__getitem__)
        lists = (each if isinstance(each, list) else [each] for each in ordered.values())
        for values in product(*lists):
            one = dict(zip(ordered, values, strict=True))
            one |= {key: one[key].format(**one) for key in ("label", "why") if key in one}
            one["settings"] = {variable: one.pop(variable) for variable in settings}
            yield _convert(_CellEntry, one, self.name)

    def _cell(self, entry: _CellEntry, seed: int) -> Cell:
        file, job = self.file, self.trained
        if job is None:  # A strategy that names no number of devices has the file's.
            number = count_devices(entry.strategy, otherwise=file.devices)
            place = parse_devices(entry.devices) if entry.devices else (number, self._device)
            model = load_model(entry.model or self.model or file.model)
            job = Job(entry.strategy, model, *place)
        options = self._common(job.model, job.device)
        own = self._own(entry)
        options = replace(
            options,
            backend=entry.backend or options.backend,
            optimizer=entry.optimizer or options.optimizer,
            seed=options.seed + entry.seed_offset + seed,
            fused=options.fused if entry.fused else (),
        )
        # A cell's flags come behind those of all cells, and the last one counts.
        own["extra"] = (*options.extra, *own.get("extra", ()))
        if file.apart:
            own["runs"] = options.runs / file.report / entry.label
        repeats = entry.repeats or options.repeats
        return Cell(job.with_options(replace(options, **own)), entry.label, entry.why, repeats)

    def _own(self, entry: _CellEntry) -> dict[str, Any]:
        """An entry's variables over its base's; EXTRA comes behind, FUSED is joined."""
        own = self._variables(entry.settings)
        if not entry.base:
            return own
        if entry.base not in self.file.bases:
            known = ", ".join(self.file.bases)
            raise LaunchError(f"{self.name}.yaml has no base '{entry.base}'; it has {known}.")
        base = self._variables(self.file.bases[entry.base])
        patches = {*base.get("fused", ()), *own.get("fused", ())} - {entry.without}
        fused = tuple(name for name in NAMES if name in patches)
        extra = (*base.get("extra", ()), *own.get("extra", ()))
        return {**base, **own, "fused": fused, "extra": extra}

    @cached_property
    def _device(self) -> DeviceKind:
        file = self.file
        if file.device != "any":
            return DeviceKind(file.device)
        return DeviceKind.GPU if len(visible_gpus()) >= file.devices else DeviceKind.CPU

    def _common(self, model: Model, device: DeviceKind) -> Options:
        """The caller's over the file's defaults, under what is fixed.

        Defaults are of the batch, then of all, of the device, of the model: a later one counts.
        """
        file, unset = self.file, Options()
        given: dict[str, Any] = {}
        if file.batch != "strategy":
            ranks = file.devices if file.batch == "model_each_rank" else 1
            given["micro_batch_size"] = model.batch.micro_batch_size
            given["global_batch_size"] = model.batch.global_batch_size * ranks
        of_device = file.on_cpu if device is DeviceKind.CPU else file.on_gpu
        of_model = [each for name, each in file.on_models.items() if fnmatch(model.name, name)]
        for variables in (file.defaults, of_device, *of_model):
            given |= self._variables(variables)
        defaults = {
            field: value
            for field, value in given.items()
            if getattr(self.options, field) == getattr(unset, field)
        }
        fixed = self._variables(file.fixed) | ({"repeats": 1} if file.repeats_change_seed else {})
        options = replace(self.options, **{**defaults, **fixed})
        if file.evaluation_batches is None:
            return options
        once = ("--eval-interval", str(options.iterations))
        batches = ("--eval-iters", str(file.evaluation_batches))
        return replace(options, extra=(*once, *batches, *options.extra))

    def _variables(self, variables: Mapping[str, VariableValue]) -> dict[str, Any]:
        return parse_option_fields(variables, f"{self.name}.yaml")


def parse_option_fields(variables: Mapping[str, VariableValue], source: str) -> dict[str, Any]:
    """Fields of `Options` that make variables set.

    Raises:
        LaunchError: One is not known or changes nothing; `source` says where it is set.
    """
    texts = {
        key: str(int(value)) if isinstance(value, bool) else str(value)
        for key, value in variables.items()
    }
    read, unset = options_from_texts(texts), Options()
    known = {setting.name for setting in RUN_SETTINGS}
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
