"""The six published commands: flags as published, and what the kit is known to add."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parakit.cluster.container.image import ImagePair, find_pair
from parakit.config.files import ROOT, read_args_file, relative_to_root
from parakit.config.strategy import PUBLISHED_STRATEGIES
from parakit.launch.compose import Launch
from parakit.launch.data import sample_index_folder
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.runtime import Runtime, container_runtime
from parakit.launch.train import compose_job
from tests.launch.megatron_parser import MegatronParser

GOLDEN = Path(__file__).parent / "golden"
TARGETS = [
    f"train-{name}-gpt2-large-{1 if name == 'baseline' else 2}gpu" for name in PUBLISHED_STRATEGIES
]
PUBLISHED_PAIR = find_pair("25.06-py3")
NEWER_PAIR = ImagePair("26.08-py3", "5" * 40, "0.19.0")
RUN = "runs/RUN"
CHECKOUTS = [Path(text) for text in os.environ.get("MEGATRON_LM_CHECKOUTS", "").split(":") if text]
VARIANTS = [
    (runtime, version) for runtime in ("docker", "host") for version in ("f4fa7d6b", "0.19")
]

Flags = dict[str, tuple[str, ...]]


@pytest.fixture(scope="session")
def checkout_of_the_commit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As much of a checkout as the launcher looks at."""
    folder = tmp_path_factory.mktemp("megatron-lm")
    (folder / "megatron" / "core").mkdir(parents=True)
    text = "MAJOR = 0\nMINOR = 15\nPATCH = 0\nPRE_RELEASE = 'rc2'\n"
    (folder / "megatron" / "core" / "package_info.py").write_text(text)
    return folder


def arguments(target: str, runtime: str, version: str, checkout: Path) -> tuple[str, ...]:
    if runtime == "docker":
        pair = PUBLISHED_PAIR if version == "f4fa7d6b" else NEWER_PAIR
        options, chosen = Options(), container_runtime(pair)
    else:
        options = Options(megatron_lm=checkout if version == "f4fa7d6b" else None)
        chosen = Runtime()
    parsed = parse_target(target)
    return arguments_of(compose_job(parsed.with_options(options), chosen))


def arguments_of(launch: Launch) -> tuple[str, ...]:
    """Its arguments without the hash of the published data set, which may not be here."""
    folder = relative_to_root(sample_index_folder(launch.job.options.runs, [launch.data]))
    return tuple("runs/.data" if word == folder else word for word in launch.arguments(RUN))


def by_name(arguments: tuple[str, ...]) -> Flags:
    flags: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            assert word not in flags, f"{word} stands twice"
            flags[word] = values = []
        else:
            values.append(word)
    return {name: tuple(values) for name, values in flags.items()}


@pytest.mark.ranks
@pytest.mark.parametrize(("runtime", "version"), VARIANTS)
@pytest.mark.parametrize("target", TARGETS)
def test_a_published_target_passes_the_published_flags_and_the_known_additions_alone(
    target: str, runtime: str, version: str, checkout_of_the_commit: Path
) -> None:
    published = by_name(read_args_file(GOLDEN / f"{target}.args"))
    added = by_name(read_args_file(GOLDEN / f"added-{runtime}-{version}.args"))
    assert published.keys() & added.keys() == set()
    composed = by_name(arguments(target, runtime, version, checkout_of_the_commit))
    assert composed == published | added


def test_a_host_with_transformer_engine_and_apex_passes_what_the_container_passes() -> None:
    parsed = parse_target("train-tp2-gpt2-large-2gpu")
    equipped = Runtime(transformer_engine=True, apex=True)
    launch = compose_job(parsed, equipped)
    golden = read_args_file(GOLDEN / "added-docker-0.19.args")
    published = read_args_file(GOLDEN / "train-tp2-gpt2-large-2gpu.args")
    assert by_name(arguments_of(launch)) == by_name((*published, *golden))


def test_without_apex_its_fusion_is_off_also_with_transformer_engine() -> None:
    parsed = parse_target("train-tp2-gpt2-large-2gpu")
    launch = compose_job(parsed, Runtime(transformer_engine=True))
    assert "--no-gradient-accumulation-fusion" in launch.flags
    assert "--transformer-impl" not in launch.flags


@pytest.mark.parametrize("runtime", ["docker", "host"])
def test_the_345m_alias_is_one_gpu_with_the_published_batch(runtime: str) -> None:
    environment = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "RUNTIME": runtime}
    command = (sys.executable, "-m", "parakit")
    answer = subprocess.run(
        (*command, "train-gpt3-345m-1gpu-x-model-parallelism"),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,  # Where GPUs or data are missing, the refusal follows the command.
    )
    assert "--micro-batch-size 1 --global-batch-size 1536" in answer.stdout
    assert "--log-interval 5" in answer.stdout
    assert ("docker run" in answer.stdout) == (runtime == "docker")


# TP, PP, CP and DP degree, sequence parallelism, micro and global batch.
SEEN = [
    [1, 1, 1, 1, 0, 32, 32],
    [1, 1, 1, 2, 0, 32, 64],
    [2, 1, 1, 1, 0, 64, 64],
    [2, 1, 1, 1, 1, 64, 64],
    [1, 1, 2, 1, 0, 64, 64],
    [1, 2, 1, 1, 0, 64, 64],
]
IN_FP8 = [2, 1, 1, 1, 1, 1, 2]


def commands(version: str, folder: Path) -> list[tuple[int, tuple[str, ...]]]:
    """Devices and arguments of all commands of a version."""
    published = [(runtime, target) for runtime in ("docker", "host") for target in TARGETS]
    return [
        (1 if "baseline" in target else 2, arguments(target, runtime, version, folder))
        for runtime, target in (*published, ("docker", "train-sp2-llama3-8b-fp8-2gpu"))
    ]


def test_the_installed_megatron_accepts_every_command(
    checkout_of_the_commit: Path, megatron_parser: MegatronParser
) -> None:
    assert megatron_parser.validated(commands("0.19", checkout_of_the_commit)) == [
        *SEEN,
        *SEEN,
        IN_FP8,
    ]


@pytest.mark.skipif(
    not CHECKOUTS, reason="MEGATRON_LM_CHECKOUTS names no Megatron-LM checkouts (colon-separated)"
)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_a_checkout_accepts_every_command(checkout: Path, checkout_of_the_commit: Path) -> None:
    info = (checkout / "megatron/core/package_info.py").read_text()
    version = "f4fa7d6b" if "MINOR = 15" in info else "0.19"
    parser = MegatronParser(checkout)
    try:
        assert parser.validated(commands(version, checkout_of_the_commit)) == [*SEEN, *SEEN, IN_FP8]
    finally:
        parser.close()
