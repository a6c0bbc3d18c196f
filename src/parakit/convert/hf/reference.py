"""The same model, batches and updates by `transformers`: what an imported model is compared with.

The weights as `from_pretrained` loads them, in fp32, on one rank, under the native backend's engine. It
takes Megatron's flags as that backend does, and the model from the folder that was imported. Where a
strategy of Megatron has padding rows (TP that does not divide the vocabulary), the model gets the same,
copies of its last row.

    torchrun --nproc-per-node 1 -m parakit.convert.hf.reference --imported hub/NAME FLAGS…
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parakit.artifacts.capture import Placement
from parakit.capturing import Sink
from parakit.config.flags import drop_flags
from parakit.convert.hf.families import TensorPair, pairs_of
from parakit.convert.hf.into_megatron import ImportSource, read_import, read_source
from parakit.native import (
    FROM_CONFIG,
    IMPORTED,
    PADDED,
    Counterpart,
    MegatronParameter,
    MicroBatch,
    ModuleSlots,
    RankLayout,
    Settings,
    SplitSamples,
    Taps,
    TorchEngine,
    find_module_slots,
    format_parameters_line,
    parse_settings,
    train,
    wrap_for_capture,
)

_OUTSIDE = dict.fromkeys(("wte", "embed_tokens"), "embedding.word_embeddings")
_OUTSIDE |= dict.fromkeys(("ln_f", "norm"), "decoder.final_layernorm") | {"lm_head": "output_layer"}
_IN_LAYER = dict.fromkeys(("ln_1", "input_layernorm"), ".input_layernorm") | {"": ""}
_IN_LAYER |= dict.fromkeys(("ln_2", "post_attention_layernorm"), ".pre_mlp_layernorm")
_IN_LAYERS = re.compile(r"(?:.+\.)?(?:h|layers)\.(\d+)(?:\.(.+))?")
"""What families call their layers: `transformer.h.0`, `model.layers.0.mlp`."""


class Causal(nn.Module):
    """A model of `transformers` that takes tokens and gives logits, and nothing else."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, vocabulary]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class ReferenceTaps(Taps):
    """Megatron's names of what both models have: embeddings, layers, norms, logits."""

    def place(self, name: str, module: nn.Module) -> tuple[str, ModuleSlots] | None:  # noqa: ARG002
        """Megatron's name of a module, and what it is there."""
        if in_layers := _IN_LAYERS.fullmatch(name):
            layer, inside = in_layers.groups()
            own = _IN_LAYER.get(inside or "")
            whole = None if own is None else f"decoder.layers.{layer}{own}"
        else:
            whole = _OUTSIDE.get(name.rpartition(".")[2])
        point = find_module_slots(whole) if whole else None
        if whole is None or point is None:
            return None
        # Arguments of norms have other names in each family.
        return whole, replace(point, takes=()) if whole.endswith("layernorm") else point


def counterpart_of(model: Causal, pairs: Sequence[TensorPair], layers: int) -> Counterpart:
    """The model's parameters as Megatron's, by the table that weights are converted with."""
    named = dict(model.model.named_parameters())

    def whole(pair: TensorPair) -> MegatronParameter:
        stacked = pair.layer is not None
        shape = (*(layers,) * stacked, *pair.shape)
        offset = (*((pair.layer,) if pair.layer is not None else ()), *(0 for _ in pair.shape))
        parameters = tuple(named[name] for name in pair.names)
        return MegatronParameter(
            pair.parameter, Placement(pair.key, shape, offset), parameters, pair.form.join
        )

    def taps(sink: Sink, batches: Sequence[MicroBatch]) -> ReferenceTaps:
        return ReferenceTaps(model, sink, batches)

    return Counterpart(model, tuple(map(whole, pairs)), taps)


def load(source: ImportSource, settings: Settings, rows: int) -> Causal:
    """The folder's model in fp32, with this run's dropout and `rows` rows of the vocabulary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.from_pretrained(source.folder)
    for names, dropout in (
        (("resid_pdrop", "embd_pdrop"), settings.hidden_dropout),
        (("attn_pdrop", "attention_dropout"), settings.attention_dropout),
    ):
        for name in filter(partial(hasattr, config), names):
            setattr(config, name, dropout)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    if rows > source.shape.vocabulary:
        model.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            for parameter in {model.get_input_embeddings().weight, model.lm_head.weight}:
                parameter[source.shape.vocabulary :] = parameter[source.shape.vocabulary - 1]
    return Causal(model.train())


def main(words: Sequence[str]) -> None:
    """Train to `--exit-interval`."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(IMPORTED, type=Path, required=True)
    parser.add_argument(PADDED, type=int, default=0)
    own, rest = parser.parse_known_args(words)
    settings = parse_settings(drop_flags(rest, FROM_CONFIG))
    source = read_source(Path(read_import(own.imported).folder))
    rows = max(own.padded_vocabulary, source.shape.vocabulary)
    dist.init_process_group("gloo")
    ranks = RankLayout(0, 1, 1, torch.device("cpu"))
    torch.manual_seed(settings.seed)
    model = load(source, settings, rows)
    shape = replace(source.shape, vocabulary=rows)
    pairs = pairs_of(source.model_type, shape)
    print(format_parameters_line(0, 0, sum(one.numel() for one in model.parameters())), flush=True)
    counterpart = counterpart_of(model, pairs, shape.layers)
    engine = wrap_for_capture(TorchEngine(model, settings, ranks), counterpart, settings)
    count = settings.train_iters * settings.global_batch_size
    prefix = Path(settings.data_path)
    samples = SplitSamples(prefix, settings.split, count, settings.seq_length, settings.seed)
    train(settings, ranks, engine, samples)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
