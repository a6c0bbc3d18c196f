from collections.abc import Callable
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.run import Backend
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.preflight_attention import attention_problems
from parakit.launch.runtime import ON_HOST, Runtime
from parakit.launch.train import compose_job

Composer = Callable[..., Launch]
WITH_TRANSFORMER_ENGINE = Runtime(transformer_engine=True)
ON_CPU, ON_GPU = "train-cp2-gpt2-tiny-2cpu", "train-cp2-gpt2-large-2gpu"


@pytest.fixture
def composed(tmp_path: Path) -> Composer:
    def compose_named(
        name: str, extra: str = "", runtime: Runtime = ON_HOST, **changes: object
    ) -> Launch:
        options = Options(
            data="owt-ds/any",
            runs=tmp_path / "runs",
            extra=tuple(extra.split()),
            **changes,  # type: ignore[arg-type]
        )
        return compose_job(parse_target(name).with_options(options), runtime)

    return compose_named


@pytest.mark.parametrize(
    "extra",
    [
        "--cp-comm-type a2a",
        "--cp-comm-type a2a+p2p",
        "--cp-comm-type p2p p2p a2a p2p",
        "--hierarchical-context-parallel-sizes 1 2",
        "--attention-backend flash",
        "--flash-attention-version 3",
    ],
)
@pytest.mark.parametrize("target", [ON_CPU, ON_GPU])
def test_what_attention_over_a_split_sequence_would_ignore_is_refused_with_the_way_out(
    composed: Composer, target: str, extra: str
) -> None:
    (problem,) = attention_problems(composed(target, extra))
    assert problem.startswith(f"{extra} chooses how Transformer Engine computes attention; ")
    assert "keys and values are gathered, as all_gather does" in problem
    assert ("train on GPUs" if target == ON_CPU else "set RUNTIME=docker") in problem
    assert problem.endswith("or leave the flag out.")
    assert list(attention_problems(composed(ON_GPU, extra, WITH_TRANSFORMER_ENGINE))) == []


@pytest.mark.parametrize(
    "extra",
    [
        "",
        "--cp-comm-type p2p",
        "--cp-comm-type all_gather",
        "--cp-comm-type p2p all_gather allgather p2p",
        "--attention-backend auto",
        "--softmax-type vanilla",
    ],
)
def test_what_attention_over_a_split_sequence_stands_for_passes(
    composed: Composer, extra: str
) -> None:
    assert list(attention_problems(composed(ON_CPU, extra))) == []


@pytest.mark.parametrize("extra", ["--window-size 8,0", "--softmax-type off-by-one"])
def test_what_the_kits_attention_does_not_compute_is_refused_before_ranks_start(
    composed: Composer, extra: str
) -> None:
    (problem,) = attention_problems(composed(ON_CPU, extra))
    assert problem.startswith(f"{extra} is not computed under context parallelism")
    assert list(attention_problems(composed("train-tp2-gpt2-tiny-2cpu", extra))) == []


def test_on_one_part_of_the_sequence_megatron_itself_ignores_how_it_would_be_split(
    composed: Composer,
) -> None:
    target = "train-tp2-gpt2-tiny-2cpu"
    assert list(attention_problems(composed(target, "--cp-comm-type a2a"))) == []
    assert list(attention_problems(composed(target, "--attention-backend unfused"))) == []
    (problem,) = attention_problems(composed(target, "--attention-backend fused"))
    assert "by Megatron's own layers, with explicit scores" in problem


def test_explicit_scores_over_a_split_sequence_are_computed_on_cpus_alone(
    composed: Composer,
) -> None:
    unfused = "--attention-backend unfused"
    assert list(attention_problems(composed(ON_CPU, unfused))) == []
    (problem,) = attention_problems(composed(ON_GPU, unfused))
    assert "keys and values are gathered, as all_gather does; by PyTorch's attention" in problem


def test_other_backends_refuse_flags_themselves(composed: Composer) -> None:
    launch = composed("train-dp2-gpt2-tiny-2cpu", backend=Backend.NATIVE)
    assert list(attention_problems(launch)) == []


def test_a_training_target_is_refused_before_anything_is_written(
    composed: Composer, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError, match=r"^--cp-comm-type a2a chooses"):
        check_launch(composed(ON_CPU, "--cp-comm-type a2a"))
    assert not (tmp_path / "runs").exists()


def test_documents_masked_from_one_another_need_transformer_engine(composed: Composer) -> None:
    target, masked = "train-baseline-gpt2-large-1gpu", "--reset-attention-mask"
    assert masked in next(attention_problems(composed(target, masked)))
    assert list(attention_problems(composed(target))) == []
    assert list(attention_problems(composed(target, masked, WITH_TRANSFORMER_ENGINE))) == []
