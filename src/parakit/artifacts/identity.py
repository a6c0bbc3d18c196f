"""When two runs are the same: what is computed, with which code, and where it is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from parakit.artifacts.run import Code, HostRecord, MegatronEntry, RunRecord
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
class Computed:
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

    def repeated(self) -> Computed:
        """Of a run and its repeats, which may differ in seed, length and what is logged."""
        spec = replace(self.spec, seed=0) if self.spec else None
        arguments = tuple(each for each in self.arguments if each[0] not in _OF_REPEATS)
        return replace(self, spec=spec, arguments=arguments, iterations=None, environment=())


@dataclass(frozen=True)
class UsedCode:
    """With which code."""

    entry: MegatronEntry
    code: Code | None
    """None in records of before it was kept."""
    software: Pairs
    image: str | None

    def trains_as(self, other: UsedCode) -> bool:
        """Whether both train alike: the kit's own files may differ, which a launch is composed by."""
        one, two = self.code and self.code.megatron, other.code and other.code.megatron
        unknown = self.code is None or other.code is None
        return (unknown or one == two) and replace(self, code=None) == replace(other, code=None)


@dataclass(frozen=True)
class TimedOn:
    """Where it is timed; a node's name is not in it."""

    cpu: str
    cores: int
    devices: tuple[str, ...]
    nodes: int


@dataclass(frozen=True)
class Identity:
    """Of one run, or of one that is to be made."""

    computed: Computed
    code: UsedCode
    timed_on: TimedOn

    def stands_for(self, other: Identity) -> bool:
        """Whether a run with this one needs not be made again."""
        return (
            self.computed == other.computed
            and self.timed_on == other.timed_on
            and self.code.trains_as(other.code)
        )


def identity_of(record: RunRecord) -> Identity:
    """The identity of a run that was made."""
    return Identity(
        computed(
            record.spec,
            given_arguments(record.argv),
            record.exit_interval,
            record.environment,
            record.dataset.sha256 if record.dataset else None,
        ),
        UsedCode(record.entry, record.code, pairs(record.software), record.image),
        timed_on(record.host),
    )


def computed(
    spec: RunSpec | None,
    arguments: Mapping[str, str],
    iterations: int | None = None,
    environment: Mapping[str, str] = {},
    dataset: str | None = None,
) -> Computed:
    """What is trained, of arguments that were given or printed."""
    plain = {name.lstrip("-").replace("-", "_"): value for name, value in arguments.items()}
    return Computed(
        spec,
        pairs({name: value for name, value in plain.items() if name not in _PER_ATTEMPT}),
        iterations,
        pairs({name: text for name, text in environment.items() if name not in INTERFACES}),
        dataset,
    )


def essential(arguments: Mapping[str, str]) -> dict[str, str]:
    """Arguments without those that only say where output goes or how long to run."""
    return dict(computed(None, arguments).repeated().arguments)


def timed_on(host: HostRecord) -> TimedOn:
    """What of a host the times of a run depend on."""
    return TimedOn(host.cpu, host.cores, host.devices, len(host.nodes))


def pairs(mapping: Mapping[str, str]) -> Pairs:
    """Sorted by their names."""
    return tuple(sorted(mapping.items()))


def given_arguments(argv: Sequence[str]) -> dict[str, str]:
    """A command line's flags with their values, `True` for those without."""
    return {name: " ".join(words) or "True" for name, words in values_by_flag(argv).items()}
