"""Train an imported model with `transformers`, as the reference that Megatron is compared with.

The model has the weights that `from_pretrained` loads, in fp32, on one rank, and gets the same batches
and updates as Megatron, from the native backend's engine. The program takes Megatron's flags as the
native backend does, and the folder of the imported model. If Megatron's strategy pads the vocabulary (TP
that does not divide it), this model gets the same padding rows, which are copies of its last row.

    torchrun --nproc-per-node 1 -m parakit.convert.hf.reference --imported hub/NAME FLAGS…
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from parakit.convert.hf.families import TensorPair, list_tensor_pairs
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

_MODULE_NAMES = {
    "wte": "embedding.word_embeddings",
    "embed_tokens": "embedding.word_embeddings",
    "ln_f": "decoder.final_layernorm",
    "norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
"""Megatron's names of the modules outside of the layers, by the last part of the name in `transformers`."""
_SUFFIXES_IN_LAYER = {
    "": "",
    "ln_1": ".input_layernorm",
    "input_layernorm": ".input_layernorm",
    "ln_2": ".pre_mlp_layernorm",
    "post_attention_layernorm": ".pre_mlp_layernorm",
}
"""Megatron's names of the modules in a layer, by the names in `transformers`; empty is the layer."""
_EXPERTS = ".experts.experts."
"""Part of the names of experts in Megatron's checkpoints."""
_LAYER_NAME = re.compile(r"(?:.+\.)?(?:h|layers)\.(\d+)(?:\.(.+))?")
"""Pattern of module names in a layer: `transformer.h.0` (GPT-2), `model.layers.0.mlp` (Llama)."""


class CausalModel(nn.Module):
    """A model of `transformers` that takes only tokens and returns only logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [batch, sequence, vocabulary] of tokens [batch, sequence]."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


class ReferenceTaps(Taps):
    """Hooks that capture the modules that both models have: embeddings, layers, norms and the output layer."""

    def place(self, name: str, module: nn.Module) -> tuple[str, ModuleSlots] | None:  # noqa: ARG002
        """Return Megatron's name of a module and the inputs and outputs to capture. None means that nothing is
        captured.
        """
        megatron_name = find_megatron_name(name)
        point = find_module_slots(megatron_name) if megatron_name else None
        if megatron_name is None or point is None:
            return None
        if megatron_name.endswith("layernorm"):
            # Each family names the argument of its norms otherwise, so no input is captured.
            point = replace(point, takes=())
        return megatron_name, point


def find_megatron_name(name: str) -> str | None:
    """Return Megatron's name of a module of `transformers`; None if Megatron has no such module."""
    in_layer = _LAYER_NAME.fullmatch(name)
    if in_layer is None:
        return _MODULE_NAMES.get(name.rpartition(".")[2])
    layer, module = in_layer.groups()
    suffix = _SUFFIXES_IN_LAYER.get(module or "")
    return None if suffix is None else f"decoder.layers.{layer}{suffix}"


def build_counterpart(model: CausalModel, pairs: Sequence[TensorPair], layers: int) -> Counterpart:
    """Return the counterpart of Megatron's model: the model, its parameters by Megatron's names, and its hooks.

    Args:
        model: The model of `transformers`.
        pairs: The pairs of tensors of both formats (`list_tensor_pairs`), with which weights are imported as
            well.
        layers: Number of layers, which Megatron's checkpoints stack in the first dimension.
    """
    parameters_by_name = dict(model.model.named_parameters())

    def make_taps(sink: Sink, batches: Sequence[MicroBatch]) -> ReferenceTaps:
        return ReferenceTaps(model, sink, batches)

    parameters = [
        parameter
        for pair in pairs
        for parameter in _list_megatron_parameters(pair, layers, parameters_by_name)
    ]
    return Counterpart(model, tuple(parameters), make_taps)


def _list_megatron_parameters(
    pair: TensorPair, layers: int, parameters_by_name: Mapping[str, nn.Parameter]
) -> Iterator[MegatronParameter]:
    """Yield the parameters of Megatron that are stored in one tensor of its checkpoints: one, or one per expert.

    Args:
        pair: The tensor in one layer, with the tensors of `transformers` that it is made of.
        layers: Number of layers, which Megatron's checkpoints stack in the first dimension.
        parameters_by_name: Parameters of the model of `transformers`, which holds all experts in one tensor.
    """
    parameters = tuple(parameters_by_name[name] for name in pair.loaded_names)
    join = pair.loaded_form.join
    if _EXPERTS not in pair.parameter:
        shape, offset = pair.shape, (0,) * len(pair.shape)
        if pair.layer is not None:
            shape, offset = (layers, *shape), (pair.layer, *offset)
        placement = Placement(pair.key, shape, offset)
        yield MegatronParameter(pair.parameter, placement, parameters, join)
        return
    num_experts, *shape_of_expert = pair.shape
    offset_in_expert = (0,) * len(shape_of_expert)
    for expert in range(num_experts):
        offset = (pair.layer or 0, expert, *offset_in_expert)
        placement = Placement(pair.key, (layers, *pair.shape), offset)
        name = pair.parameter.replace(_EXPERTS, f".experts.local_experts.{expert}.")
        select_expert = partial(_select_expert, join, expert)
        yield MegatronParameter(name, placement, parameters, select_expert)


def _select_expert(
    join: Callable[[Sequence[Tensor]], Tensor], expert: int, parts: Sequence[Tensor]
) -> Tensor:
    """Return the tensor of one expert from the tensors that `join` makes one tensor of all experts of."""
    return join(parts)[expert]


def load_reference(source: ImportSource, settings: Settings, rows: int) -> CausalModel:
    """Return the source's model in fp32 and in training mode.

    Args:
        source: The folder that was imported.
        settings: Settings of the run; its two dropout probabilities replace those of the config.
        rows: Rows of the vocabulary. Rows beyond the source's vocabulary are copies of its last row.
    """
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
    vocabulary = source.shape.vocabulary
    if rows > vocabulary:
        model.resize_token_embeddings(rows, mean_resizing=False)
        with torch.no_grad():
            for parameter in {model.get_input_embeddings().weight, model.lm_head.weight}:
                parameter[vocabulary:] = parameter[vocabulary - 1]
    return CausalModel(model.train())


def main(argv: Sequence[str]) -> None:
    """Train the imported model with `transformers` to `--exit-interval`, and print the native backend's log lines.

    This is one process on a CPU. `argv` has the training flags, and the folder of the imported model.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument(IMPORTED, type=Path, required=True)
    parser.add_argument(PADDED, type=int, default=0)
    arguments, flags = parser.parse_known_args(argv)
    settings = parse_settings(drop_flags(flags, FROM_CONFIG))
    source = read_source(Path(read_import(arguments.imported).folder))
    rows = max(arguments.padded_vocabulary, source.shape.vocabulary)
    dist.init_process_group("gloo")
    ranks = RankLayout(0, 1, 1, torch.device("cpu"))
    torch.manual_seed(settings.seed)
    model = load_reference(source, settings, rows)
    shape = replace(source.shape, vocabulary=rows)
    pairs = list_tensor_pairs(source.model_type, shape)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(format_parameters_line(0, 0, num_parameters), flush=True)
    counterpart = build_counterpart(model, pairs, shape.layers)
    engine = wrap_for_capture(TorchEngine(model, settings, ranks), counterpart, settings)
    num_samples = settings.train_iters * settings.global_batch_size
    samples = SplitSamples(
        Path(settings.data_path), settings.split, num_samples, settings.seq_length, settings.seed
    )
    train(settings, ranks, engine, samples)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
