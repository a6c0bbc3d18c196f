"""Load experiments: `examples/experiments/NAME.yaml` and the caller's variables give cells with all variables set.

A file with an unknown key or variable is refused by the name of the key. A field of a cell that is a list is an
axis: every combination of the axes' values is a cell.
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
from parakit.config.errors import LaunchError, suggest_names
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
"""Fields of a cell by the make variable that replaces them. Cells are ordered by them; the last one varies fastest."""

_MIN_SIMILARITY = 0.8
"""Similarity from which a name counts as mistyped: `siz` and `size` have 0.86."""


class _CellEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `cells`, with one value per axis."""

    strategy: str = "baseline"
    model: str = ""
    """Model; empty means that of the caller or of the file."""
    devices: str = ""
    """Devices, such as `2cpu`; empty means those of the file."""
    label: str = ""
    """Name of the cell in tables and in ONLY=."""
    why: str = ""
    """Reason why the cell is trained."""
    backend: Backend | None = None
    optimizer: OptimizerName | None = None
    seed_offset: int = 0
    """Number that is added to the caller's seed."""
    fused: bool = True
    """Whether the cell has the caller's FUSED=. False trains without these patches."""
    base: str = ""
    """Name in the file's `bases`, whose variables the cell has too; empty means none."""
    without: str = ""
    """Patch that is left out of the FUSED= of entry and base; empty leaves out none."""
    settings: dict[str, VariableValue] = {}
    """Further make variables of the cell."""
    repeats: int | None = None
    """Number of runs; None is the caller's REPEATS=."""
    needs: str = ""
    """Package without which the cell is left out; empty means none."""
    on_request: bool = False
    """Whether the cell is loaded only if ONLY= names its label."""


def load_experiment(
    name: str,
    options: Options,
    model: str | None = None,
    trained: Job | None = None,
    only: Sequence[str] = (),
) -> Experiment:
    """Load an experiment for this machine's devices.

    Args:
        name: Name of the file in `examples/experiments/`.
        options: The caller's make variables.
        model: Model of all cells that name none; None is the file's.
        trained: A job whose strategy, model and devices all cells have; None leaves them to the file.
        only: Labels of the cells to load; empty loads all cells but those with `on_request`.

    Raises:
        LaunchError: There is no such experiment, or its file holds an unknown key or variable.
    """
    loader = _Loader(name, read_experiment_file(name), options, model, trained, only)
    return loader.load({})


def load_sweep(name: str, options: Options, axes: Mapping[str, str]) -> Experiment:
    """Load a sweep over the caller's axes from `NAME.yaml`, or from `sweep.yaml` if there is no such file.

    Args:
        name: Name of the sweep.
        options: The caller's make variables.
        axes: Values by the names of `AXES`, separated by spaces or commas; they replace the file's values. Other
            backends are compared with the first one.

    Raises:
        LaunchError: A word is no model, strategy, backend or number of devices, or the name is almost the name of
            a file, which the message names.
    """
    file = _read_sweep_file(name, has_axes=any(axes.values()))
    values_by_field = {}
    for axis, field in AXES.items():
        values = axes.get(axis, "").replace(",", " ").split()
        if values:
            values_by_field[field] = list(dict.fromkeys(values))
    for backend in values_by_field.get("backend", []):
        if backend not in list(Backend):
            raise LaunchError(f"BACKENDS={backend} is not megatron, native, deepspeed or bare.")
    for devices in values_by_field.get("devices", []):
        parse_devices(devices, "DEVICES")
    return replace(_Loader(name, file, options).load(values_by_field), report=name)


def _read_sweep_file(name: str, has_axes: bool) -> ExperimentFile:
    """Return the file of a sweep: `NAME.yaml` if it is a sweep, else `sweep.yaml`.

    Args:
        name: Name of the sweep.
        has_axes: True if the caller says what to sweep.

    Raises:
        LaunchError: The name is almost a file's, and the caller does not say what to sweep.
    """
    names = [path.stem for path in FOLDER.glob("*.yaml")]
    if name in names:
        file = read_experiment_file(name)
        if file.table == SWEEP:
            return file
    elif not has_axes:
        _refuse_mistyped_name(name, names)
    return read_experiment_file(SWEEP)


def _refuse_mistyped_name(name: str, names: Sequence[str]) -> None:
    """Refuse a name that is almost a file's, with which a sweep would train the default axes.

    Raises:
        LaunchError: The name is almost a file's.
    """
    similar = difflib.get_close_matches(name, names, n=1, cutoff=_MIN_SIMILARITY)
    if similar:
        raise LaunchError(
            f"NAME={name} is no file of examples/experiments, but nearly {similar[0]}.yaml; use "
            f"NAME={similar[0]}, or say what to sweep: MODELS=, STRATEGIES=, BACKENDS=, DEVICES=."
        )


def read_experiment_file(name: str) -> ExperimentFile:
    """Read the file of an experiment.

    Raises:
        LaunchError: There is no such file, or it holds an unknown key.
    """
    path = FOLDER / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in FOLDER.glob("*.yaml")))
        raise LaunchError(f"There is no experiment '{name}'; there are {known}.")
    return _convert(ExperimentFile, read_yaml(path), name)


def _convert[T: msgspec.Struct](kind: type[T], data: object, name: str) -> T:
    """Convert data of an experiment's file to a structure.

    Raises:
        LaunchError: The data do not fit; the message names the file, and the known key that is most similar to an
            unknown one.
    """
    file = (FOLDER / f"{name}.yaml").relative_to(ROOT)
    known_keys = [field.name for field in msgspec.structs.fields(kind)]
    for key in data if isinstance(data, Mapping) else ():
        if key not in known_keys:
            hint = suggest_names(str(key), known_keys, f"it has {', '.join(known_keys)}")
            raise LaunchError(f"{file} has the key '{key}', which no experiment has; {hint}")
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        raise LaunchError(f"{file} is no experiment: {error}.") from None


@dataclass(frozen=True)
class _Loader:
    """Loads the cells of one file under the variables of one caller."""

    name: str
    file: ExperimentFile
    options: Options
    model: str | None = None
    trained: Job | None = None
    only: Sequence[str] = ()

    def load(self, axes: Mapping[str, list[str]]) -> Experiment:
        """Return the experiment; `axes` replace values of the file, by the field of a cell.

        Cells that need a package that is not installed are left out, with a sentence per package.

        Raises:
            LaunchError: `only` names a label that no entry has, or an entry holds an unknown model or variable.
        """
        file = self.file
        entries: list[_CellEntry] = []
        for cell in file.cells:
            entries += self._expand_entries(cell, axes)
        packages = {entry.needs for entry in entries if entry.needs}
        missing = {name for name in packages if importlib.util.find_spec(name) is None}
        chosen = [entry for entry in self._choose_entries(entries) if entry.needs not in missing]
        num_seeds = 1
        if file.repeats_change_seed:
            num_seeds = max(file.repeats, self.options.repeats)
        cells: list[Cell] = []
        for seed in range(num_seeds):
            cells += [self._make_cell(entry, seed) for entry in chosen]
        return Experiment(
            report=file.report.format(model=cells[0].job.model.name),
            cells=tuple(cells),
            file=file,
            budget_seconds=file.budget_seconds,
            left_out=tuple(file.packages[package] for package in sorted(missing)),
        )

    def _choose_entries(self, entries: Sequence[_CellEntry]) -> list[_CellEntry]:
        """Return the entries with a label in `only`. Without `only`, return all entries except the entries with
        `on_request`.

        Raises:
            LaunchError: `only` names a label that no entry has.
        """
        labels = [entry.label for entry in entries if entry.label]
        for name in self.only:
            if name not in labels:
                raise LaunchError(f"ONLY knows no setting '{name}'; it knows {', '.join(labels)}.")
        if self.only:
            return [entry for entry in entries if entry.label in self.only]
        return [entry for entry in entries if not entry.on_request]

    def _expand_entries(
        self, cell: str | Mapping[str, Any], axes: Mapping[str, list[str]]
    ) -> Iterator[_CellEntry]:
        """Yield an entry per combination of a cell's axes; models vary from small to large.

        Args:
            cell: A cell of the file: its fields, or only the name of its strategy, to which `axes` do not apply.
            axes: Values by the field of a cell, which replace those of the file.
        """
        fields: dict[str, Any] = {"strategy": cell}
        if not isinstance(cell, str):
            fields = {**cell, **axes}
        settings = fields.pop("settings", {})
        if isinstance(fields.get("model"), list):
            fields["model"] = _sort_models(fields["model"], fields.get("strategy", ()))
        # The first field varies slowest. So axes come first, in their order, and settings last.
        axis_fields = {name: fields[name] for name in AXES.values() if name in fields}
        ordered = {**axis_fields, **fields, **settings}
        # A field that is no list has one value.
        values_per_field = [
            values if isinstance(values, list) else [values] for values in ordered.values()
        ]
        for combination in product(*values_per_field):
            entry = dict(zip(ordered, combination, strict=True))
            # Texts may name other fields, as in `{model} under {strategy}`.
            texts = {key: entry[key].format(**entry) for key in ("label", "why") if key in entry}
            entry |= texts
            entry["settings"] = {variable: entry.pop(variable) for variable in settings}
            yield _convert(_CellEntry, entry, self.name)

    def _make_cell(self, entry: _CellEntry, seed: int) -> Cell:
        """Return the cell of an entry, with `seed` added to its seed.

        Options of the entry and its base replace those that all cells share. The job is the file's trained job, or
        else the entry's own.
        """
        file, job = self.file, self.trained
        if job is None:
            job = self._make_job(entry)
        options = self._merge_shared_options(job.model, job.device)
        cell_fields = self._merge_base(entry)
        options = replace(
            options,
            backend=entry.backend or options.backend,
            optimizer=entry.optimizer or options.optimizer,
            seed=options.seed + entry.seed_offset + seed,
            fused=options.fused if entry.fused else (),
        )
        # Of equal flags the last one counts, so a cell's flags follow those of all cells.
        cell_fields["extra"] = (*options.extra, *cell_fields.get("extra", ()))
        if file.apart:
            cell_fields["runs"] = options.runs / file.report / entry.label
        repeats = entry.repeats or options.repeats
        job = job.with_options(replace(options, **cell_fields))
        return Cell(job, entry.label, entry.why, repeats)

    def _make_job(self, entry: _CellEntry) -> Job:
        """Return the job of an entry; a strategy that names no number of devices has the file's."""
        devices = count_devices(entry.strategy, otherwise=self.file.devices)
        device = self._device
        if entry.devices:
            devices, device = parse_devices(entry.devices)
        model = load_model(entry.model or self.model or self.file.model)
        return Job(entry.strategy, model, devices, device)

    def _merge_base(self, entry: _CellEntry) -> dict[str, Any]:
        """Return the fields of `Options` that an entry and its base set. The entry's values replace those of the base.

        FUSED= is the union of both, without the patch in the entry's `without`. EXTRA= has the flags of the base, and
        then the flags of the entry.

        Raises:
            LaunchError: The file has no such base.
        """
        entry_fields = self._parse_fields(entry.settings)
        if not entry.base:
            return entry_fields
        if entry.base not in self.file.bases:
            known = ", ".join(self.file.bases)
            raise LaunchError(f"{self.name}.yaml has no base '{entry.base}'; it has {known}.")
        base = self._parse_fields(self.file.bases[entry.base])
        patches = {*base.get("fused", ()), *entry_fields.get("fused", ())} - {entry.without}
        fused = tuple(name for name in NAMES if name in patches)
        extra = (*base.get("extra", ()), *entry_fields.get("extra", ()))
        return {**base, **entry_fields, "fused": fused, "extra": extra}

    @cached_property
    def _device(self) -> DeviceKind:
        """Kind of devices: the file's, or GPUs if this machine has enough of them."""
        file = self.file
        if file.device != "any":
            return DeviceKind(file.device)
        return DeviceKind.GPU if len(visible_gpus()) >= file.devices else DeviceKind.CPU

    def _merge_shared_options(self, model: Model, device: DeviceKind) -> Options:
        """Return the options that all cells with this model and kind of devices share.

        Variables that the file fixes replace the caller's variables, and these replace the file's defaults.
        """
        file, unset = self.file, Options()
        chosen_fields: dict[str, Any] = {}
        for field, value in self._list_default_fields(model, device).items():
            is_unset = getattr(self.options, field) == getattr(unset, field)
            if is_unset:
                chosen_fields[field] = value
        chosen_fields |= self._parse_fields(file.fixed)
        if file.repeats_change_seed:
            chosen_fields["repeats"] = 1
        options = replace(self.options, **chosen_fields)
        if file.evaluation_batches is None:
            return options
        # One evaluation, after the last iteration.
        evaluation = (
            *("--eval-interval", str(options.iterations)),
            *("--eval-iters", str(file.evaluation_batches)),
        )
        return replace(options, extra=(*evaluation, *options.extra))

    def _list_default_fields(self, model: Model, device: DeviceKind) -> dict[str, Any]:
        """Return the file's defaults for a model and a kind of devices, by the field of `Options`.

        Defaults of the model have priority, then those of the device, of all cells, and of the batch.
        """
        file = self.file
        default_fields: dict[str, Any] = {}
        if file.batch == "model_each_rank":
            default_fields["micro_batch_size"] = model.batch.micro_batch_size
            default_fields["global_batch_size"] = model.batch.global_batch_size * file.devices
        default_fields |= self._parse_fields(file.defaults)
        device_variables = file.on_cpu if device is DeviceKind.CPU else file.on_gpu
        default_fields |= self._parse_fields(device_variables)
        for pattern, variables in file.on_models.items():
            if fnmatch(model.name, pattern):
                default_fields |= self._parse_fields(variables)
        return default_fields

    def _parse_fields(self, variables: Mapping[str, VariableValue]) -> dict[str, Any]:
        """Return the fields of `Options` that make variables of the file set."""
        return parse_option_fields(variables, f"{self.name}.yaml")


def _sort_models(models: Sequence[str], strategies: str | Sequence[str]) -> list[str]:
    """Return the models from the fewest parameters to the most.

    `strategies` do not influence the order. They are only checked.

    Raises:
        LaunchError: A model or a strategy is unknown.
    """
    checked_strategies = [strategies] if isinstance(strategies, str) else strategies
    for strategy in checked_strategies:
        for model in models:
            parse_target(f"train-{strategy}-{model}-1cpu")
    sizes = {model: total_parameters(load_model(model).shape) for model in models}
    return sorted(models, key=sizes.__getitem__)


def parse_option_fields(variables: Mapping[str, VariableValue], source: str) -> dict[str, Any]:
    """Return the fields of `Options` that make variables set, by the field's name.

    Args:
        variables: Values by the make variable's name.
        source: File that sets them, for error messages.

    Raises:
        LaunchError: A variable is unknown, or is set to its default.
    """
    texts: dict[str, str] = {}
    for key, value in variables.items():
        # In make, True and False are 1 and 0.
        texts[key] = str(int(value)) if isinstance(value, bool) else str(value)
    options, unset = options_from_texts(texts), Options()
    known = {setting.name for setting in RUN_SETTINGS}
    for key in texts:
        if key not in known:
            hint = suggest_names(key, known, "'make help-all' lists the variables of train-%")
            raise LaunchError(
                f"{source} sets {key}, which is no variable of a training target; {hint}"
            )
        other_texts = {other: text for other, text in texts.items() if other != key}
        if options_from_texts(other_texts) == options:
            raise LaunchError(f"{source} sets {key} to its default, which changes nothing.")
    set_fields: dict[str, Any] = {}
    for field in fields(Options):
        value = getattr(options, field.name)
        if field.compare and value != getattr(unset, field.name):
            set_fields[field.name] = value
    return set_fields
