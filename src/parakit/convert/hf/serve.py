"""Score sequences with `transformers` as a serving engine does: a forward pass, and `generate` with a KV cache.

The log probabilities of both are written, and a capture of the modules that Megatron has as well, under Megatron's
names. The capture is that of `generate`: the outputs of its calls are joined along the sequence. So a fault that only
the cache has shows in the first module that it reaches.

    python -m parakit.convert.hf.serve --folder MODEL --sequences FILE --like rank.json --out FOLDER --prompt 16
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from parakit.artifacts.capture import (
    CHOICE,
    MODEL,
    SCORES,
    START_WEIGHT,
    CapturedModule,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    TensorKey,
    read_rank,
)
from parakit.capturing import Recording
from parakit.convert.hf.families import list_tensor_pairs
from parakit.convert.hf.into_megatron import read_source
from parakit.convert.hf.reference import CausalModel, build_counterpart, find_megatron_name
from parakit.logprob import (
    GENERATED_FOLDER,
    SCORES_FILE,
    TEXTS_FILE,
    WHOLE_FOLDER,
    TokenLogProbabilities,
)
from parakit.native import find_module_slots

_NAMES_IN_LAYER = {
    "self_attn": "self_attention",
    "mlp": "mlp",
    "attn.c_proj": "self_attention.linear_proj",
    "mlp.c_proj": "mlp.linear_fc2",
}
"""Megatron's names of modules in a layer. GPT-2's projections have a bias, which Megatron adds elsewhere."""
_IN_LAYER = re.compile(r"(?:.+\.)?(?:h|layers)\.(\d+)\.(self_attn|mlp|attn\.c_proj|mlp\.c_proj)")
_ROUTER = re.compile(r"(?:.+\.)?layers\.(\d+)\.mlp\.gate")


@dataclass
class OutputsByModule:
    """Hooks that keep the outputs of a model's modules, over all calls of one batch of sequences."""

    model: nn.Module
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Outputs [batch, positions of the call, …] by Megatron's `module slot`."""
    choices: dict[str, list[Tensor]] = field(default_factory=dict)
    """Numbers of the chosen experts [batch, positions of the call, k] by Megatron's name of the router."""
    scores: dict[str, list[Tensor]] = field(default_factory=dict)
    """Scores by which experts are chosen [batch, positions of the call, experts], by the same name."""
    batch_size: int = 1
    num_experts: int = 0

    @contextmanager
    def attach(self) -> Iterator[None]:
        """Attach the hooks within the `with` block."""
        handles = []
        for name, module in self.model.named_modules():
            hook = self._make_hook(name, module)
            if hook is not None:
                handles.append(module.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_hook(self, name: str, module: nn.Module) -> Callable[..., None] | None:
        """Return the hook of a module; None if Megatron has no module with the same output."""
        router, in_layer = _ROUTER.fullmatch(name), _IN_LAYER.fullmatch(name)
        if router is not None:
            return self._keep_choices(f"decoder.layers.{router[1]}.mlp.router")
        if in_layer is not None:
            if hasattr(module, "c_proj"):
                return None  # Its output has a bias; the hook is on its projection.
            megatron_name = f"decoder.layers.{in_layer[1]}.{_NAMES_IN_LAYER[in_layer[2]]}"
            return self._keep_output(f"{megatron_name} output.0")
        known_name = find_megatron_name(name)
        slots = find_module_slots(known_name) if known_name else None
        if slots is None or not slots.gives:
            return None
        return self._keep_output(f"{known_name} {slots.gives}")

    def _keep_output(self, key: str) -> Callable[..., None]:
        """Return a hook that keeps the output of each call; of GPT-2's projections, the product without the bias."""

        def keep(module: Any, args: tuple[Any, ...], output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            if type(module).__name__ == "Conv1D":
                values = args[0] @ module.weight
            self.outputs.setdefault(key, []).append(values.detach())

        return keep

    def _keep_choices(self, name: str) -> Callable[..., None]:
        """Return a hook that keeps the experts that a router chooses, and its scores."""

        is_scaled = getattr(self.model.config, "norm_topk_prob", True)

        def keep(_: nn.Module, __: Any, output: Any) -> None:
            logits, indices = output[0].detach(), output[-1].detach()
            # Megatron chooses by probabilities if they are not scaled after the choice, and by logits otherwise.
            scores = logits if is_scaled else logits.float().softmax(-1)
            for values, parts in ((indices, self.choices), (scores, self.scores)):
                by_sequence = values.view(self.batch_size, -1, values.shape[-1])
                parts.setdefault(name, []).append(by_sequence)

        return keep

    def write(self, sink: Recording, micro_batch: int, length: int) -> None:
        """Write all outputs and choices of the batch in Megatron's form, with the sequence as the first dimension.

        Outputs that do not have all `length` positions of the sequences are left out.
        """
        for key, parts in self.outputs.items():
            name, _, slot = key.partition(" ")
            joined = torch.cat(parts, dim=1)
            if joined.shape[1] != length:
                continue  # `generate` computes only the last logits of the prompt.
            slots = find_module_slots(name)
            values = (slots.form(joined) if slots else joined.transpose(0, 1)).contiguous()
            sink.write(TensorKey(CaptureStage.OUTPUTS, name, slot, micro_batch), values)
        for name, parts in self.scores.items():
            scores = torch.cat(parts, dim=1).transpose(0, 1).flatten(0, 1)
            sink.write(TensorKey(CaptureStage.OUTPUTS, name, SCORES, micro_batch), scores)
        for name, parts in self.choices.items():
            chosen = torch.cat(parts, dim=1).transpose(0, 1).flatten(0, 1)
            is_chosen = torch.zeros(len(chosen), self.num_experts, dtype=torch.bool)
            is_chosen.scatter_(1, chosen, True)
            sink.write(TensorKey(CaptureStage.OUTPUTS, name, CHOICE, micro_batch), is_chosen)


class ForcedTokens:
    """Logits processor of `generate` that lets it choose the tokens of given sequences."""

    def __init__(self, sequences: Tensor) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores with which the next token of each sequence is the given one."""
        forced = torch.full_like(scores, -torch.inf)
        return forced.scatter(1, self._sequences[:, input_ids.shape[1]].unsqueeze(1), 0.0)


def report_log_probabilities(logits: Tensor) -> Tensor:
    """Return the log probabilities [batch, positions, vocabulary] that the engine reports for its logits."""
    return torch.log_softmax(logits.float(), dim=-1)


def score_whole(model: Any, sequences: Tensor) -> Tensor:
    """Return the log probability of each next token, [batch, sequence − 1], from one forward pass per sequence."""
    logits = model(input_ids=sequences, use_cache=False).logits[:, :-1]
    return _gather(report_log_probabilities(logits), sequences[:, 1:])


def score_generated(model: Any, sequences: Tensor, prompt_tokens: int) -> Tensor:
    """Return the log probabilities of the tokens after the prompt, [batch, sequence − prompt], from `generate`.

    The model generates token by token with a KV cache. Each generated token is replaced by that of the sequence.
    """
    generated = model.generate(
        input_ids=sequences[:, :prompt_tokens],
        attention_mask=torch.ones_like(sequences[:, :prompt_tokens]),
        # The last logits are those of the last token but one, which predict the last token.
        max_new_tokens=sequences.shape[1] - prompt_tokens,
        min_new_tokens=sequences.shape[1] - prompt_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[ForcedTokens(sequences)],
        return_dict_in_generate=True,
        output_logits=True,
    )
    # `generate` never feeds the last token, whose outputs a capture has as well.
    model(input_ids=sequences[:, -1:], past_key_values=generated.past_key_values, use_cache=True)
    logits = torch.stack(generated.logits, dim=1)
    return _gather(report_log_probabilities(logits), sequences[:, prompt_tokens:])


def _gather(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return the log probability of each target."""
    return log_probabilities.gather(2, targets.unsqueeze(2)).squeeze(2)


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model of a folder in evaluation mode, with PyTorch's plain attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    return model.eval()


def count_experts(model: Any) -> int:
    """Return the number of experts per layer; 0 for a dense model."""
    config = model.config
    return getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 0


@dataclass(frozen=True)
class Service:
    """A loaded model, and what is asked of it."""

    model: Any
    source: Path
    sequences: Tensor
    prompt_tokens: int
    like: CapturedRank
    """Description of the trainer's capture on one rank, whose micro batches are scored."""

    def score(self, folder: Path) -> None:
        """Write the log probabilities of both ways of scoring, and the capture of `generate`."""
        folder.mkdir(parents=True, exist_ok=True)
        num_sequences, length = self.sequences.shape
        is_scored = np.zeros((num_sequences, length - 1), bool)
        is_scored[:, self.prompt_tokens - 1 :] = True
        nats_by_way = {way: np.zeros(is_scored.shape) for way in (WHOLE_FOLDER, GENERATED_FOLDER)}
        writer = CaptureWriter(folder / "capture" / "rank-0")
        recording = Recording(writer)
        self._write_weights(recording)
        for number in range(self.like.micro_batches):
            rows = slice(
                number * self.like.micro_batch_size, (number + 1) * self.like.micro_batch_size
            )
            batch = self.sequences[rows]
            nats_by_way[WHOLE_FOLDER][rows] = score_whole(self.model, batch).double().numpy()
            hooks = OutputsByModule(
                self.model, batch_size=len(batch), num_experts=count_experts(self.model)
            )
            with hooks.attach():
                scores = score_generated(self.model, batch, self.prompt_tokens)
            nats_by_way[GENERATED_FOLDER][rows, self.prompt_tokens - 1 :] = scores.double().numpy()
            key = TensorKey(CaptureStage.INPUTS, MODEL, "input.input_ids", number)
            recording.write(key, batch)
            hooks.write(recording, number, length)
        writer.close(self._describe_rank())
        self._write_texts(folder / TEXTS_FILE)
        for way, nats in nats_by_way.items():
            (folder / way).mkdir(exist_ok=True)
            TokenLogProbabilities(nats, is_scored).write(folder / way / SCORES_FILE)

    def _write_texts(self, path: Path) -> None:
        """Write the text of each token, if the model's folder has a tokenizer."""
        if not (self.source / "tokenizer.json").is_file():
            return
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.source)
        tokens = np.unique(self.sequences.numpy()).tolist()
        path.write_text(json.dumps({token: tokenizer.decode([token]) for token in tokens}))

    def _write_weights(self, recording: Recording) -> None:
        """Write all weights under Megatron's names."""
        source = read_source(self.source)
        pairs = list_tensor_pairs(source.model_type, source.shape)
        counterpart = build_counterpart(CausalModel(self.model), pairs, source.shape.layers)
        for parameter in counterpart.parameters:
            piece = parameter.piece(lambda tensor: tensor.data)
            recording.write_piece(CaptureStage.WEIGHTS, START_WEIGHT, piece)

    def _describe_rank(self) -> CapturedRank:
        """Return the trainer's description with this model's modules."""
        modules = {}
        for name, module in self.model.named_modules():
            known_name = find_megatron_name(name)
            if known_name:
                modules[known_name] = _describe_module(module)
        return msgspec.structs.replace(self.like, modules=modules, functions={}, notes=())


def _describe_module(module: nn.Module) -> CapturedModule:
    """Return a module's class, and file and line of its forward pass, from the folder of its package on."""
    code = type(module).forward.__code__
    parts = Path(code.co_filename).parts
    package = type(module).__module__.partition(".")[0]
    # The name of a folder further up can be that of the package, too.
    start = len(parts) - 1 - parts[::-1].index(package) if package in parts else 0
    return CapturedModule(type(module).__name__, f"{Path(*parts[start:])}:{code.co_firstlineno}")


def main(argv: Sequence[str]) -> None:
    """Score the sequences of a file, and write the results."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sequences", type=Path, required=True)
    parser.add_argument("--like", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--patch", type=Path, help="a Python file that is executed before the model is loaded"
    )
    arguments = parser.parse_args(argv)
    if arguments.patch:
        runpy.run_path(str(arguments.patch))
    torch.set_num_threads(1)
    model = load_model(arguments.folder, getattr(torch, arguments.dtype))
    sequences = torch.from_numpy(np.load(arguments.sequences))
    service = Service(
        model, arguments.folder, sequences, arguments.prompt, read_rank(arguments.like)
    )
    with torch.no_grad():
        service.score(arguments.out)


if __name__ == "__main__":
    main(sys.argv[1:])
