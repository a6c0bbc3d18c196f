"""Identity of a run: what it trains, with which code, and on which host it is timed.

A run with the identity of a finished run need not be made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.run import CodeHashes, HostRecord, MegatronEntry, RunRecord
from parakit.config.flag_table import argument_names, flags_with_role
from parakit.config.flags import values_by_flag
from parakit.config.run import RunSpec
from parakit.config.variables import INTERFACES

_ARGUMENTS_PER_ATTEMPT = argument_names(flags_with_role("start", "attempt"))
_ARGUMENTS_OF_REPEATS = argument_names(flags_with_role("logging")) | {
    *("seed", "train_iters", "save_interval", "exit_duration_in_mins"),
    *("start_time", "rank", "local_rank", "master_port"),
}
"""Arguments in which the repeats of one run may differ."""

Pairs = tuple[tuple[str, str], ...]
"""Keys and values of a mapping, sorted by key, so that they can be compared and hashed."""


@dataclass(frozen=True)
class TrainingIdentity:
    """Description of what a run trains. Runs with equal training identities print equal losses."""

    spec: RunSpec | None
    arguments: Pairs = ()
    """Megatron's arguments without those of one attempt, such as folders to write to and to load from."""
    iterations: int | None = None
    """Number of iterations; None if runs of all lengths are equal."""
    environment: Pairs = ()
    """Environment of the ranks, without network interfaces, which differ from node to node."""
    dataset: str | None = None
    """Hash of the data set's tokens; None if no manifest or record states it."""
    otherwise: str = ""
    """Name of the run if it is not known what was trained, so that no other run is equal."""

    def repeated(self) -> TrainingIdentity:
        """Return this identity without seed, length and logging, in which repeats of a run may differ."""
        spec = replace(self.spec, seed=0) if self.spec else None
        arguments = tuple(
            (name, value) for name, value in self.arguments if name not in _ARGUMENTS_OF_REPEATS
        )
        return replace(self, spec=spec, arguments=arguments, iterations=None, environment=())


@dataclass(frozen=True)
class CodeIdentity:
    """Description of the code that trains: program, Megatron, libraries and image."""

    entry: MegatronEntry
    code: CodeHashes | None
    """None in records of older versions."""
    software: Pairs
    image: str | None

    def trains_as(self, other: CodeIdentity) -> bool:
        """Return True if both codes train in the same way. If the hashes of one code are unknown, they count as equal.

        The kit's own files may differ, because they only prepare the launch and do not train.
        """
        if self.code and other.code and self.code.megatron != other.code.megatron:
            return False
        return replace(self, code=None) == replace(other, code=None)


@dataclass(frozen=True)
class HostIdentity:
    """Description of the hardware that a run is timed on, without the names of its nodes."""

    cpu: str
    cores: int
    devices: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class Identity:
    """Identity of a run that was made or is to be made."""

    training: TrainingIdentity
    code: CodeIdentity
    host: HostIdentity

    def stands_for(self, other: Identity) -> bool:
        """Return True if a run with this identity can be used in place of a run with the other one."""
        return (
            self.training == other.training
            and self.host == other.host
            and self.code.trains_as(other.code)
        )


def identify_run(record: RunRecord) -> Identity:
    """Return the identity of a recorded run from its `run.json`: its configuration, code and host.

    Two runs with equal identities train the same, and their times can be compared.
    """
    training = identify_training(
        record.spec,
        parse_flag_values(record.argv),
        iterations=record.exit_interval,
        environment=record.environment,
        dataset=record.dataset.sha256 if record.dataset else None,
    )
    code = CodeIdentity(
        entry=record.entry,
        code=record.code,
        software=sorted_pairs(record.software),
        image=record.image,
    )
    return Identity(training=training, code=code, host=identify_host(record.host))


def identify_training(
    spec: RunSpec | None,
    arguments: Mapping[str, str],
    iterations: int | None = None,
    environment: Mapping[str, str] = {},
    dataset: str | None = None,
) -> TrainingIdentity:
    """Return the identity of a training from its arguments.

    The arguments may have the form of a command line (`--num-layers`), or the form in which Megatron prints
    them (`num_layers`). Arguments that concern a single attempt, such as folders to write to, are dropped.
    """
    training_arguments = {}
    for name, value in arguments.items():
        plain_name = name.lstrip("-").replace("-", "_")
        if plain_name not in _ARGUMENTS_PER_ATTEMPT:
            training_arguments[plain_name] = value
    # The network interface of a machine does not change what is trained.
    variables = {name: text for name, text in environment.items() if name not in INTERFACES}
    return TrainingIdentity(
        spec,
        sorted_pairs(training_arguments),
        iterations,
        sorted_pairs(variables),
        dataset,
    )


def essential_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the arguments that decide what is trained, by name without dashes.

    Arguments on output, length and seed are dropped.
    """
    return dict(identify_training(None, arguments).repeated().arguments)


def identify_host(host: HostRecord) -> HostIdentity:
    """Return the parts of a host on which the times of a run depend."""
    return HostIdentity(host.cpu, host.cores, host.devices, len(host.nodes))


def sorted_pairs(mapping: Mapping[str, str]) -> Pairs:
    """Return the items of a mapping, sorted by key."""
    return tuple(sorted(mapping.items()))


def parse_flag_values(argv: Sequence[str]) -> dict[str, str]:
    """Return the flags of a command line with their values as text; `True` for flags without value."""
    return {flag: " ".join(values) or "True" for flag, values in values_by_flag(argv).items()}
