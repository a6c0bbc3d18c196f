"""What a verification compares: a strategy and its reference, and in what else the two differ.

Both train the same model from the same weights on the same batches, up to one iteration. Beside the
strategy they may differ in the Megatron that trains (a version, a fork), in flags of the strategy alone
(recomputation, the micro batch), in that the strategy resumes from a checkpoint before that iteration,
and in that the reference is the plain PyTorch backend. What would train something else is refused:
another model, data or batch, or experts that are given other tokens.
"""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.flag_table import flags_with_role
from parakit.config.flags import Flags, drop_flags, merge_flags
from parakit.config.run import Backend, DeviceKind
from parakit.config.strategy import UNTIED, count_devices, parse_strategy
from parakit.formatting.units import plural
from parakit.launch import (
    Job,
    Launch,
    Options,
    Saving,
    WarmPool,
    compose_job,
    parse_target,
    saving_flags,
)
from parakit.native import PADDED

PREFIX = "verify-"
ITERATION = 2
"""The first in which an update has been made: states are there, and weights have moved."""
ITERATION_RESUMED = 3
"""One more: the first update has a learning rate of 0, so weights move in the second."""
MICRO_BATCH, MICRO_BATCHES = 2, 3
"""More than one of each, so that a wrong number of them shows, and no usual degree of parallelism."""
NATIVE, HF = "native", "hf"
REIMPLEMENTATIONS = {NATIVE: Backend.NATIVE, HF: Backend.TRANSFORMERS}
"""References that are the model written again by others, on one rank."""
_BALANCING, _CAPACITY = "--moe-router-load-balancing-type", "--moe-expert-capacity-factor"


@dataclass(frozen=True)
class LaunchPair:
    """What is asked for: a job, and in what its reference differs beside the strategy."""

    job: Job
    """The strategy, with the variables that it was asked for under."""
    reference: str = ""
    """A strategy, `native` or `hf`; empty is baseline, of a resumed run its own strategy."""
    flags: tuple[str, ...] = ()
    """Megatron's, of the strategy alone."""
    megatron_lm: Path | None = None
    """Checkout of the strategy alone."""
    resumed: str = ""
    """The strategy that saved the checkpoint which the strategy resumes from; empty without one."""
    is_bf16: bool = False
    """Whether both compute in bf16, not fp32."""

    @property
    def variables(self) -> dict[str, str]:
        """Make's, under which `target` verifies the same."""
        return {
            **self.job.variables,
            "DTYPE": "bf16" if self.is_bf16 else "",
            "REFERENCE": self.reference,
            "RESUMED": self.resumed,
            "EXTRA_B": shlex.join(self.flags),
            "MEGATRON_LM_B": str(self.megatron_lm or ""),
        }

    @property
    def target(self) -> str:
        """The make target."""
        return f"{PREFIX}{self.job.name}"

    @property
    def saving(self) -> str:
        """The strategy that saves; `RESUMED=1` is the strategy's own."""
        return self.job.strategy if self.resumed == "1" else self.resumed

    @property
    def other(self) -> str:
        """What it is compared with: of a resumed run its own strategy undisturbed."""
        return self.reference or (self.job.strategy if self.resumed else "baseline")


def parse_pair(target: str, given: Namespace, options: Options) -> LaunchPair:
    """The target, REFERENCE=, EXTRA_B=, --megatron-lm-b, RESUMED= and DTYPE=, where a command has them.

    Raises:
        LaunchError: The target is not in the grammar.
    """
    value = vars(given).get
    return LaunchPair(
        parse_target("train-" + target.removeprefix(PREFIX), options),
        value("reference") or "",
        value("extra_b") or (),
        value("megatron_lm_b"),
        value("resumed") or "",
        value("dtype") == "bf16",
    )


@dataclass(frozen=True)
class Verification:
    """A pair, composed: what is trained."""

    pair: LaunchPair
    strategy: Launch
    reference: Launch
    saving: Launch | None = None
    """The run whose checkpoint, of the iteration before, the strategy resumes from."""

    @property
    def iteration(self) -> int:
        """Whose tensors are compared."""
        return self.strategy.iterations

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All that are trained."""
        saving = (self.saving,) if self.saving else ()
        return (self.reference, *saving, self.strategy)

    def forked(self, pool: WarmPool) -> Verification:
        """The same with ranks from a process that has imported Megatron: that is most of a short run."""
        strategy, reference = (
            self.strategy.fork_from_pool(pool),
            self.reference.fork_from_pool(pool),
        )
        saving = self.saving.fork_from_pool(pool) if self.saving else None
        return replace(self, strategy=strategy, reference=reference, saving=saving)

    @property
    def may_drift(self) -> bool:
        """Whether the reference can be trained with weights off by rounding: if Megatron trains it."""
        return self.reference.spec.backend not in REIMPLEMENTATIONS.values()

    @property
    def mode(self) -> str | None:
        """In what the two differ beside their strategies; None if in nothing."""
        return "; ".join(self._differences()) or None

    def _differences(self) -> Iterator[str]:
        ours, theirs = self.strategy, self.reference
        sizes = [one.spec.batch.micro_batch_size for one in (ours, theirs)]
        if sizes[0] != sizes[1]:
            yield f"micro batches of {sizes[0]} against {sizes[1]} at one global batch"
        if theirs.spec.backend is Backend.NATIVE:
            yield "Megatron against plain PyTorch"
        elif theirs.spec.backend is Backend.TRANSFORMERS:
            rows = Flags(theirs.flags).integer(PADDED) - theirs.model.shape.vocabulary
            padding = f", with the strategy's {plural(rows, 'padding row')}" if rows > 0 else ""
            yield f"Megatron against transformers{padding}"
        elif ours.entry != theirs.entry:
            yield f"{_name_megatron(ours)} against {_name_megatron(theirs)}"
        if self.saving is not None:
            yield (
                f"resumed after iteration {self.iteration - 1} from a checkpoint of "
                f"{self.saving.spec.name} against undisturbed"
            )

    def with_other_batches(self, number: int) -> Verification:
        """Return the verification from the same weights with a seed that is larger by `number`."""

        def with_seed(launch: Launch) -> Launch:
            seed = Flags(launch.flags).integer("--seed") + number
            return replace(launch, flags=merge_flags(launch.flags, ("--seed", str(seed))))

        return replace(self, strategy=with_seed(self.strategy), reference=with_seed(self.reference))

    def saved(self, launch: Launch, folder: Path) -> Launch:
        """The launch that ends with a checkpoint of the iteration before."""
        before = self.iteration - 1
        flags = merge_flags(
            launch.flags,
            saving_flags(Saving(before), launch.spec.parallelism, launch.entry),
            ("--exit-interval", str(before), "--save", relative_to_root(folder)),
        )
        return replace(launch, flags=flags, iterations=before)

    def resumed(self, launch: Launch, folder: Path) -> Launch:
        """The launch that begins with that checkpoint."""
        saving = saving_flags(Saving(self.iteration), launch.spec.parallelism, launch.entry)
        flags = merge_flags(
            drop_flags(launch.flags, flags_with_role("start")),
            (*saving, "--load", relative_to_root(folder), "--ckpt-step", str(self.iteration - 1)),
        )
        return replace(launch, flags=flags)


def compose_pair(pair: LaunchPair) -> Verification:
    """Compose what is trained: same weights, same batches, and unless asked otherwise micro batches.

    Raises:
        LaunchError: The strategy does not fit its devices, or the two would do different work.
    """
    job, options = pair.job, pair.job.options
    if job.device is not DeviceKind.CPU:
        raise LaunchError(
            f"'{pair.target}' names GPUs, on which the same run does not give the same bits; use …cpu."
        )
    iteration = options.iterations or (ITERATION_RESUMED if pair.resumed else ITERATION)
    if pair.resumed and iteration < 2:
        raise LaunchError(
            "RESUMED= saves a checkpoint one iteration before ITERS=1, where nothing has been trained; "
            "set ITERS=2 or more."
        )
    micro = options.micro_batch_size or MICRO_BATCH
    dropout = options.dropout
    if dropout is None and pair.other != job.strategy:
        dropout = 0.0  # Other strategies draw other masks; EXTRA= still has its own.
    # What torch FSDP2 needs; another strategy would have other weights without.
    untied = (UNTIED,) if UNTIED in job.flags else ()
    alike = job.with_options(
        replace(
            options,
            dropout=dropout,
            iterations=iteration,
            micro_batch_size=micro,
            global_batch_size=options.global_batch_size or micro * _choose_micro_batches(pair),
            shared_start=True,
            noisy_start=True,
            ledger=False,
            saving=None,
            extra=(*untied, *(("--bf16",) if pair.is_bf16 else ()), *options.extra),
        )
    )
    own = alike.with_options(
        replace(
            alike.options,
            extra=(*alike.options.extra, *pair.flags),
            megatron_lm=pair.megatron_lm or options.megatron_lm,
        )
    )
    reference = _compose_reference(pair.other, alike)
    strategy = _share_initial_weights(reference, compose_job(own))
    saving = None
    if pair.saving:
        there = own.with_strategy(pair.saving, _count_devices(pair.saving, job))
        saving = _share_initial_weights(reference, compose_job(there))
    verification = Verification(pair, strategy, _pad_vocabulary(strategy, reference), saving)
    for launch in verification.launches:
        degrees = launch.spec.parallelism
        if degrees.sharding.is_megatron_fsdp and degrees.tensor > 1:
            raise LaunchError(
                f"{launch.spec.name} splits weights by tensor parallelism and by Megatron-FSDP, whose "
                "capture does not know where such a part lies; verify the two apart, as tp2dp2-zero1 "
                "and zero2 do."
            )
    _refuse_other_work(verification.strategy, verification.reference)
    return verification


def _choose_micro_batches(pair: LaunchPair) -> int:
    """How many micro batches suit the strategy and its reference: the least of all ranks together."""
    both = [parse_strategy(pair.job.strategy, pair.job.devices)]
    if pair.other not in REIMPLEMENTATIONS:
        both.append(parse_strategy(pair.other, _count_devices(pair.other, pair.job)))
    # The interleaved schedule takes multiples of the pipeline's stages.
    interleaved = [2 * one.pipeline for one in both if one.virtual_stages > 1]
    least = math.lcm(*interleaved) if interleaved else MICRO_BATCHES
    least = max(least, *(one.pipeline for one in both))
    return math.lcm(*(one.data for one in both)) * least


def _compose_reference(named: str, job: Job) -> Launch:
    if named not in REIMPLEMENTATIONS:
        launch = compose_job(job.with_strategy(named, _count_devices(named, job)))
        if launch.spec.parallelism.sharding.is_megatron_fsdp:
            raise LaunchError(
                f"The reference {named} keeps its weights in flat buffers, where the response to a "
                "rounding error cannot be measured; set REFERENCE=baseline, or a strategy without zero2 "
                "and zero3."
            )
        return launch
    if Flags(job.options.extra).has("--bf16"):
        raise LaunchError(
            f"REFERENCE={named} keeps fp32 weights under DTYPE=bf16, where Megatron rounds them; leave "
            "DTYPE= out."
        )
    again = replace(job.options, backend=REIMPLEMENTATIONS[named], patch_file=None)
    return compose_job(job.with_strategy("baseline", 1).with_options(again))


def _pad_vocabulary(strategy: Launch, reference: Launch) -> Launch:
    """The reference; that of transformers with the rows that Megatron pads the vocabulary to."""
    if reference.spec.backend is not Backend.TRANSFORMERS:
        return reference
    multiple = Flags(strategy.flags).integer("--make-vocab-size-divisible-by")
    shape = replace(strategy.model.shape, vocabulary_multiple=multiple)
    rows = shape.padded_vocabulary(strategy.spec.parallelism.tensor)
    return replace(reference, flags=merge_flags(reference.flags, (PADDED, str(rows))))


def _count_devices(strategy: str, job: Job) -> int:
    """Ranks of a strategy beside the job's: one for baseline."""
    return 1 if strategy == "baseline" else count_devices(strategy, job.devices)


def _share_initial_weights(reference: Launch, launch: Launch) -> Launch:
    """The launch, from the reference's starting weights where its Megatron would make others."""
    ours, theirs = launch.initial_checkpoint, reference.initial_checkpoint
    if ours is None or theirs is None or launch.model.flags != reference.model.flags:
        return launch
    old, new = relative_to_root(ours), relative_to_root(theirs)
    return replace(
        launch,
        initial_checkpoint=theirs,
        flags=tuple(new if word == old else word for word in launch.flags),
        environment={
            name: new if value == old else value for name, value in launch.environment.items()
        },
    )


def _name_megatron(launch: Launch) -> str:
    commit = launch.entry.megatron_commit
    return f"Megatron {launch.entry.megatron_version}{f' ({commit})' if commit else ''}"


def _refuse_other_work(ours: Launch, theirs: Launch) -> None:
    """Refuse a strategy and a reference of different work before anything is trained."""
    for name, mine, other in _list_shared_settings(ours, theirs):
        if mine != other:
            raise LaunchError(
                f"The two runs would do different work: {name} is {mine} in the strategy and {other} in "
                "its reference; give it to both with EXTRA=."
            )
    _refuse_other_balance(ours, theirs)
    _refuse_other_tokens(ours, theirs)


def _refuse_other_balance(ours: Launch, theirs: Launch) -> None:
    """Refuse a balancing loss that is defined on other tokens."""
    flags = Flags(ours.flags)
    if not (ours.model.shape.experts and flags.number("--moe-aux-loss-coeff") > 0):
        return
    kind = flags.text(_BALANCING)
    name, batches = ours.model.name, [one.spec.batch.micro_batch_size for one in (ours, theirs)]
    ranks = [one.spec.parallelism.data for one in (ours, theirs)]
    remedy = (
        'add EXTRA="--moe-aux-loss-coeff 0", or "--moe-router-load-balancing-type seq_aux_loss".'
    )
    if kind == "aux_loss" and batches[0] != batches[1]:
        raise LaunchError(
            f"{name} balances its experts over each micro batch (aux_loss), so another micro batch "
            f"trains something else; {remedy}"
        )
    samples = [batch * rank for batch, rank in zip(batches, ranks, strict=True)]
    if kind == "global_aux_loss" and samples[0] != samples[1]:
        raise LaunchError(
            f"{name} balances its experts over the micro batches of all data-parallel ranks so far "
            f"(global_aux_loss): {samples[0]} samples at once against {samples[1]} train something "
            f'else; choose EXTRA_B="--micro-batch-size N" so that both have as many, or {remedy}'
        )


def _refuse_other_tokens(ours: Launch, theirs: Launch) -> None:
    """Refuse experts that get or drop other tokens: each rank decides over those it routes."""
    tokens, other = _count_routed_tokens(ours), _count_routed_tokens(theirs)
    if tokens == other:
        return
    counts = (
        f"{tokens} in the strategy and {other} in its reference, so the two train something else"
    )
    remedy = "or compare strategies whose ranks route as many (REFERENCE=<a strategy>)."
    if Flags(ours.flags).has(_CAPACITY):
        raise LaunchError(
            f"{ours.model.name} drops tokens beyond {_CAPACITY} of those that a rank routes, {counts}; "
            f"leave that flag out, {remedy}"
        )
    if Flags(ours.flags).text(_BALANCING) == "sinkhorn":
        raise LaunchError(
            f"{ours.model.name} balances its experts by sinkhorn over the tokens that a rank routes, "
            f"{counts}; choose another {_BALANCING}, {remedy}"
        )


def _count_routed_tokens(launch: Launch) -> int:
    """Of a micro batch, on one rank."""
    degrees, batch = launch.spec.parallelism, launch.spec.batch
    parts = degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    return batch.micro_batch_size * launch.model.shape.seq_length // parts


def _list_shared_settings(ours: Launch, theirs: Launch) -> Iterator[tuple[str, object, object]]:
    """What both must have alike: a name, the strategy's and the reference's."""
    shapes = [asdict(launch.model.shape) for launch in (ours, theirs)]
    yield from ((f"the model's {name}", mine, shapes[1][name]) for name, mine in shapes[0].items())
    given = [Flags(launch.flags) for launch in (ours, theirs)]
    alike = flags_with_role("data", "precision") | {"--global-batch-size", "--clip-grad"}
    for name in sorted(alike):
        mine, other = (" ".join(flags.texts(name)) or flags.has(name) for flags in given)
        yield name, mine, other
