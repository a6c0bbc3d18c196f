import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parakit.cluster.checks import host
from parakit.config.errors import LaunchError
from parakit.launch import preflight
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options, read_patch_file
from parakit.launch.preflight import check_launch, fp8_problems
from parakit.launch.runtime import Runtime
from parakit.launch.train import compose_job

Composer = Callable[..., Launch]

RECOMPUTED_MLP = ("--recompute-granularity", "selective", "--recompute-modules", "mlp")
CURE = read_patch_file("docs/upstream/mlp_recomputed_with_its_bias.py")


@pytest.fixture
def composed(sample_prefix: Path, tmp_path: Path) -> Composer:
    def compose_named(name: str, **changes: object) -> Launch:
        options = replace(Options(data=str(sample_prefix), runs=tmp_path / "runs"), **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        return compose_job(target.with_options(options))

    return compose_named


def refusal(launch: Launch, runs: Path) -> str:
    with pytest.raises(LaunchError) as caught:
        check_launch(launch)
    return str(caught.value)


def test_what_can_run_passes_and_writes_nothing(composed: Composer, tmp_path: Path) -> None:
    check_launch(composed("train-tp2-gpt2-tiny-2cpu"))
    assert not (tmp_path / "runs").exists()


def test_too_few_open_files_are_refused_before_torchrun_waits_for_ever(
    composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = composed("train-tp2-gpt2-tiny-2cpu")
    for limit in (None, 1024):
        monkeypatch.setattr(preflight, "read_open_files_limit", lambda limit=limit: limit)
        check_launch(launch)
    monkeypatch.setattr(preflight, "read_open_files_limit", lambda: 12)
    sentence = refusal(launch, tmp_path)
    assert sentence.startswith(
        "A process may open 12 files here, and a rank needs 64; raise the limit"
    )


def test_too_few_addresses_are_refused_before_an_import_fails_anywhere(
    composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = composed("train-tp2-gpt2-tiny-2cpu")
    for limit in (None, 8 * 2**30):
        monkeypatch.setattr(preflight, "read_address_limit", lambda limit=limit: limit)
        check_launch(launch)
    monkeypatch.setattr(preflight, "read_address_limit", lambda: 3_276_800_000)
    sentence = refusal(launch, tmp_path)
    assert sentence.startswith("A process may have 3.1 GiB of addresses here (ulimit -v)")
    assert sentence.endswith("raise the limit with 'ulimit -v unlimited'.")


@pytest.mark.parametrize(
    ("target", "changes", "message"),
    [
        ("train-tp2-gpt2-xl-2cpu", {"micro_batch_size": 1}, "25 attention heads"),
        ("train-pp3-gpt2-tiny-3cpu", {}, "4 layers"),
        ("train-dp2-gpt2-tiny-2cpu", {"global_batch_size": 7}, "7"),
        ("train-pp2-gpt2-tiny-2cpu", {"extra": ("--num-layers", "3")}, "3 layers, which PP 2"),
        (
            "train-pp2dp2-zero3-gpt2-tiny-4cpu",
            {"micro_batch_size": 1, "global_batch_size": 8},
            r"Megatron-FSDP \(zero3\) .* so PP 2 breaks it; use zero1",
        ),
        (
            "train-baseline-gpt3-175b-1cpu",
            {},
            "needs about .* GiB on 1 CPU rank.*lower MICRO_BATCH",
        ),
        (
            "train-tp2-gpt2-tiny-2cpu",
            {"extra": RECOMPUTED_MLP},
            "^--recompute-modules mlp .* never ends .*; add --disable-bias-linear, or leave mlp out.$",
        ),
        ("train-dp64-gpt2-tiny-64gpu", {}, "Needs 64 GPUs, found .*.*-2cpu|64cpu"),
        (
            "train-dp2-gpt2-tiny-2cpu",
            {"data": "owt-ds/none"},
            "owt-ds/none.*does not exist.*prepare-ds",
        ),
    ],
)
def test_what_cannot_run_is_one_sentence_with_the_fix(
    composed: Composer, tmp_path: Path, target: str, changes: dict[str, object], message: str
) -> None:
    import re

    assert re.search(message, refusal(composed(target, **changes), tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("changes", [{"extra": ("--disable-bias-linear",)}, {"patch_file": CURE}])
def test_an_mlp_is_recomputed_without_biases_or_where_a_patch_file_changes_megatron(
    composed: Composer, tmp_path: Path, changes: dict[str, object]
) -> None:
    extra = (*RECOMPUTED_MLP, *changes.pop("extra", ()))  # type: ignore[misc]
    check_launch(composed("train-baseline-gpt2-tiny-1cpu", extra=extra, **changes))


def copied(prefix: Path, folder: Path) -> Path:
    for file in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copy(file, folder)
    return folder / prefix.name


def test_a_truncated_bin_is_found(composed: Composer, sample_prefix: Path, tmp_path: Path) -> None:
    prefix = copied(sample_prefix, tmp_path)
    file = prefix.with_name(prefix.name + ".bin")
    file.write_bytes(file.read_bytes()[:-10])
    message = refusal(composed("train-dp2-gpt2-tiny-2cpu", data=str(prefix)), tmp_path / "runs")
    assert str(file.name) in message


def test_tokens_beyond_the_vocabulary_are_found_without_a_manifest(
    composed: Composer, sample_prefix: Path, tmp_path: Path
) -> None:
    prefix = copied(sample_prefix, tmp_path)
    prefix.with_name(prefix.name + ".manifest.json").unlink()
    file = prefix.with_name(prefix.name + ".bin")
    tokens = np.fromfile(file, np.uint16)
    tokens[5] = 60_000
    tokens.tofile(file)
    message = refusal(composed("train-dp2-gpt2-tiny-2cpu", data=str(prefix)), tmp_path / "runs")
    assert "holds token 60000, beyond gpt2-tiny's vocabulary of 50257" in message


def test_a_full_disk_is_named_before_anything_is_written(
    composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    message = refusal(composed("train-dp2-gpt2-tiny-2cpu"), tmp_path / "runs")
    assert "has 1 MiB free and the run needs about 77 MiB" in message


def test_a_read_only_place_is_named(
    composed: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests may run as root, for whom every mode bit is open; only the answer of access(2) is replaced.
    monkeypatch.setattr(host.os, "access", lambda path, mode: False)
    message = refusal(composed("train-dp2-gpt2-tiny-2cpu"), tmp_path / "runs")
    assert message == f"{tmp_path} is not writable; name another folder with RUNS=."


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[[str], Path]:
    """As much of a Megatron-LM checkout of a minor version as the launcher looks at."""

    def make(minor: str) -> Path:
        core = tmp_path / "megatron-lm" / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "package_info.py").write_text(
            f"MAJOR = 0\nMINOR = {minor}\nPATCH = 0\nPRE_RELEASE = ''\n"
        )
        (tmp_path / "megatron-lm" / "pretrain_gpt.py").touch()
        return tmp_path / "megatron-lm"

    return make


def test_an_untried_megatron_is_refused_by_its_version_unless_the_user_insists(
    composed: Composer, checkout: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkout("99")
    message = refusal(composed("train-tp2-gpt2-tiny-2cpu", megatron_lm=folder), tmp_path / "runs")
    assert message == (
        f"Megatron 0.99.0 of MEGATRON_LM={folder} has not been tried with this kit, which knows "
        "0.14.0 to 0.19, and main at d98e8a64; name a checkout of one of those with MEGATRON_LM=, "
        "or set ALLOW_UNKNOWN_MEGATRON=1 to train with it."
    )
    launch = composed("train-tp2-gpt2-tiny-2cpu", megatron_lm=folder, allow_unknown_megatron=True)
    check_launch(launch)
    assert launch.environment["KIT_ALLOW_UNKNOWN_MEGATRON"] == "1"


def test_an_unreleased_megatron_is_known_at_the_commit_that_was_tried(
    composed: Composer, checkout: Callable[[str], Path], tmp_path: Path
) -> None:
    def at(commit: str | None) -> Launch:
        return replace(launch, entry=replace(launch.entry, megatron_commit=commit))

    launch = composed("train-tp2-gpt2-tiny-2cpu", megatron_lm=checkout("20"))
    check_launch(at("d98e8a64dd01-dirty"))
    for commit in ("e98e8a64dd01", None):
        with pytest.raises(LaunchError, match=r"0\.20\.0.* of MEGATRON_LM=.* has not been tried"):
            check_launch(at(commit))


@pytest.mark.parametrize(
    ("runtime", "told"),
    [
        (Runtime(), "set RUNTIME=docker, whose image has it, or train llama3-8b"),
        (Runtime(transformer_engine=True, apex=True), None),
    ],
)
def test_fp8_needs_transformer_engine(runtime: Runtime, told: str | None) -> None:
    target = parse_target("train-dp2-llama3-8b-fp8-2gpu")
    launch = compose_job(target, runtime)
    sentences = list(fp8_problems(launch))
    assert (told is None) == (not sentences)
    assert all(str(told) in sentence for sentence in sentences)
