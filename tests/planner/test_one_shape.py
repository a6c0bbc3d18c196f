"""Every flag that changes a model's tensors, composed: as many parameters as Megatron prints."""

from dataclasses import replace

import pytest

from parakit.config.model import SHAPE_FLAGS, apply_flags_to_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.costs.tensors import rank_parameters
from parakit.planner.dryrun.job import DryRunner, drop_transformer_engine
from tests.planner.dry_runs import Case, run_case, small_model

LATENT = (
    "--multi-latent-attention --position-embedding-type rope --q-lora-rank 16 --kv-lora-rank 8 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 12"
)
ATTENTIONS = (
    "",
    "--add-qkv-bias",
    "--qk-layernorm",
    "--group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate",
    "--softmax-type learnable",
    LATENT,
    f"{LATENT} --qk-layernorm",
    "--kv-channels 12 --position-embedding-type rope",
)
MLPS = (
    "",
    "--swiglu",
    "--quick-geglu --ffn-hidden-size 48",
    "--num-experts 4",
    "--num-experts 4 --moe-ffn-hidden-size 24 --moe-layer-freq 2",
    "--num-experts 4 --moe-layer-freq ([0]*1+[1]*3) --swiglu",
    "--num-experts 4 --moe-shared-expert-intermediate-size 40",
    "--num-experts 4 --moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate",
)
ENDS = (
    "",
    "--untie-embeddings-and-output-weights",
    "--mtp-num-layers 1 --position-embedding-type rope",
    "--mtp-num-layers 2 --mtp-use-repeated-layer --position-embedding-type rope",
    "--make-vocab-size-divisible-by 64",
)
SPLITS = (
    Parallelism(),
    Parallelism(data=2, expert=2),
    Parallelism(tensor=2, sequence_parallel=True),
    Parallelism(pipeline=2),
    Parallelism(pipeline=2, virtual_stages=2),
)


@pytest.mark.parametrize(
    ("attention", "mlp", "end", "split"),
    [
        (3, 5, 3, 3),
        pytest.param(6, 7, 1, 1, marks=pytest.mark.slow),
        pytest.param(4, 2, 4, 2, marks=pytest.mark.slow),
        pytest.param(1, 4, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_parameters_match_megatron_for_combined_shape_flags(
    dry_runner: DryRunner, attention: int, mlp: int, end: int, split: int
) -> None:
    assert_parameters_match(
        dry_runner, (ATTENTIONS[attention], MLPS[mlp], ENDS[end]), SPLITS[split]
    )


@pytest.mark.parametrize(
    "flags",
    [
        # The low ranks of latent attention are Megatron's defaults.
        "--multi-latent-attention --position-embedding-type rope",
        "--group-query-attention",
        "--num-query-groups 2",  # This flag alone changes nothing.
    ],
)
def test_omitted_shape_flags_have_the_defaults_of_megatron(
    dry_runner: DryRunner, flags: str
) -> None:
    assert_parameters_match(dry_runner, (flags, "", ""), SPLITS[0])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("norm", ["", "--disable-bias-linear --normalization RMSNorm"])
@pytest.mark.parametrize("attention", range(len(ATTENTIONS)))
def test_parameters_match_megatron_for_every_attention_and_mlp(
    dry_runner: DryRunner, attention: int, norm: str
) -> None:
    for index, mlp in enumerate(MLPS, start=attention):
        flags = (ATTENTIONS[attention], mlp, ENDS[index % len(ENDS)], norm)
        assert_parameters_match(dry_runner, flags, SPLITS[(index + attention) % len(SPLITS)])


def assert_parameters_match(
    runner: DryRunner, flag_groups: tuple[str, ...], split: Parallelism
) -> None:
    if "--num-experts" in flag_groups[1]:
        flag_groups = (*flag_groups, "--disable-bias-linear --moe-token-dispatcher-type alltoall")
    else:
        split = replace(split, expert=1)
    arguments = " ".join(flag_groups).split()
    model = apply_flags_to_model(small_model(), arguments, SHAPE_FLAGS | set(arguments))
    spec = spec_from_model(model, split, Batch(1, split.pipeline * split.data))
    for rank in sorted({0, split.world_size - split.world_size // split.pipeline}):
        parameters = run_case(runner, Case(model, spec, rank)).report.parameters
        counted = rank_parameters(drop_transformer_engine(spec), split.pipeline_rank(rank)).total
        assert parameters == counted, (model.flags, split, rank)
