"""Runs of one configuration belong together: repeats are pooled, failures stay visible."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tools.report.analyse.no_te import patches, shares_gpu
from tools.report.analyse.statistics import Estimate, estimate
from tools.report.read.runs import Run
from tools.spec.strategy import EXAMPLES

# Arguments that say where output goes or how long to run, not what is trained.
_VOLATILE = frozenset(
    {
        *("tensorboard_dir", "save", "load", "data_cache_path", "log_progress", "start_time"),
        *("wandb_save_dir", "wandb_exp_name", "wandb_project", "tensorboard_log_interval"),
        *("seed", "exit_interval", "exit_duration_in_mins", "train_iters", "log_interval"),
        *("save_interval", "eval_interval", "eval_iters", "rank", "local_rank", "master_port"),
        *("timing_log_level", "log_throughput"),
        # A run that was resumed is the run it was.
        *("ckpt_step", "finetune", "no_load_optim", "no_load_rng"),
    }
)


@dataclass(frozen=True)
class Configuration:
    """One row of the report: repeats of one configuration, or one run that failed."""

    runs: tuple[Run, ...]
    """Oldest first."""
    estimate: Estimate | None
    failed_before: int = 0
    """Older failures of the same configuration."""
    superseded: int = 0
    """Older runs of the same configuration under other versions or on another machine."""

    @property
    def newest(self) -> Run:
        """The run whose losses, memory and provenance are shown."""
        return self.runs[-1]


def configurations(runs: Iterable[Run], all_conditions: bool = False) -> list[Configuration]:
    """Group runs into rows, ordered by model, device, ranks and strategy.

    Args:
        runs: In order of age, oldest first.
        all_conditions: Whether older versions and other machines get rows of their own; else only
            the newest conditions of a configuration are shown and the others are counted.
    """
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(_key(run), []).append(run)
    rows: list[Configuration] = []
    for members in groups.values():
        by_conditions: dict[tuple[object, ...], list[Run]] = {}
        for run in members:
            by_conditions.setdefault(_conditions(run), []).append(run)
        newest = by_conditions[_conditions(members[-1])]
        shown = list(by_conditions.values()) if all_conditions else [newest]
        for group in shown:
            rows += _rows(group, len(members) - len(newest) if not all_conditions else 0)
    return sorted(rows, key=_order)


def essential(arguments: Mapping[str, str]) -> dict[str, str]:
    """Arguments without those that only say where output goes or how long to run."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    return {name: value for name, value in plain.items() if name not in _VOLATILE}


def _rows(group: Sequence[Run], superseded: int) -> list[Configuration]:
    counting = [run for run in group if run.counts]
    failed = [run for run in group if not run.counts]
    rows = []
    if counting:
        newest = group.index(counting[-1])
        before = [run for run in failed if group.index(run) < newest]
        pooled = estimate([run.window.samples_ms for run in counting])
        rows.append(Configuration(tuple(counting), pooled, len(before), superseded))
        failed = [run for run in failed if group.index(run) > newest]
    if failed:
        rows.append(Configuration((failed[-1],), None, len(failed) - 1, superseded))
    return rows


def _key(run: Run) -> tuple[object, ...]:
    setup = run.setup
    if not setup.arguments and run.record is None:
        return ("log", str(run.path), run.log.part)
    return (
        setup.backend,
        setup.model,
        setup.strategy,
        setup.device,
        setup.parallelism,
        setup.batch,
        setup.seq_length,
        setup.dtype,
        setup.dropout,
        setup.dataset.prefix if setup.dataset else None,
        run.record.spec.link_bits_per_second if run.record else None,
        patches(run),
        shares_gpu(run),
        tuple(sorted(essential(_given(run)).items())),
    )


def _given(run: Run) -> Mapping[str, str]:
    if run.record is None:
        return run.setup.arguments
    words: dict[str, str] = {}
    name = ""
    for word in run.record.argv:
        if word.startswith("--"):
            name = word
            words[name] = ""
        else:
            words[name] = f"{words.get(name, '')} {word}"
    return words


def _conditions(run: Run) -> tuple[object, ...]:
    if run.record is None:
        return ()
    software = tuple(sorted(run.record.software.items()))
    host = run.record.host
    entry = run.record.entry
    return (
        run.record.kit_commit,
        entry.megatron_version,
        entry.megatron_commit,
        software,
        host.name,
        host.driver,
        host.interconnect,
    )


def _order(row: Configuration) -> tuple[object, ...]:
    setup = row.newest.setup
    known = setup.strategy in EXAMPLES
    return (
        setup.model or "~",
        setup.device,
        setup.dtype,
        EXAMPLES.index(setup.strategy) if known else len(EXAMPLES),
        setup.world_size or 0,
        setup.strategy,
        row.newest.name,
    )
