"""What to train, read from Megatron's own flags, so that both backends take the same command.

Flags that only choose how Megatron computes are accepted and ignored; a flag that would change the
model, the data or the loss and is not implemented is refused by name. No torch here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tools.spec.model import round_up
from tools.spec.strategy import SCHEDULE_FLAG, UNTIED, PipelineSchedule

_IGNORED = {
    "--attention-backend": 1,
    "--distributed-backend": 1,
    "--transformer-impl": 1,
    "--no-masked-softmax-fusion": 0,
    "--openai-gelu": 0,  # It is so without --no-bias-gelu-fusion.
    "--no-bias-dropout-fusion": 0,
    "--no-persist-layer-norm": 0,
    "--no-rope-fusion": 0,
    "--no-gradient-accumulation-fusion": 0,
    "--no-bias-swiglu-fusion": 0,
    "--moe-token-dispatcher-type": 1,
    "--moe-grouped-gemm": 0,
    "--moe-permute-fusion": 0,
    "--num-workers": 1,
    "--log-throughput": 0,
    "--timing-log-level": 1,
    "--tokenizer-type": 1,
    "--save-interval": 1,
    "--tensorboard-dir": 1,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--wandb-save-dir": 1,
    "--decoupled-min-lr": 1,
}
"""Megatron's flags that choose kernels or output, with their number of values."""


IMPORTED, PADDED = "--imported", "--padded-vocabulary"
"""Those of the reference by transformers: the imported model's folder, a layout's padded vocabulary."""

FROM_CONFIG = frozenset(
    {
        "--group-query-attention",
        "--num-query-groups",
        "--kv-channels",
        "--norm-epsilon",
        "--use-rope-scaling",
        "--rope-scaling-factor",
        "--add-qkv-bias",
    }
)
"""Flags of the architecture that this backend does not know; an imported model's config says them."""

MUON_RULE_FLAG = "--muon-rule"
"""The native backend's own."""


@dataclass(frozen=True)
class Settings:
    """One run; sizes as in Megatron's arguments of the same names.

    What a training process reads from its command line. The `RunSpec` that is recorded of it is read
    from the same flags; it knows neither paths nor rates, nor what this backend has to refuse.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int
    max_position_embeddings: int
    vocab_size: int
    make_vocab_size_divisible_by: int
    init_method_std: float
    no_bias_gelu_fusion: bool
    """Megatron's fused GELU is the tanh approximation, its plain one exact (erf)."""
    attention_dropout: float
    hidden_dropout: float
    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    exit_interval: int
    log_interval: int
    seed: int
    data_path: str
    split: str
    start_weights: Path | None
    """Folder of the shared start; None initialises afresh."""
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int
    lr_warmup_fraction: float
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    clip_grad: float
    fp16: bool
    bf16: bool
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int
    pipeline_schedule: str
    """A `PipelineSchedule`."""
    use_torch_fsdp2: bool
    engine: str
    """`torch`, `deepspeed`, or `bare`: forward and backward alone, no communication, no update."""
    zero_stage: int
    eval_interval: int
    eval_iters: int
    ffn_hidden_size: int
    """Width inside an MLP, or inside each expert."""
    normalization: str
    position_embedding_type: str
    """`learned_absolute`, or `rope` with base `rotary_base`."""
    rotary_base: int
    bias: bool
    """Of all linear layers."""
    untie_embeddings_and_output_weights: bool
    activation: str
    """`gelu`, `silu`, or `swiglu`, whose first matrix is twice as wide."""
    num_experts: int
    """In each layer; 0 is dense."""
    moe_router_topk: int
    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float
    expert_model_parallel_size: int
    optimizer: str
    """`adam` (AdamW), or `muon` with AdamW for what is no hidden matrix."""
    decoupled_lr: float
    """Peak rate of the AdamW beside Muon."""
    muon_momentum: float
    muon_rule: str
    """`pytorch` or `megatron`: whose Muon, and which parameters are left to AdamW."""
    muon_fp32_matmul_prec: str
    """Of the Newton–Schulz steps by Megatron's rule: `medium` is bf16, `high` what torch makes of it."""

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding; Megatron pads to a multiple of this times TP."""
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return round_up(self.vocab_size, multiple)


def parse_settings(words: Sequence[str]) -> Settings:
    """Read the flags; exits with a sentence that names what this backend does not do."""
    try:
        known, unknown = _parser().parse_known_args(words)
    except ValueError as error:
        sys.exit(f"The native backend cannot take {error}.")
    if unknown:
        sys.exit(
            f"{unknown[0]} is not implemented by the native backend; leave it out, or train with "
            "BACKEND=megatron."
        )
    values = vars(known)
    values["ffn_hidden_size"] = known.moe_ffn_hidden_size or known.ffn_hidden_size or _width(known)
    values["decoupled_lr"] = known.lr if known.decoupled_lr is None else known.decoupled_lr
    fields = Settings.__dataclass_fields__
    return Settings(**{name: value for name, value in values.items() if name in fields})


def unknown_flags(words: Sequence[str]) -> list[str]:
    """Flags among `words` that this backend does not implement."""
    known = _parser()._option_string_actions
    return [word for word in words if word.startswith("--") and word not in known]


def refused_value(words: Sequence[str]) -> str | None:
    """argparse's words for a value that this backend does not take; None if all are fine."""
    try:
        _parser().parse_known_args(words)
    except ValueError as error:
        return str(error)
    return None


class _Parser(argparse.ArgumentParser):
    """Raises ValueError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _width(known: argparse.Namespace) -> int:
    """Megatron's default: 4h, for a gated MLP two thirds of it rounded down to a multiple of 64."""
    wide = 4 * known.hidden_size
    return int(wide * 2 / 3) // 64 * 64 if known.activation == "swiglu" else wide


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain_native.py", allow_abbrev=False)
    _add_model(parser)
    _add_experts(parser)
    _add_training(parser)
    for flag, values in _IGNORED.items():
        if values:
            parser.add_argument(flag)
        else:
            parser.add_argument(flag, action="store_true")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("max-position-embeddings", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--ffn-hidden-size", type=int)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--init-method-std", type=float, default=0.02)
    parser.add_argument("--attention-dropout", type=float, default=0.1)
    parser.add_argument("--hidden-dropout", type=float, default=0.1)
    parser.add_argument("--no-bias-gelu-fusion", action="store_true")
    parser.add_argument("--normalization", choices=("LayerNorm", "RMSNorm"), default="LayerNorm")
    positions = ("learned_absolute", "rope")
    parser.add_argument("--position-embedding-type", choices=positions, default=positions[0])
    parser.add_argument("--rotary-base", type=int, default=10_000)
    parser.add_argument("--disable-bias-linear", dest="bias", action="store_false")
    parser.add_argument(UNTIED, action="store_true")
    for name in ("swiglu", "silu"):
        parser.add_argument(
            f"--{name}", dest="activation", action="store_const", const=name, default="gelu"
        )


def _add_experts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-experts", type=int, default=0)
    parser.add_argument("--moe-ffn-hidden-size", type=int)
    parser.add_argument("--moe-router-load-balancing-type", choices=("aux_loss",))
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--moe-aux-loss-coeff", type=float, default=0.0)
    parser.add_argument("--moe-z-loss-coeff", type=float, default=0.0)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)


def _add_training(parser: argparse.ArgumentParser) -> None:
    for name in ("micro-batch-size", "global-batch-size", "train-iters", "exit-interval"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr-decay-iters", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "min-lr", "weight-decay", "adam-beta1", "adam-beta2", "clip-grad"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    parser.add_argument("--decoupled-lr", type=float)
    parser.add_argument("--muon-momentum", type=float, default=0.95)
    parser.add_argument(MUON_RULE_FLAG, choices=("pytorch", "megatron"), default="pytorch")
    _add_muon_choices(parser)
    parser.add_argument("--lr-warmup-fraction", type=float, default=0.0)
    parser.add_argument("--lr-decay-style", choices=("cosine", "linear", "constant"), required=True)
    parser.add_argument("--log-interval", type=int, default=1)
    parser.add_argument("--eval-interval", type=int, default=0)
    parser.add_argument("--eval-iters", type=int, default=0)
    for name in ("tensor", "pipeline"):
        parser.add_argument(f"--{name}-model-parallel-size", type=int, default=1)
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=1)
    schedules = tuple(schedule.value for schedule in PipelineSchedule if schedule)
    parser.add_argument(SCHEDULE_FLAG, choices=schedules, default=PipelineSchedule.MEGATRON.value)
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("--engine", choices=("torch", "deepspeed", "bare"), default="torch")
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--split", default="969,30,1")
    parser.add_argument("--start-weights", type=Path)
    for name in ("fp16", "bf16", "use-torch-fsdp2"):
        parser.add_argument(f"--{name}", action="store_true")


def _add_muon_choices(parser: argparse.ArgumentParser) -> None:
    """Megatron's choices of Muon that this backend has too; others are refused."""
    for name in ("muon-nesterov", "muon-use-nesterov", "muon-no-split-qkv"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--muon-scale-mode", choices=("shape_scaling",))
    parser.add_argument("--muon-coefficient-type", choices=("simple",))
    parser.add_argument("--muon-num-ns-steps", type=int, choices=(5,))
    parser.add_argument("--muon-fp32-matmul-prec", choices=("medium", "high"), default="medium")
