"""What a verification compares: a layout and its reference, and in what else the two differ.

Both train the same model from the same weights on the same batches, up to one iteration. Beside the
strategy they may differ in the Megatron that trains (a version, a fork), in flags of the layout alone
(recomputation, the micro batch), in that the layout resumes from a checkpoint before that iteration, and
in that the reference is the plain PyTorch backend.
"""

from __future__ import annotations

import math
import shlex
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tools.launch.compose import Launch
from tools.launch.flags import saving_flags
from tools.launch.job import Job, parse_target
from tools.launch.options import Options, Saving
from tools.launch.train import compose_job
from tools.native.settings import PADDED
from tools.spec.errors import LaunchError
from tools.spec.files import from_root
from tools.spec.flag_table import of_role
from tools.spec.flags import Flags, drop_flags, merge_flags
from tools.spec.run import Backend, DeviceKind
from tools.spec.strategy import devices_of, parse_strategy

PREFIX = "verify-"
ITERATION = 2
"""The first in which an update has been made: states are there, and weights have moved."""
ITERATION_RESUMED = 3
"""One more: the first update has a learning rate of 0, so weights move in the second."""
MICRO_BATCH, MICRO_BATCHES = 2, 3
"""More than one of each, so that a wrong number of them shows, and no usual degree of parallelism."""
NATIVE, HF = "native", "hf"
WRITTEN_AGAIN = {NATIVE: Backend.NATIVE, HF: Backend.TRANSFORMERS}
"""References that are the model written again by others, on one rank."""


@dataclass(frozen=True)
class Difference:
    """In what the layout differs from its reference beside its strategy; nothing by default."""

    reference: str = ""
    """A strategy, `native` or `hf`; empty is baseline, of a resumed run its own layout."""
    flags: tuple[str, ...] = ()
    """Megatron's, of the layout alone."""
    megatron_lm: Path | None = None
    """Checkout of the layout alone."""
    resumed_from: str = ""
    """The strategy that saved the checkpoint which the layout resumes from; empty without one."""
    is_bf16: bool = False
    """Whether both compute in bf16, not fp32."""

    @property
    def variables(self) -> dict[str, str]:
        """Make's, which say the same."""
        return {
            "DTYPE": "bf16" if self.is_bf16 else "",
            "REFERENCE": self.reference,
            "RESUMED": self.resumed_from,
            "EXTRA_B": shlex.join(self.flags),
            "MEGATRON_LM_B": str(self.megatron_lm or ""),
        }


@dataclass(frozen=True)
class Verification:
    """What is compared."""

    asked: Job
    """With the variables that it was asked for under."""
    layout: Launch
    reference_name: str
    reference: Launch
    iteration: int
    difference: Difference
    saving: Launch | None = None
    """The run whose checkpoint, of the iteration before, the layout resumes from."""

    @property
    def name(self) -> str:
        """As in the make target."""
        return self.layout.job.name

    @property
    def variables(self) -> dict[str, str]:
        """Make's, under which its target verifies the same."""
        asked = self.asked.variables
        return {**asked, **self.difference.variables}

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All that are trained."""
        saving = (self.saving,) if self.saving else ()
        return (self.reference, *saving, self.layout)

    @property
    def mode(self) -> str | None:
        """In what the two differ beside their strategies; None if in nothing."""
        return "; ".join(self._differences()) or None

    def _differences(self) -> Iterator[str]:
        ours, theirs = self.layout, self.reference
        sizes = [one.spec.batch.micro_batch_size for one in (ours, theirs)]
        if sizes[0] != sizes[1]:
            yield f"micro batches of {sizes[0]} against {sizes[1]} at one global batch"
        if theirs.spec.backend is Backend.NATIVE:
            yield "Megatron against plain PyTorch"
        elif theirs.spec.backend is Backend.TRANSFORMERS:
            rows = Flags(theirs.flags).integer(PADDED) - theirs.model.shape.vocabulary
            padding = f", with the layout's {rows} padding row(s)" if rows > 0 else ""
            yield f"Megatron against transformers{padding}"
        elif ours.entry != theirs.entry:
            yield f"{_megatron(ours)} against {_megatron(theirs)}"
        if self.saving is not None:
            yield (
                f"resumed after iteration {self.iteration - 1} from a checkpoint of "
                f"{self.saving.spec.name} against undisturbed"
            )

    def saved(self, launch: Launch, folder: Path) -> Launch:
        """The launch that ends with a checkpoint of the iteration before."""
        before = self.iteration - 1
        flags = merge_flags(
            launch.flags,
            saving_flags(Saving(before), launch.spec.parallelism, launch.entry),
            ("--exit-interval", str(before), "--save", from_root(folder)),
        )
        return replace(launch, flags=flags, iterations=before)

    def resumed(self, launch: Launch, folder: Path) -> Launch:
        """The launch that begins with that checkpoint."""
        saving = saving_flags(Saving(self.iteration), launch.spec.parallelism, launch.entry)
        flags = merge_flags(
            drop_flags(launch.flags, of_role("start")),
            (*saving, "--load", from_root(folder), "--ckpt-step", str(self.iteration - 1)),
        )
        return replace(launch, flags=flags)


def difference_of(given: Namespace) -> Difference:
    """REFERENCE=, EXTRA_B=, MEGATRON_LM_B=, RESUMED= and DTYPE=, where a command takes them."""

    def value(name: str) -> Any:
        return getattr(given, name, None)

    return Difference(
        value("reference") or "",
        value("extra_b") or (),
        value("megatron_lm_b"),
        value("resumed") or "",
        is_bf16=value("dtype") == "bf16",
    )


def compose_verification(name: str, options: Options, difference: Difference) -> Verification:
    """Compose what is trained: same weights, same batches, and unless asked otherwise micro batches.

    Raises:
        LaunchError: The name is not in the grammar, or the layout does not fit its devices.
    """
    job = parse_target("train-" + name.removeprefix(PREFIX), options)
    if job.device is not DeviceKind.CPU:
        raise LaunchError(
            f"'{name}' names GPUs, on which the same run does not give the same bits; use …cpu."
        )
    resumed = _saving_strategy(job, difference)
    iteration = _iteration(options, resumed)
    # A resumed run is compared with its own layout undisturbed, unless another is asked for.
    named = difference.reference or (job.strategy if resumed else "baseline")
    micro = options.micro_batch_size or MICRO_BATCH
    dropout = options.dropout
    if dropout is None and named != job.strategy:
        dropout = 0.0  # Other layouts draw other masks; EXTRA= still has its own.
    alike = job.under(
        replace(
            options,
            dropout=dropout,
            iterations=iteration,
            micro_batch_size=micro,
            global_batch_size=options.global_batch_size or micro * _micro_batches(named, job),
            shared_start=True,
            ledger=False,
            saving=None,
            extra=(*(("--bf16",) if difference.is_bf16 else ()), *options.extra),
        )
    )
    own = alike.under(
        replace(
            alike.options,
            extra=(*alike.options.extra, *difference.flags),
            megatron_lm=difference.megatron_lm or options.megatron_lm,
        )
    )
    reference = _reference(named, alike)
    layout = _from_start_of(reference, compose_job(own))
    reference = _padded_as(layout, reference)
    saving = None
    if resumed:
        there = own.laid(resumed, _devices(resumed, job))
        saving = _from_start_of(reference, compose_job(there))
    verification = Verification(job, layout, named, reference, iteration, difference, saving)
    _refuse_other_work(verification)
    return verification


def _micro_batches(reference: str, job: Job) -> int:
    """How many micro batches suit the layout and its reference: the least of all ranks together."""
    both = [parse_strategy(job.strategy, job.devices)]
    if reference not in WRITTEN_AGAIN:
        both.append(parse_strategy(reference, _devices(reference, job)))
    # The interleaved schedule takes multiples of the pipeline's stages.
    interleaved = [2 * one.pipeline for one in both if one.virtual_stages > 1]
    least = math.lcm(*interleaved) if interleaved else MICRO_BATCHES
    least = max(least, *(one.pipeline for one in both))
    return math.lcm(*(one.data for one in both)) * least


def _reference(named: str, job: Job) -> Launch:
    if named not in WRITTEN_AGAIN:
        launch = compose_job(job.laid(named, _devices(named, job)))
        if launch.spec.parallelism.sharding.is_megatron_fsdp:
            raise LaunchError(
                f"The reference {named} keeps its weights in flat buffers, where the response to a "
                "rounding error cannot be measured; set REFERENCE=baseline, or a layout without zero2 "
                "and zero3."
            )
        return launch
    if Flags(job.options.extra).has("--bf16"):
        raise LaunchError(
            f"REFERENCE={named} keeps fp32 weights under DTYPE=bf16, where Megatron rounds them; leave "
            "DTYPE= out."
        )
    again = replace(job.options, backend=WRITTEN_AGAIN[named], plant=None)
    return compose_job(job.laid("baseline", 1).under(again))


def _padded_as(layout: Launch, reference: Launch) -> Launch:
    """The reference; that of transformers with the rows that Megatron pads the vocabulary to."""
    if reference.spec.backend is not Backend.TRANSFORMERS:
        return reference
    multiple = Flags(layout.flags).integer("--make-vocab-size-divisible-by")
    shape = replace(layout.model.shape, vocabulary_multiple=multiple)
    rows = shape.padded_vocabulary(layout.spec.parallelism.tensor)
    return replace(reference, flags=merge_flags(reference.flags, (PADDED, str(rows))))


def _saving_strategy(job: Job, difference: Difference) -> str:
    """`RESUMED=1` is the layout's own."""
    return job.strategy if difference.resumed_from == "1" else difference.resumed_from


def _iteration(options: Options, resumed: str) -> int:
    iteration = options.iterations or (ITERATION_RESUMED if resumed else ITERATION)
    if resumed and iteration < 2:
        raise LaunchError(
            "RESUMED= saves a checkpoint one iteration before ITERS=1, where nothing has been trained; "
            "set ITERS=2 or more."
        )
    return iteration


def _devices(strategy: str, job: Job) -> int:
    """Ranks of a strategy beside the job's: one for baseline."""
    return 1 if strategy == "baseline" else devices_of(strategy, job.devices)


def _from_start_of(reference: Launch, launch: Launch) -> Launch:
    """The launch, from the reference's starting weights where its Megatron would make others."""
    ours, theirs = launch.start_checkpoint, reference.start_checkpoint
    if ours is None or theirs is None or launch.model.flags != reference.model.flags:
        return launch
    old, new = from_root(ours), from_root(theirs)
    return replace(
        launch,
        start_checkpoint=theirs,
        flags=tuple(new if word == old else word for word in launch.flags),
        environment={
            name: new if value == old else value for name, value in launch.environment.items()
        },
    )


def _refuse_other_work(verification: Verification) -> None:
    """Refuse two runs of different work before anything is trained.

    Raises:
        LaunchError: With what differs.
    """
    ours, theirs = verification.layout, verification.reference
    for name, mine, other in _work(ours, theirs):
        if mine != other:
            raise LaunchError(
                f"The two runs would do different work: {name} is {mine} in the layout and {other} in "
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
    if kind == "global_aux_loss" and (batches[0] != batches[1] or ranks[0] != ranks[1]):
        raise LaunchError(
            f"{name} balances its experts over the micro batches of all data-parallel ranks so far "
            f"(global_aux_loss), so other micro batches, or {ranks[0]} of these ranks against "
            f"{ranks[1]}, train something else; {remedy}"
        )


_BALANCING = "--moe-router-load-balancing-type"
_CAPACITY = "--moe-expert-capacity-factor"


def _refuse_other_tokens(ours: Launch, theirs: Launch) -> None:
    """Refuse experts that get or drop other tokens: each rank decides over those it routes."""
    tokens, other = _routed_tokens(ours), _routed_tokens(theirs)
    if tokens == other:
        return
    counts = f"{tokens} in the layout and {other} in its reference, so the two train something else"
    remedy = "or compare layouts whose ranks route as many (REFERENCE=<a strategy>)."
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


def _routed_tokens(launch: Launch) -> int:
    """Of a micro batch, on one rank."""
    degrees, batch = launch.spec.parallelism, launch.spec.batch
    parts = degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    return batch.micro_batch_size * launch.model.shape.seq_length // parts


def _work(ours: Launch, theirs: Launch) -> Iterator[tuple[str, object, object]]:
    """What both must have alike: a name, the layout's and the reference's."""
    shapes = [asdict(launch.model.shape) for launch in (ours, theirs)]
    yield from ((f"the model's {name}", mine, shapes[1][name]) for name, mine in shapes[0].items())
    given = [Flags(launch.flags) for launch in (ours, theirs)]
    alike = of_role("data", "precision") | {"--global-batch-size", "--clip-grad"}
    for name in sorted(alike):
        mine, other = (" ".join(flags.texts(name)) or flags.has(name) for flags in given)
        yield name, mine, other


def _megatron(launch: Launch) -> str:
    commit = launch.entry.megatron_commit
    return f"Megatron {launch.entry.megatron_version}{f' ({commit})' if commit else ''}"
