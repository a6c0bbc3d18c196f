"""Small models and random legal configurations of them, for the tests of the dry run."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from parakit.artifacts.dry_run import RankJob
from parakit.config.model import Model, model_from_flags
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, spec_from_model
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.planner.dryrun.comparison import CheckedRank, compare_rank
from parakit.planner.dryrun.job import DryRunner, encode_flags, refuse_unsupported

_SMALL = (
    "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--vocab-size 500 --hidden-dropout 0 --attention-dropout 0"
)
_KINDS = {
    "gpt": "",
    "untied": "--untie-embeddings-and-output-weights",
    "llama": (
        "--untie-embeddings-and-output-weights --position-embedding-type rope --swiglu "
        "--ffn-hidden-size 96 --disable-bias-linear --normalization RMSNorm "
        "--group-query-attention --num-query-groups 4"
    ),
    "moe": (
        "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
        "--moe-token-dispatcher-type alltoall"
    ),
}


@dataclass(frozen=True)
class Case:
    """A model, a legal configuration of it, and one rank."""

    model: Model
    spec: RunSpec
    rank: int


def small_model(kind: str = "gpt", layers: int = 4) -> Model:
    arguments = (*_SMALL.split(), *_KINDS[kind].split(), "--num-layers", str(layers))
    return model_from_flags(kind, "gpt3", arguments)


def run_case(runner: DryRunner, case: Case) -> CheckedRank:
    refuse_unsupported(case.spec)
    flags, world = (
        encode_flags(case.model, case.spec),
        case.spec.parallelism.world_size,
    )
    return compare_rank(case.spec, runner.run(RankJob(flags, world, case.rank)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(list(_KINDS)))
    pipeline = draw(st.sampled_from([1, 2, 4]))
    virtual = draw(st.sampled_from([1, 2])) if pipeline > 1 else 1
    split = _split(draw, kind, pipeline, virtual)
    model = small_model(kind, layers=pipeline * virtual * draw(st.sampled_from([1, 2])))
    micro = draw(st.sampled_from([1, 2]))
    microbatches = pipeline * draw(st.sampled_from([1, 2]))
    batch = Batch(micro, micro * microbatches * split.data)
    # Expert parallelism refuses fp16 at the published commit.
    halves = ["fp32", "bf16"] if kind == "moe" else ["fp32", "bf16", "fp16"]
    spec = replace(
        spec_from_model(model, split, batch),
        dtype=draw(st.sampled_from(halves)),
        recompute=draw(st.sampled_from([Recompute.NONE, Recompute.FULL])),
    )
    return Case(model, spec, draw(st.integers(0, split.world_size - 1)))


def _split(draw: st.DrawFn, kind: str, pipeline: int, virtual: int) -> Parallelism:
    tensor = draw(st.sampled_from([1, 2, 4]))
    data = draw(st.sampled_from([1, 2, 4]))
    moe = kind == "moe"
    return Parallelism(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=draw(st.sampled_from([1, 2])),
        expert=draw(st.sampled_from([d for d in (1, 2, 4) if d <= data])) if moe else 1,
        virtual_stages=virtual,
        sequence_parallel=tensor > 1 and (moe or draw(st.booleans())),
        sharding=draw(st.sampled_from([Sharding.NONE, Sharding.ZERO1])),
    )
