"""A chapter of the tutorial as an experiment: its runs on GPUs as published, or in small on CPU ranks."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from parakit.config.errors import LaunchError
from parakit.config.flags import drop_flags, format_flags, merge_flags, pick_flags
from parakit.config.model import Model, load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import strategy_flags
from parakit.experiments.definition import Cell, Experiment
from parakit.experiments.load import read_experiment_file
from parakit.experiments.tutorial.rows import TutorialRow, rows_of_chapter
from parakit.launch import Job, Options, parse_devices

PUBLISHED_DEVICES = 8
_CPU_ITERATIONS = 6
_CPU_MODEL, _CPU_MIXTURE = "gpt2-tiny", "moe-tiny"
_CPU_HEADS = 8
"""Attention heads of all small models, which TP 8 and the a2a of CP 8 divide."""
_KEPT_FLAGS = (
    *("--recompute-granularity", "--recompute-method", "--recompute-num-layers"),
    *("--cp-comm-type", "--num-layers-per-virtual-pipeline-stage"),
    *("--overlap-grad-reduce", "--overlap-param-gather"),
)
"""Flags of a row that small runs on CPU ranks have too. The others choose kernels of Transformer Engine."""


def load_chapter(
    chapter: str | None, options: Options, devices: str | None = None, model: str | None = None
) -> Experiment:
    """Return the runs of a chapter as an experiment; None is all chapters.

    Args:
        chapter: Name of the chapter.
        options: The caller's make variables.
        devices: DEVICES=, such as `8cpu`; None is eight GPUs.
        model: MODEL=, the small model of CPU ranks; None takes gpt2-tiny, and moe-tiny for mixtures.

    Raises:
        LaunchError: There is no such chapter, or DEVICES= names too few devices for every run. Or MODEL= is set for
            GPUs, where all runs have the published models.
    """
    num_devices, device = parse_devices(devices or f"{PUBLISHED_DEVICES}gpu", "DEVICES")
    if device is DeviceKind.GPU and model is not None:
        raise LaunchError(
            f"MODEL={model} replaces the models of the tutorial on CPU ranks alone; add DEVICES=8cpu, or leave "
            "MODEL= out."
        )
    rows = [row for row in rows_of_chapter(chapter) if row.gpus <= num_devices]
    if not rows:
        raise LaunchError(
            f"DEVICES={devices} is too few for every run of the chapter; use 8{device}."
        )
    is_small = device is DeviceKind.CPU
    # A small run that cannot work on CPU ranks is listed with its rule; on GPUs nothing may be missing.
    file = msgspec.structs.replace(
        read_experiment_file("tutorial"), skips_illegal=is_small, warm=is_small
    )
    cells = []
    for row in rows:
        job = make_small_job(row, options, model) if is_small else row.make_job(options)
        cells.append(Cell(job, row.id, row.label, options.repeats))
    return Experiment(file.report.format(chapter=chapter or "all"), tuple(cells), file)


def make_small_job(row: TutorialRow, options: Options, model: str | None = None) -> Job:
    """Return the job of a row with a small model on as many CPU ranks, with the row's degrees and micro batches.

    The model is a twenty-fourth as wide, has a twelfth of the layers (all of them in pipelines) and a thirty-second
    of the tokens per sample.

    Raises:
        LaunchError: MODEL= names no mixture and the row needs one, or the other way round.
    """
    small = _load_small_model(row, model)
    kept_flags = pick_flags(row.flags, _KEPT_FLAGS)
    options = replace(
        options,
        iterations=options.iterations or _CPU_ITERATIONS,
        micro_batch_size=options.micro_batch_size or row.micro_batch,
        global_batch_size=options.global_batch_size or row.global_batch,
        dropout=0.0 if options.dropout is None else options.dropout,
        # Each shape would need an initial checkpoint of its own, and no losses are compared.
        shared_start=bool(options.shared_start),
        extra=(*_shrink_shape(row, small), *kept_flags, *options.extra),
    )
    flags = drop_flags(strategy_flags(row.parallelism), ("--num-virtual-stages-per-pipeline-rank",))
    # Run 121 has this flag on one rank, whose strategy is the baseline. Megatron overlaps no gathers without it.
    flags = merge_flags(flags, pick_flags(row.flags, ("--use-distributed-optimizer",)))
    return Job(row.strategy, small, row.gpus, DeviceKind.CPU, options, flags)


def _load_small_model(row: TutorialRow, model: str | None) -> Model:
    """Return the model of a row's small run: the model that MODEL= names, else the default of CPU ranks.

    Raises:
        LaunchError: MODEL= names no mixture and the row needs one, or the other way round.
    """
    needs_mixture = row.chapter == "ep"
    default_model = _CPU_MIXTURE if needs_mixture else _CPU_MODEL
    small = load_model(model or default_model)
    is_mixture = bool(small.shape.experts)
    if is_mixture != needs_mixture:
        needed = "a mixture of experts" if needs_mixture else "a dense model"
        raise LaunchError(
            f"Run {row.id} of the tutorial is of {needed}, and MODEL={small.name} is none; leave MODEL= out."
        )
    return small


def _shrink_shape(row: TutorialRow, small: Model) -> tuple[str, ...]:
    """Return the flags that give a small model the shape of a row's model, scaled down."""
    shape = row.loaded_model.shape
    # The layers of a pipeline stay, so that its stages and virtual stages are those that were published.
    layers = shape.layers if row.chapter == "pp" else max(1, round(shape.layers / 12))
    hidden = _CPU_HEADS * max(1, round(shape.hidden / 24 / _CPU_HEADS))
    seq_length = row.seq_length // 32
    values: dict[str, object] = {
        "--num-layers": layers,
        "--hidden-size": hidden,
        "--num-attention-heads": _CPU_HEADS,
        "--seq-length": seq_length,
        "--max-position-embeddings": seq_length,
    }
    if shape.experts:
        values |= {"--num-experts": shape.experts // 8, "--hidden-size": small.shape.hidden}
    return format_flags(values)
