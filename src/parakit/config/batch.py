"""The batch that a run trains where the user states none.

A published run trains its published batch (`examples/gpt3/published.yaml`). Every other run keeps the batch of its
model's file, so that strategies on the same devices do the same work.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd

from parakit.config.flags import Flags
from parakit.config.model import Model, round_up
from parakit.config.published import MAIN_SOURCE, load_published
from parakit.config.run import DeviceKind
from parakit.config.strategy import Batch, Parallelism


def find_published_batch(model: str, parallelism: Parallelism, device: DeviceKind) -> Batch | None:
    """Return the batch of the published Megatron run of a model's name; None if the run is not published."""
    if device is not DeviceKind.GPU:
        return None
    return _load_published_batches().get((model, parallelism))


@lru_cache(maxsize=1)
def _load_published_batches() -> dict[tuple[str, Parallelism], Batch]:
    """Return the batches of the runs that the H200 notes publish, by model and parallelism."""
    batches = {}
    for figure in load_published().figures_of(MAIN_SOURCE):
        if figure.micro_batch_size and figure.global_batch_size:
            batch = Batch(figure.micro_batch_size, figure.global_batch_size)
            batches[figure.model, figure.parallelism] = batch
    return batches


def choose_batch(
    model: Model,
    parallelism: Parallelism,
    device: DeviceKind,
    micro_batch_size: int | None = None,
    global_batch_size: int | None = None,
) -> Batch:
    """Return the batch that a run trains.

    Without `global_batch_size` the run trains the published number of samples, or that of `choose_samples`, rounded up
    to a multiple of what all ranks need for `micro_batch_size`. Without `micro_batch_size` the size has the same
    source, or is a divisor that fits the global batch.

    Args:
        model: The model, whose file states a batch.
        parallelism: The run's parallelism.
        device: Kind of the run's devices. Only runs on GPUs are published.
        micro_batch_size: The user's MICRO_BATCH=; None if it is not set.
        global_batch_size: The user's GLOBAL_BATCH=; None if it is not set.
    """
    published = find_published_batch(model.name, parallelism, device)
    default = published or Batch(
        model.batch.micro_batch_size, choose_samples(model, parallelism.world_size)
    )
    if global_batch_size is None:
        global_batch_size = default.global_batch_size
        size = micro_batch_size or 1
        if size > 1 and global_batch_size % (size * _count_least_micro_batches(parallelism)):
            global_batch_size = round_up(global_batch_size, size * parallelism.world_size)
    if micro_batch_size is None:
        batch = Batch(default.micro_batch_size, global_batch_size)
        micro_batch_size = fit_micro_batch(batch, parallelism)
    return Batch(micro_batch_size, global_batch_size)


def choose_samples(model: Model, devices: int) -> int:
    """Return the global batch that every strategy of a model trains on `devices` devices, unless the user states one.

    The global batch of the user's own model file counts as it is. That of the kit's files is rounded up to a multiple
    of the devices, because many of these files state the batch of one device.
    """
    samples = model.batch.global_batch_size
    is_users_own = bool(model.source) and Flags(model.flags).has("--global-batch-size")
    return samples if is_users_own else round_up(samples, devices)


def fit_micro_batch(batch: Batch, parallelism: Parallelism) -> int:
    """Return the largest divisor of the micro batch size with which the replicas can divide the global batch.

    The result is 1 if no size divides the global batch.
    """
    least_micro_batches = _count_least_micro_batches(parallelism)
    samples, remainder = divmod(batch.global_batch_size, least_micro_batches)
    return 1 if remainder else gcd(batch.micro_batch_size, samples)


def _count_least_micro_batches(parallelism: Parallelism) -> int:
    """Return the number of micro batches that all replicas together need, of which an iteration has a multiple."""
    stages = parallelism.pipeline if parallelism.needs_micro_batch_per_stage else 1
    return parallelism.data * stages


def describe_batch_choice(
    model: Model, batch: Batch, parallelism: Parallelism, device: DeviceKind
) -> str:
    """Return a sentence on a batch that is published, or has more samples than the model's file states.

    The sentence is empty if the run trains the global batch of the model's file, or another one that the user states.
    """
    samples, file_samples = batch.global_batch_size, model.batch.global_batch_size
    if samples == file_samples or batch != choose_batch(model, parallelism, device):
        return ""
    if find_published_batch(model.name, parallelism, device):
        return (
            f"Batch {batch} (micro/global) is that of the published run; MICRO_BATCH= and GLOBAL_BATCH= set "
            "others."
        )
    return (
        f"The global batch is {samples}: the model file's {file_samples}, rounded up to a multiple of "
        f"{parallelism.world_size} ranks; GLOBAL_BATCH= sets another."
    )
