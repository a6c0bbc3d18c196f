"""Parse Megatron's flags into the `Settings` of a native run, so that all backends take the same command.

Types and defaults come from the flag table (`parakit.config.flag_table`). Flags that only choose how Megatron
computes are accepted and ignored. A flag that changes the model, the data or the loss, and that this backend
does not implement, is refused. This module imports no torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from parakit.config.flag_table import FLAGS, KnownFlag, flags_for_native
from parakit.config.model import default_ffn_hidden, round_up
from parakit.config.strategy import PipelineSchedule

IMPORTED, PADDED = "--imported", "--padded-vocabulary"
"""Flags of the reference run by transformers: folder of the imported model, and padded vocabulary."""

_ROTARY_FLAGS = (
    *("--position-embedding-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim"),
    *("--yarn-original-max-position-embeddings", "--yarn-beta-fast", "--yarn-beta-slow"),
    *("--no-yarn-correction-range-round-to-int", "--no-rope-freq"),
)
FROM_CONFIG = flags_for_native("imported") | frozenset(_ROTARY_FLAGS)
"""Flags of architectures that transformers reads from the model's config. The native backend implements none of
them but the type of positions."""

MUON_RULE_FLAG = "--muon-rule"
"""Flag that Megatron does not have: it chooses PyTorch's or Megatron's rule for Muon."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of one run. There is one field per flag that this backend implements, with the name of the flag.

    A training process reads the settings from its command line. The `RunSpec` that the kit records is read from
    the same flags, but has no paths and no learning rates. A field has a default here if Megatron derives its
    value from other flags, or if Megatron has no such flag.
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
    """True for the exact GELU (erf); False for Megatron's fused GELU, which is the tanh approximation."""
    attention_dropout: float
    hidden_dropout: float
    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    exit_interval: int
    log_interval: int
    seed: int
    data_path: str
    split: str = "969,30,1"
    start_weights: str = ""
    """Checkpoint of the initial weights that all strategies share; if empty, weights are random."""
    lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int
    lr_warmup_fraction: float = 0.0
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    clip_grad: float
    fp16: bool
    bf16: bool
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    num_virtual_stages_per_pipeline_rank: int = 1
    pipeline_schedule: str = PipelineSchedule.MEGATRON.value
    use_torch_fsdp2: bool
    engine: str
    """`torch`, `deepspeed` or `bare`; `bare` runs forward and backward passes only.

    `bare` does not communicate and does not update the weights.
    """
    zero_stage: int
    eval_interval: int = 0
    eval_iters: int
    ffn_hidden_size: int = 0
    """Width inside an MLP, or inside each expert; 0 takes Megatron's default."""
    moe_ffn_hidden_size: int = 0
    """Width inside each expert; 0 takes `ffn_hidden_size`."""
    normalization: str
    position_embedding_type: str
    rotary_base: int
    disable_bias_linear: bool
    untie_embeddings_and_output_weights: bool
    swiglu: bool
    """True for a gated MLP, whose first matrix is twice as wide."""
    silu: bool
    num_experts: int = 0
    """Experts per layer; 0 is a dense model."""
    moe_router_topk: int
    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float = 0.0
    expert_model_parallel_size: int
    optimizer: str
    """`adam` is AdamW; `muon` is Muon for hidden matrices and AdamW for all other parameters."""
    decoupled_lr: float | None = None
    """Peak learning rate of the AdamW that runs next to Muon; None is `lr`."""
    muon_momentum: float
    muon_rule: str
    """Implementation of Muon, `pytorch` or `megatron`, which also decides what AdamW updates."""
    muon_fp32_matmul_prec: str
    """Precision of the Newton–Schulz steps under the rule `megatron`.

    `medium` is bf16; `high` is the precision that torch's setting `high` gives.
    """

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the embedding: the vocabulary, rounded up as Megatron does.

        They are a multiple of `make_vocab_size_divisible_by` times the tensor-parallel size.
        """
        multiple = self.make_vocab_size_divisible_by * self.tensor_model_parallel_size
        return round_up(self.vocab_size, multiple)

    @property
    def bias(self) -> bool:
        """True if the linear layers have biases."""
        return not self.disable_bias_linear

    @property
    def activation(self) -> str:
        """Activation of the MLPs: `gelu`, `silu` or `swiglu`."""
        if self.swiglu:
            return "swiglu"
        return "silu" if self.silu else "gelu"

    @property
    def mlp_width(self) -> int:
        """Width inside an MLP, or inside each expert."""
        default_width = default_ffn_hidden(self.hidden_size, self.swiglu)
        return self.moe_ffn_hidden_size or self.ffn_hidden_size or default_width

    @property
    def adamw_rate(self) -> float:
        """Learning rate of the AdamW that runs next to Muon, as a fraction of Muon's learning rate."""
        return (self.lr if self.decoupled_lr is None else self.decoupled_lr) / self.lr


def parse_settings(arguments: Sequence[str]) -> Settings:
    """Return the settings that the flags give.

    If this backend does not implement a flag or a value, the process exits with one sentence.
    """
    try:
        known, unknown = _build_parser().parse_known_args(arguments)
    except ValueError as error:
        sys.exit(f"The native backend cannot take {error}.")
    if unknown:
        sys.exit(
            f"{unknown[0]} is not implemented by the native backend; leave it out, or train with "
            "BACKEND=megatron."
        )
    return Settings(**{setting.name: getattr(known, setting.name) for setting in fields(Settings)})


def unknown_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags that this backend does not implement, in the order of the arguments."""
    known_flags = _build_parser()._option_string_actions
    return [
        argument
        for argument in arguments
        if argument.startswith("--") and argument not in known_flags
    ]


def refused_value(arguments: Sequence[str]) -> str | None:
    """Return argparse's message on the first value that this backend refuses, or None."""
    try:
        _build_parser().parse_known_args(arguments)
    except ValueError as error:
        return str(error)
    return None


class _RaisingParser(argparse.ArgumentParser):
    """Parser that raises ValueError with argparse's message, where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message.removeprefix("argument "))


def _build_parser() -> argparse.ArgumentParser:
    """Return a parser of all flags that this backend implements or ignores."""
    parser = _RaisingParser(prog="pretrain_native.py", allow_abbrev=False)
    default_by_flag = {
        "--" + setting.name.replace("_", "-"): setting.default for setting in fields(Settings)
    }
    # The other flags are those whose value this backend requires or ignores; no field holds them.
    accepted_flags = {name for name, flag in FLAGS.items() if flag.native} - FROM_CONFIG
    other_flags = sorted(accepted_flags - default_by_flag.keys())
    for name in (*default_by_flag, *other_flags):
        _add_flag(parser, FLAGS[name], default_by_flag.get(name))
    return parser


def _add_flag(parser: argparse.ArgumentParser, flag: KnownFlag, default: Any) -> None:
    """Add one flag of the table of flags to a parser.

    With the default MISSING, the table's default is used; if the table has none, the flag is required.
    """
    if flag.kind in ("on", "off"):
        parser.add_argument(flag.name, action="store_true")
        return
    read_value: Callable[[str], Any] = {"whole": int, "decimal": float}.get(flag.kind, str)
    choices = None
    if flag.native not in ("", "ignored"):
        choices = [read_value(choice) for choice in flag.native.split("|")]
    parser.add_argument(
        flag.name,
        type=read_value,
        choices=choices,
        default=flag.default if default is MISSING else default,
        required=default is MISSING and flag.default is None,
    )
