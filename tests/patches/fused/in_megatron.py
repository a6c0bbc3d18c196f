"""Three updates of a small GPT with Megatron's layers and optimizer.

Takes JSON, the precisions (fp32, bf16) of each FUSED. Prints JSON, for each FUSED: the patches, whether
torch's compiler was loaded (the memory ledger's dispatch mode has run as well), and for each precision
losses, gradient norms and a sum over the parameters. An empty FUSED is Megatron alone.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.catalogue import PATCHES
from megatron_patches.context import find_context
from megatron_patches.registry import apply_patches
from parakit.accounting.memory import _ResultObserver

TOKENS, BATCH, VOCABULARY = 16, 3, 128

Figures = dict[str, Any]


def model_and_optimizer(fused: str, half: bool) -> tuple[Any, Any]:
    """Return Megatron's GPT wrapped for data parallelism, and its mixed-precision optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if half else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=half,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bias_activation_fusion=True,
        gradient_accumulation_fusion="gradient_gemm" in fused,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, TOKENS)
    model = model.bfloat16() if half else model
    buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, buffers, model)
    options = OptimizerConfig(
        optimizer="adam", lr=0.01, weight_decay=0.1, bf16=half, params_dtype=dtype, clip_grad=0.1
    )
    return wrapped, get_megatron_optimizer(options, [wrapped])


def figures(fused: str, half: bool) -> dict[str, Any]:
    """Train three steps."""
    model, optimizer = model_and_optimizer(fused, half)
    torch.manual_seed(5)
    tokens, labels = torch.randint(VOCABULARY, (2, BATCH, TOKENS))
    positions = torch.arange(TOKENS).expand(BATCH, TOKENS)
    mask = torch.ones(TOKENS, TOKENS).triu(1).bool()[None, None]
    losses, norms = [], []
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = model(tokens, positions, mask, labels=labels).float().mean()
        loss.backward()
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    total = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    return {"losses": losses, "norms": norms, "total": total}


def train(fused: str, precisions: Sequence[str]) -> Figures:
    """Apply patches, import Megatron and train in each precision. Must run in a fresh process."""
    if fused:  # The graphs of patches would be compiled. Without patches Megatron must not even load the compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ["KIT_FUSED"] = fused
    context = find_context(Path("none"), "cpu")
    results: Figures = {"applied": apply_patches(PATCHES, context)}
    for precision in precisions:
        results[precision] = figures(fused, precision == "bf16")
    with _ResultObserver(lambda _: None):
        torch.zeros(1).zero_()
    results["compiler"] = "torch._dynamo" in sys.modules
    return results


def main(asked: str) -> None:
    """Fork a process with imported torch per set of patches, and print the results."""
    fork, running, ends = multiprocessing.get_context("fork"), [], {}
    for fused, precisions in json.loads(asked).items():
        ours, sender = fork.Pipe(duplex=False)
        process = fork.Process(
            target=lambda end, *arguments: end.send(train(*arguments)),
            args=(sender, fused, precisions),
        )
        process.start()
        sender.close()
        running.append(process)
        ends[fused] = ours
    results = {fused: end.recv() for fused, end in ends.items()}
    for process in running:
        process.join()  # Megatron prints text too, at the latest when a process ends.
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
