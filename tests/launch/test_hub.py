"""Imported models in targets, and what the two commands refuse."""

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.config.run import Backend, DeviceKind
from parakit.convert.hf.into_megatron import import_model, read_source
from parakit.convert.hf.progress import ConversionProgress
from parakit.convert.hf.random_model import write_model
from parakit.launch.compose import Launch
from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
from parakit.launch.job import parse_target
from parakit.launch.options import NO_OPTIONS, Options
from parakit.launch.train import compose_job
from tests.convert.hf.folders import GPT2, LLAMA
from tests.given import run


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two imported models."""
    root = tmp_path_factory.mktemp("hub")
    for name, config in (("mine-gpt2", GPT2), ("mine-llama", LLAMA)):
        source = read_source(write_model(root / "sources" / name, config))
        import_model(source, name, ConversionProgress(), root)
    return root


def launch_of(hub: Path, target: str, options: Options = NO_OPTIONS) -> Launch:
    name = "mine-" + target.split("-")[2]
    hub_options = replace(options, runs=hub / "runs", model=str(hub / name / f"{name}.args"))
    return compose_job(parse_target(f"train-{target}", hub_options))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("target", "padded_to"),
    [
        ("baseline-mine-gpt2-1cpu", "1"),
        ("tp2-mine-gpt2-2cpu", "1"),
        ("baseline-mine-llama-1cpu", "128"),
        ("tp2-mine-llama-2cpu", "64"),
        ("tp2-mine-llama-2gpu", "64"),
    ],
)
def test_an_imported_model_begins_with_its_weights_and_no_padding_but_for_tensor_parallelism(
    hub: Path, target: str, padded_to: str
) -> None:
    options = Options(runs=hub / "runs", runtime=None if target.endswith("cpu") else "host")  # type: ignore[arg-type]
    launch = launch_of(hub, target, options)
    weights = hub / launch.model.name / "checkpoint"
    flags = Flags(launch.flags)
    assert launch.initial_checkpoint == weights
    assert flags.text("--load") == str(weights)
    assert flags.has("--finetune")
    assert flags.text("--make-vocab-size-divisible-by") == padded_to
    assert launch.model.shape.vocabulary == (131 if "gpt2" in target else 128)


def test_gpt2_keeps_the_fusion_that_alone_has_its_gelu(hub: Path) -> None:
    flags = launch_of(hub, "baseline-mine-gpt2-1cpu").flags
    assert "--openai-gelu" in flags
    assert "--no-bias-gelu-fusion" not in flags
    assert "--no-bias-gelu-fusion" in launch_of(hub, "baseline-mine-llama-1cpu").flags


def test_fsdp_gets_the_weights_before_it_wraps_and_the_native_backend_by_its_own_flag(
    hub: Path,
) -> None:
    weights = str(hub / "mine-gpt2" / "checkpoint")
    sharded = launch_of(hub, "zero3-mine-gpt2-2cpu")
    assert sharded.environment["KIT_START_WEIGHTS"] == weights
    assert "--load" not in sharded.flags
    options = Options(runs=hub / "runs", backend=Backend.NATIVE)
    native = launch_of(hub, "baseline-mine-gpt2-1cpu", options)
    assert Flags(native.flags).text("--start-weights") == weights
    assert "--load" not in native.flags


def test_weights_that_have_changed_are_refused_and_never_written_anew(tmp_path: Path) -> None:
    source = read_source(write_model(tmp_path / "source", GPT2))
    import_model(source, "mine-gpt2", ConversionProgress(), tmp_path)
    launch = launch_of(tmp_path, "baseline-mine-gpt2-1cpu")
    console, weights = Console(quiet=True), tmp_path / "mine-gpt2" / "checkpoint"
    assert ensure_initial_checkpoint(launch, console) == weights
    file = weights / "iter_0000001" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(LaunchError, match="have changed since they were imported"):
        ensure_initial_checkpoint(launch, console)
    assert file.read_bytes() == bytes(content)
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(LaunchError, match=r"are not there; .*make import-hf"):
        ensure_initial_checkpoint(launch, console)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "HF= is required, for example: make import-hf HF="),
        ({"HF": "/no/such/folder"}, "no folder /no/such/folder"),
    ],
)
def test_import_says_what_it_needs(given: dict[str, str], said: str) -> None:
    with pytest.raises((LaunchError, ValueError), match=said):
        run("import-hf", given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RUN": "runs/x"}, "TO= is required, for example: make export-hf"),
        ({"RUN": "runs/no-such-run", "TO": "there"}, "RUN=runs/no-such-run is no run folder"),
    ],
)
def test_export_says_what_it_needs(given: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run("export-hf", given)


def test_an_imported_model_is_of_the_device_that_its_target_names(hub: Path) -> None:
    launch = launch_of(hub, "baseline-mine-llama-1cpu")
    assert launch.spec.device is DeviceKind.CPU
    assert launch.spec.dtype == "fp32"
