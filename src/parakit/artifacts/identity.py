"""When two runs are the same: what is computed, with which code, and where it is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.run import CodeHashes, HostRecord, MegatronEntry, RunRecord
from parakit.config.flag_table import argument_names, flags_with_role
from parakit.config.flags import values_by_flag
from parakit.config.run import RunSpec
from parakit.config.variables import INTERFACES

_PER_ATTEMPT = argument_names(flags_with_role("start", "attempt"))
_OF_REPEATS = argument_names(flags_with_role("logging")) | {
    *("seed", "train_iters", "save_interval", "exit_duration_in_mins"),
    *("start_time", "rank", "local_rank", "master_port"),
}

Pairs = tuple[tuple[str, str], ...]
"""A mapping that can be compared and hashed, sorted."""


@dataclass(frozen=True)
class TrainingIdentity:
    """What is trained. Runs with equal ones print equal losses, whatever they are called."""

    spec: RunSpec | None
    arguments: Pairs = ()
    """Megatron's but for those of one attempt: where it writes and what it loads."""
    iterations: int | None = None
    """None where that is not asked."""
    environment: Pairs = ()
    """Of the ranks; without network interfaces, which are a node's own."""
    dataset: str | None = None
    """Hash of the data set's tokens; None where no manifest or record states it."""
    otherwise: str = ""
    """The run itself, where it is not known what was trained."""

    def repeated(self) -> TrainingIdentity:
        """Of a run and its repeats, which may differ in seed, length and what is logged."""
        spec = replace(self.spec, seed=0) if self.spec else None
        arguments = tuple(each for each in self.arguments if each[0] not in _OF_REPEATS)
        return replace(self, spec=spec, arguments=arguments, iterations=None, environment=())


@dataclass(frozen=True)
class CodeIdentity:
    """With which code."""

    entry: MegatronEntry
    code: CodeHashes | None
    """None in records of before it was kept."""
    software: Pairs
    image: str | None

    def trains_as(self, other: CodeIdentity) -> bool:
        """Whether both train alike: the kit's own files may differ, which a launch is composed by."""
        one, two = self.code and self.code.megatron, other.code and other.code.megatron
        unknown = self.code is None or other.code is None
        return (unknown or one == two) and replace(self, code=None) == replace(other, code=None)


@dataclass(frozen=True)
class HostIdentity:
    """Where it is timed; a node's name is not in it."""

    cpu: str
    cores: int
    devices: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class Identity:
    """Of one run, or of one that is to be made."""

    training: TrainingIdentity
    code: CodeIdentity
    host: HostIdentity

    def stands_for(self, other: Identity) -> bool:
        """Whether a run with this one needs not be made again."""
        return (
            self.training == other.training
            and self.host == other.host
            and self.code.trains_as(other.code)
        )


def identify_run(record: RunRecord) -> Identity:
    """The identity of a run that was made."""
    return Identity(
        identify_training(
            record.spec,
            parse_flag_values(record.argv),
            record.exit_interval,
            record.environment,
            record.dataset.sha256 if record.dataset else None,
        ),
        CodeIdentity(record.entry, record.code, sorted_pairs(record.software), record.image),
        identify_host(record.host),
    )


def identify_training(
    spec: RunSpec | None,
    arguments: Mapping[str, str],
    iterations: int | None = None,
    environment: Mapping[str, str] = {},
    dataset: str | None = None,
) -> TrainingIdentity:
    """What is trained, of arguments that were given or printed."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    return TrainingIdentity(
        spec,
        sorted_pairs({name: value for name, value in plain.items() if name not in _PER_ATTEMPT}),
        iterations,
        sorted_pairs({name: text for name, text in environment.items() if name not in INTERFACES}),
        dataset,
    )


def essential_arguments(arguments: Mapping[str, str]) -> dict[str, str]:
    """Arguments without those that only say where output goes or how long to run."""
    return dict(identify_training(None, arguments).repeated().arguments)


def identify_host(host: HostRecord) -> HostIdentity:
    """What of a host the times of a run depend on."""
    return HostIdentity(host.cpu, host.cores, host.devices, len(host.nodes))


def sorted_pairs(mapping: Mapping[str, str]) -> Pairs:
    """Sorted by their names."""
    return tuple(sorted(mapping.items()))


def parse_flag_values(argv: Sequence[str]) -> dict[str, str]:
    """A command line's flags with their values, `True` for those without."""
    return {name: " ".join(words) or "True" for name, words in values_by_flag(argv).items()}
