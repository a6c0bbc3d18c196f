"""What to train, read from Megatron's own flags, so that both backends take the same command.

Kinds and defaults are the flag table's. Flags that only choose how Megatron computes are accepted and
ignored; a flag that would change the model, the data or the loss and is not implemented is refused by
name. No torch here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, NoReturn

from parakit.config.flag_table import FLAGS, KnownFlag, of_native
from parakit.config.model import round_up, usual_ffn
from parakit.config.strategy import PipelineSchedule

IMPORTED, PADDED = "--imported", "--padded-vocabulary"
"""Those of the reference by transformers: the imported model's folder, a strategy's padded
vocabulary."""

FROM_CONFIG = of_native("imported")
"""Flags of the architecture that this backend does not know; an imported model's config says them."""

MUON_RULE_FLAG = "--muon-rule"
"""The native backend's own."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One run: the flags that this backend implements, each a field of its name.

    What a training process reads from its command line. The `RunSpec` that is recorded of it is read
    from the same flags; it knows neither paths nor rates, nor what this backend has to refuse. A field
    with a default here is one for which Megatron derives it, or has none.
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
    split: str = "969,30,1"
    start_weights: str = ""
    """Folder of the shared start; empty initialises afresh."""
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
    """`torch`, `deepspeed`, or `bare`: forward and backward alone, no communication, no update."""
    zero_stage: int
    eval_interval: int = 0
    eval_iters: int
    ffn_hidden_size: int = 0
    """Width inside an MLP, or inside each expert; 0 is Megatron's default for either."""
    moe_ffn_hidden_size: int = 0
    """Of each expert, where it is another one."""
    normalization: str
    position_embedding_type: str
    rotary_base: int
    disable_bias_linear: bool
    untie_embeddings_and_output_weights: bool
    swiglu: bool
    """The MLP's first matrix is twice as wide."""
    silu: bool
    num_experts: int = 0
    """In each layer; 0 is dense."""
    moe_router_topk: int
    moe_aux_loss_coeff: float
    moe_z_loss_coeff: float = 0.0
    expert_model_parallel_size: int
    optimizer: str
    """`adam` (AdamW), or `muon` with AdamW for what is no hidden matrix."""
    decoupled_lr: float | None = None
    """Peak rate of the AdamW beside Muon; None is `lr`."""
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

    @property
    def bias(self) -> bool:
        """Of all linear layers."""
        return not self.disable_bias_linear

    @property
    def activation(self) -> str:
        """`gelu`, `silu`, or `swiglu`."""
        return "swiglu" if self.swiglu else "silu" if self.silu else "gelu"

    @property
    def mlp_width(self) -> int:
        """Inside an MLP, or inside each expert."""
        usual = usual_ffn(self.hidden_size, self.swiglu)
        return self.moe_ffn_hidden_size or self.ffn_hidden_size or usual

    @property
    def adamw_rate(self) -> float:
        """Of the AdamW beside Muon, for the rate of Muon."""
        return (self.lr if self.decoupled_lr is None else self.decoupled_lr) / self.lr


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
    return Settings(**{each.name: getattr(known, each.name) for each in fields(Settings)})


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


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pretrain_native.py", allow_abbrev=False)
    read = {"--" + each.name.replace("_", "-"): each.default for each in fields(Settings)}
    # Beside its fields the flags of which it has values, and those that say nothing to it.
    others = {name for name, flag in FLAGS.items() if flag.native} - FROM_CONFIG
    for name in (*read, *sorted(others - read.keys())):
        _add(parser, FLAGS[name], read.get(name))
    return parser


def _add(parser: argparse.ArgumentParser, flag: KnownFlag, default: Any) -> None:
    if flag.kind in ("on", "off"):
        parser.add_argument(flag.name, action="store_true")
        return
    read: Callable[[str], Any] = {"whole": int, "decimal": float}.get(flag.kind, str)
    parser.add_argument(
        flag.name,
        type=read,
        choices=None if flag.native in ("", "ignored") else [*map(read, flag.native.split("|"))],
        default=flag.default if default is MISSING else default,
        required=default is MISSING and flag.default is None,
    )
