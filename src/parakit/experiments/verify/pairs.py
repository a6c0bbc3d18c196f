"""Compose what a verification compares: a strategy and its reference.

Both train the same model from the same weights on the same batches, up to one iteration. Besides the strategy, four
things may differ: the Megatron that trains (a version, a fork), and flags of the strategy alone (recomputation, the
micro batch). The strategy may also resume from a checkpoint, and the reference may be trained by plain PyTorch or
transformers. Other differences are refused, because the two runs would train something else. Examples are another
model, data or batch, and experts that get other tokens.
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
    attention_problems,
    compose_job,
    parse_target,
    saving_flags,
)
from parakit.native import PADDED

PREFIX = "verify-"
ITERATION = 2
"""First iteration after an update: optimizer states exist, and weights have moved."""
ITERATION_RESUMED = 3
"""One iteration more for a resumed run: the first update's learning rate is 0, so weights move in the second."""
MICRO_BATCH, MICRO_BATCHES = 2, 3
"""Samples per micro batch, and micro batches per iteration.

Both are above 1, and 3 is no usual degree of parallelism, so that a wrong number of either shows.
"""
LOG_EVERY_ITERATION = ("--log-interval", "1")
"""Flags of every run: what the loss function reports is compared per iteration, as the log prints it."""
NATIVE, HF = "native", "hf"
REIMPLEMENTATIONS = {NATIVE: Backend.NATIVE, HF: Backend.TRANSFORMERS}
"""Backends of references that are another implementation of the model, on one rank, by the value of REFERENCE=."""
_PACKING = "--dataloader-inter-document-masking"
_VOCABULARY_MULTIPLE = "--make-vocab-size-divisible-by"
_BALANCING, _CAPACITY = "--moe-router-load-balancing-type", "--moe-expert-capacity-factor"


@dataclass(frozen=True)
class LaunchPair:
    """Request of a verification: a job, and how its reference differs besides the strategy."""

    job: Job
    """The strategy, with the make variables of the request."""
    reference: str = ""
    """A strategy, `native` or `hf`; empty is baseline, or for a resumed run its own strategy."""
    flags: tuple[str, ...] = ()
    """Megatron's flags for the strategy alone."""
    megatron_lm: Path | None = None
    """Megatron checkout for the strategy alone; None is the same as the reference's."""
    resumed: str = ""
    """Strategy that saved the checkpoint from which the strategy resumes; `1` is its own, empty is none."""
    is_bf16: bool = False
    """True if strategy and reference compute in bf16, False for fp32."""

    @property
    def variables(self) -> dict[str, str]:
        """Make variables that repeat this verification together with `target`; empty values are unset."""
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
        """Make target of the verification."""
        return f"{PREFIX}{self.job.name}"

    @property
    def saving_strategy(self) -> str:
        """Strategy that saves the checkpoint; empty if the strategy does not resume."""
        return self.job.strategy if self.resumed == "1" else self.resumed

    @property
    def reference_strategy(self) -> str:
        """Strategy of the reference, or `native` or `hf`.

        If the request names none, it is the strategy itself for a resumed run, else `baseline`.
        """
        return self.reference or (self.job.strategy if self.resumed else "baseline")


def parse_pair(target: str, variables: Namespace, options: Options) -> LaunchPair:
    """Return the verification that a make target and its variables (REFERENCE=, EXTRA_B=, RESUMED=, …) request.

    Args:
        target: `verify-<strategy>-<model>-<N>cpu`.
        variables: Arguments of the command. An argument that the command does not know counts as unset.
        options: Make variables of both runs.

    Raises:
        LaunchError: The target does not have this form, or names an unknown strategy or model.
    """
    get_argument = vars(variables).get
    try:
        job = parse_target("train-" + target.removeprefix(PREFIX), options)
    except LaunchError as error:
        # The sentence names the target that the user wrote, and suggests targets of verifications.
        raise LaunchError(str(error).replace("train-", PREFIX)) from None
    return LaunchPair(
        job,
        reference=get_argument("reference") or "",
        flags=get_argument("extra_b") or (),
        megatron_lm=get_argument("megatron_lm_b"),
        resumed=get_argument("resumed") or "",
        is_bf16=get_argument("dtype") == "bf16",
    )


@dataclass(frozen=True)
class Verification:
    """The composed launches of a pair."""

    pair: LaunchPair
    strategy: Launch
    reference: Launch
    saving: Launch | None = None
    """Run that saves a checkpoint one iteration earlier, from which the strategy resumes; None without one."""

    @property
    def iteration(self) -> int:
        """Iteration whose tensors are compared."""
        return self.strategy.iterations

    @property
    def launches(self) -> tuple[Launch, ...]:
        """All launches of the verification, the reference first."""
        saving = (self.saving,) if self.saving else ()
        return (self.reference, *saving, self.strategy)

    def fork_from_pool(self, pool: WarmPool) -> Verification:
        """Return the verification with launches whose ranks are forked from the pool's processes.

        These processes have imported Megatron already, which takes most of the time of a short run.
        """
        return replace(
            self,
            strategy=self.strategy.fork_from_pool(pool),
            reference=self.reference.fork_from_pool(pool),
            saving=self.saving.fork_from_pool(pool) if self.saving else None,
        )

    @property
    def may_drift(self) -> bool:
        """True if the reference runs in Megatron, the only backend that can change weights by rounding."""
        return self.reference.spec.backend not in REIMPLEMENTATIONS.values()

    @property
    def mode(self) -> str | None:
        """Differences of the two runs besides their strategies, joined by `; `; None without differences."""
        return "; ".join(self._list_differences()) or None

    def _list_differences(self) -> Iterator[str]:
        """Yield a phrase for each difference of the two runs besides their strategies.

        These can be the micro batch, the backend or the Megatron, and a checkpoint from which one run resumes.
        """
        strategy, reference = self.strategy, self.reference
        size, reference_size = (
            launch.spec.batch.micro_batch_size for launch in (strategy, reference)
        )
        if size != reference_size:
            yield f"micro batches of {size} against {reference_size} at one global batch"
        if reference.spec.backend is Backend.NATIVE:
            yield "Megatron against plain PyTorch"
        elif reference.spec.backend is Backend.TRANSFORMERS:
            rows = Flags(reference.flags).integer(PADDED) - reference.model.shape.vocabulary
            padding = f", with the strategy's {plural(rows, 'padding row')}" if rows > 0 else ""
            yield f"Megatron against transformers{padding}"
        elif strategy.entry != reference.entry:
            yield f"{_name_megatron(strategy)} against {_name_megatron(reference)}"
        if self.saving is not None:
            yield (
                f"resumed after iteration {self.iteration - 1} from a checkpoint of "
                f"{self.saving.spec.name} against undisturbed"
            )

    def shift_seed(self, number: int) -> Verification:
        """Return the verification with a seed that is larger by `number` in both runs.

        The runs start from the same initial weights as before, and train other batches.
        """

        def add_to_seed(launch: Launch) -> Launch:
            seed = Flags(launch.flags).integer("--seed") + number
            return replace(launch, flags=merge_flags(launch.flags, ("--seed", str(seed))))

        return replace(
            self, strategy=add_to_seed(self.strategy), reference=add_to_seed(self.reference)
        )

    def add_saving_flags(self, launch: Launch, folder: Path) -> Launch:
        """Return the launch with flags that end it one iteration earlier and save a checkpoint in `folder`."""
        last_iteration = self.iteration - 1
        flags = merge_flags(
            launch.flags,
            saving_flags(Saving(last_iteration), launch.spec.parallelism, launch.entry),
            ("--exit-interval", str(last_iteration), "--save", relative_to_root(folder)),
        )
        return replace(launch, flags=flags, iterations=last_iteration)

    def add_resuming_flags(self, launch: Launch, folder: Path) -> Launch:
        """Return the launch with flags that resume it from the checkpoint of `add_saving_flags` in `folder`."""
        saving = saving_flags(Saving(self.iteration), launch.spec.parallelism, launch.entry)
        flags = merge_flags(
            drop_flags(launch.flags, flags_with_role("start")),
            (*saving, "--load", relative_to_root(folder), "--ckpt-step", str(self.iteration - 1)),
        )
        return replace(launch, flags=flags)


def compose_pair(pair: LaunchPair) -> Verification:
    """Compose the launches of strategy and reference, and of the run that saves a checkpoint if one resumes.

    All launches start from the same weights and train the same batches. The micro batches of both runs are
    equal too, unless flags of the strategy change them.

    Raises:
        LaunchError: The target names GPUs, the strategy does not fit its devices or cannot be captured, or the two
            runs would train something different.
    """
    job, options = pair.job, pair.job.options
    if job.device is not DeviceKind.CPU:
        raise LaunchError(
            f"'{pair.target}' names GPUs, on which the same run does not give the same bits; use …cpu."
        )
    shared_options = _make_shared_options(pair)
    shared_job = job.with_options(shared_options)
    strategy_options = replace(
        shared_options,
        extra=(*shared_options.extra, *pair.flags, *LOG_EVERY_ITERATION),
        megatron_lm=pair.megatron_lm or options.megatron_lm,
    )
    strategy_job = shared_job.with_options(strategy_options)
    reference = _compose_reference(pair.reference_strategy, shared_job)
    strategy = share_initial_weights(reference, compose_job(strategy_job))
    saving = None
    if pair.saving_strategy:
        devices = _count_devices(pair.saving_strategy, job)
        saving_job = strategy_job.with_strategy(pair.saving_strategy, devices)
        saving = share_initial_weights(reference, compose_job(saving_job))
    reference = _pad_vocabulary(strategy, reference)
    verification = Verification(pair, strategy, reference=reference, saving=saving)
    for launch in verification.launches:
        _refuse_uncapturable(launch)
    _refuse_other_work(verification.strategy, verification.reference)
    return verification


def _refuse_uncapturable(launch: Launch) -> None:
    """Raise LaunchError if the tensors of a launch cannot be captured, or its attention cannot be verified."""
    for problem in attention_problems(launch):
        raise LaunchError(problem)
    degrees = launch.spec.parallelism
    if degrees.sharding.is_megatron_fsdp and degrees.tensor > 1:
        raise LaunchError(
            f"{launch.spec.name} splits weights by tensor parallelism and by Megatron-FSDP, whose "
            "capture does not know where such a part lies; verify the two apart, as tp2dp2-zero1 "
            "and zero2 do."
        )


def _make_shared_options(pair: LaunchPair) -> Options:
    """Return the options that strategy and reference share, with the defaults of a verification.

    Raises:
        LaunchError: The strategy resumes and ITERS= leaves no earlier iteration from which it could resume.
    """
    job, options = pair.job, pair.job.options
    iteration = _choose_iteration(pair)
    micro_batch_size = options.micro_batch_size or MICRO_BATCH
    global_batch_size = options.global_batch_size
    if not global_batch_size:
        global_batch_size = micro_batch_size * _choose_micro_batches(pair)
    dropout = options.dropout
    if dropout is None and pair.reference_strategy != job.strategy:
        # Different strategies draw different masks. Dropout set by EXTRA= still counts.
        dropout = 0.0
    # torch FSDP2 needs untied weights; the other run would have other weights without the flag.
    untied = (UNTIED,) if UNTIED in job.flags else ()
    dtype = ("--bf16",) if pair.is_bf16 else ()
    return replace(
        options,
        dropout=dropout,
        iterations=iteration,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
        shared_start=True,
        noisy_start=True,
        ledger=False,
        saving=None,
        extra=(*untied, *dtype, *options.extra, *LOG_EVERY_ITERATION),
    )


def _choose_iteration(pair: LaunchPair) -> int:
    """Return the iteration to verify, which is the last one of the runs: ITERS=, or the default.

    Raises:
        LaunchError: The strategy resumes and ITERS= leaves no earlier iteration from which it could resume.
    """
    default_iteration = ITERATION_RESUMED if pair.resumed else ITERATION
    iteration = pair.job.options.iterations or default_iteration
    if pair.resumed and iteration < 2:
        raise LaunchError(
            "RESUMED= saves a checkpoint one iteration before ITERS=1, where nothing has been trained; "
            "set ITERS=2 or more."
        )
    return iteration


def _choose_micro_batches(pair: LaunchPair) -> int:
    """Return the smallest number of micro batches per iteration, over all ranks, that both runs can train.

    The number is a multiple of both data-parallel sizes. Each data-parallel rank gets at least `MICRO_BATCHES` micro
    batches, and at least one per pipeline stage. With an interleaved schedule, each data-parallel rank gets a
    multiple of twice the stages.
    """
    all_degrees = [parse_strategy(pair.job.strategy, pair.job.devices)]
    reference = pair.reference_strategy
    if reference not in REIMPLEMENTATIONS:
        all_degrees.append(parse_strategy(reference, _count_devices(reference, pair.job)))
    # Megatron's interleaved schedule refuses micro batches that are no multiple of the stages. Twice the
    # number of stages lets the schedule leave its warm-up.
    needed_multiples = []
    for degrees in all_degrees:
        if degrees.virtual_stages > 1:
            needed_multiples.append(2 * degrees.pipeline)
    needed_multiple = math.lcm(*needed_multiples)  # 1 if no schedule is interleaved.
    per_replica = needed_multiple if needed_multiples else MICRO_BATCHES
    num_stages = max(degrees.pipeline for degrees in all_degrees)
    if num_stages > per_replica:
        # Rounding up keeps the multiple that the interleaved schedule of the other run needs.
        per_replica = math.ceil(num_stages / needed_multiple) * needed_multiple
    data_parallel_sizes = [degrees.data for degrees in all_degrees]
    return math.lcm(*data_parallel_sizes) * per_replica


def _compose_reference(reference: str, job: Job) -> Launch:
    """Return the launch of a reference: a strategy in Megatron, or `native` or `hf` on one rank.

    Raises:
        LaunchError: The strategy is Megatron-FSDP, for which responses cannot be measured. Or a run of `native` or
            `hf` would be in bf16, where both keep fp32 weights and Megatron does not.
    """
    if reference not in REIMPLEMENTATIONS:
        launch = compose_job(job.with_strategy(reference, _count_devices(reference, job)))
        if launch.spec.parallelism.sharding.is_megatron_fsdp:
            raise LaunchError(
                f"The reference {reference} keeps its weights in flat buffers, where the response to a "
                "rounding error cannot be measured; set REFERENCE=baseline, or a strategy without zero2 "
                "and zero3."
            )
        return launch
    if Flags(job.options.extra).has("--bf16"):
        raise LaunchError(
            f"REFERENCE={reference} keeps fp32 weights under DTYPE=bf16, where Megatron rounds them; leave "
            "DTYPE= out."
        )
    options = replace(job.options, backend=REIMPLEMENTATIONS[reference], patch_file=None)
    return compose_job(job.with_strategy("baseline", 1).with_options(options))


def _pad_vocabulary(strategy: Launch, reference: Launch) -> Launch:
    """Return the reference; a reference in transformers gets a vocabulary that is padded as in the strategy.

    Megatron pads the vocabulary to a multiple of a constant times the number of ranks. Other references are
    unchanged.
    """
    if reference.spec.backend is not Backend.TRANSFORMERS:
        return reference
    rows = _count_embedding_rows(strategy)
    return replace(reference, flags=merge_flags(reference.flags, (PADDED, str(rows))))


def _count_devices(strategy: str, job: Job) -> int:
    """Return the number of ranks of a strategy that trains the job's model; `baseline` has one rank."""
    return 1 if strategy == "baseline" else count_devices(strategy, job.devices)


def share_initial_weights(reference: Launch, launch: Launch) -> Launch:
    """Return the launch, changed so that it starts from the reference's initial checkpoint.

    The path of the checkpoint is replaced in flags and environment. The launch is returned unchanged if one of the
    two has no initial checkpoint, or if their models have different flags.
    """
    if launch.initial_checkpoint is None or reference.initial_checkpoint is None:
        return launch
    if launch.model.flags != reference.model.flags:
        return launch
    old = relative_to_root(launch.initial_checkpoint)
    new = relative_to_root(reference.initial_checkpoint)

    def replace_path(text: str) -> str:
        return new if text == old else text

    return replace(
        launch,
        initial_checkpoint=reference.initial_checkpoint,
        flags=tuple(map(replace_path, launch.flags)),
        environment={name: replace_path(value) for name, value in launch.environment.items()},
    )


def _name_megatron(launch: Launch) -> str:
    """Return version and commit of a launch's Megatron as text, such as `Megatron 0.17.0 (1a2b3c4)`.

    The commit is left out if it is not known.
    """
    commit = launch.entry.megatron_commit
    return f"Megatron {launch.entry.megatron_version}{f' ({commit})' if commit else ''}"


def _refuse_other_work(strategy: Launch, reference: Launch) -> None:
    """Raise LaunchError if strategy and reference would train a different model, data, batch, precision or loss."""
    for name, value, reference_value in _list_shared_settings(strategy, reference):
        if value != reference_value:
            raise LaunchError(
                f"The two runs would do different work: {name} is {value} in the strategy and "
                f"{reference_value} in its reference; give it to both with EXTRA=."
            )
    _refuse_other_padding(strategy, reference)
    _refuse_other_packing(strategy, reference)
    _refuse_other_balance(strategy, reference)
    _refuse_other_tokens(strategy, reference)


def _refuse_other_padding(strategy: Launch, reference: Launch) -> None:
    """Raise LaunchError if Megatron would pad the vocabulary to different numbers of rows in the two runs.

    Rows of the padding take part in the softmax, so the two runs would compute different losses.
    """
    rows, reference_rows = _count_embedding_rows(strategy), _count_embedding_rows(reference)
    if reference.spec.backend is Backend.TRANSFORMERS or rows == reference_rows:
        return
    multiple = Flags(strategy.flags).integer(_VOCABULARY_MULTIPLE)
    raise LaunchError(
        f"{_VOCABULARY_MULTIPLE} {multiple} pads the vocabulary to {rows} rows in the strategy and to "
        f"{reference_rows} in its reference; padding takes part in the softmax, so the two would compute "
        "different losses; leave the flag out, which pads both alike."
    )


def _refuse_other_packing(strategy: Launch, reference: Launch) -> None:
    """Raise LaunchError if the two runs would pack different numbers of samples into one sequence.

    Megatron packs all samples of a micro batch into one sequence, whose tokens are then the rows of every tensor.
    """
    flags = Flags(strategy.flags)
    micro_batch = strategy.spec.batch.micro_batch_size
    reference_micro_batch = reference.spec.batch.micro_batch_size
    if flags.has(_PACKING) and micro_batch != reference_micro_batch:
        raise LaunchError(
            f"{_PACKING} packs the samples of a micro batch into one sequence, {micro_batch} in the strategy "
            f"and {reference_micro_batch} in its reference, so tensors have their rows in another order; give "
            "both the same --micro-batch-size, or leave the flag out."
        )


def _count_embedding_rows(launch: Launch) -> int:
    """Return the rows of a launch's embedding, with Megatron's padding."""
    multiple = Flags(launch.flags).integer(_VOCABULARY_MULTIPLE)
    shape = replace(launch.model.shape, vocabulary_multiple=multiple)
    return shape.padded_vocabulary(launch.spec.parallelism.tensor)


def _refuse_other_balance(strategy: Launch, reference: Launch) -> None:
    """Raise LaunchError if the loss that balances experts would be computed over different tokens.

    Models without experts, and runs without this loss, are never refused.
    """
    flags = Flags(strategy.flags)
    if not strategy.model.shape.experts:
        return
    if flags.number("--moe-aux-loss-coeff") <= 0:
        return
    balancing, name = flags.text(_BALANCING), strategy.model.name
    remedy = (
        'add EXTRA="--moe-aux-loss-coeff 0", or "--moe-router-load-balancing-type seq_aux_loss".'
    )
    micro_batch = strategy.spec.batch.micro_batch_size
    reference_micro_batch = reference.spec.batch.micro_batch_size
    if balancing == "aux_loss" and micro_batch != reference_micro_batch:
        raise LaunchError(
            f"{name} balances its experts over each micro batch (aux_loss), so another micro batch "
            f"trains something else; {remedy}"
        )
    samples = micro_batch * strategy.spec.parallelism.data
    reference_samples = reference_micro_batch * reference.spec.parallelism.data
    if balancing == "global_aux_loss" and samples != reference_samples:
        raise LaunchError(
            f"{name} balances its experts over the micro batches of all data-parallel ranks so far "
            f"(global_aux_loss): {samples} samples at once against {reference_samples} train something "
            f'else; choose EXTRA_B="--micro-batch-size N" so that both have as many, or {remedy}'
        )


def _refuse_other_tokens(strategy: Launch, reference: Launch) -> None:
    """Raise LaunchError if experts would get or drop different tokens in the two runs.

    With a capacity limit or with sinkhorn balancing, a rank chooses among all tokens that it routes at once. If the
    ranks of the two runs route different numbers of tokens, they choose differently.
    """
    tokens, reference_tokens = _count_routed_tokens(strategy), _count_routed_tokens(reference)
    if tokens == reference_tokens:
        return
    counts = (
        f"{tokens} in the strategy and {reference_tokens} in its reference, so the two train "
        "something else"
    )
    remedy = "or compare strategies whose ranks route as many (REFERENCE=<a strategy>)."
    flags, name = Flags(strategy.flags), strategy.model.name
    if flags.has(_CAPACITY):
        raise LaunchError(
            f"{name} drops tokens beyond {_CAPACITY} of those that a rank routes, {counts}; "
            f"leave that flag out, {remedy}"
        )
    if flags.text(_BALANCING) == "sinkhorn":
        raise LaunchError(
            f"{name} balances its experts by sinkhorn over the tokens that a rank routes, "
            f"{counts}; choose another {_BALANCING}, {remedy}"
        )


def _count_routed_tokens(launch: Launch) -> int:
    """Return the tokens per micro batch that one rank routes."""
    degrees, batch = launch.spec.parallelism, launch.spec.batch
    parts = degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    return batch.micro_batch_size * launch.model.shape.seq_length // parts


def _list_shared_settings(
    strategy: Launch, reference: Launch
) -> Iterator[tuple[str, object, object]]:
    """Yield each setting that must be equal in both runs: its name, the strategy's value and the reference's.

    The settings are the model's sizes, and the flags of data, precision, global batch and gradient clipping.
    """
    reference_shape = asdict(reference.model.shape)
    for name, value in asdict(strategy.model.shape).items():
        yield f"the model's {name}", value, reference_shape[name]
    flags, reference_flags = Flags(strategy.flags), Flags(reference.flags)
    names = flags_with_role("data", "precision") | {"--global-batch-size", "--clip-grad"}
    for name in sorted(names):
        yield name, _get_flag_value(flags, name), _get_flag_value(reference_flags, name)


def _get_flag_value(flags: Flags, name: str) -> str | bool:
    """Return the values of a flag as a text; for a flag without values, whether it is set."""
    return " ".join(flags.texts(name)) or flags.has(name)
