"""Training program of a user: a small Llama in plain PyTorch, on a single rank, with FSDP2 or with TP.

python -m tests.capturing.plain_program FOLDER    # A capture of each of `RUNS`.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from parakit.capturing.plain import capture

RUNS = {
    "one": ("one", "", 1),
    "fsdp": ("fsdp", "", 2),
    "tp": ("tp", "", 2),
    "fsdp divided twice": ("fsdp", "divided twice", 2),
    "tp not reduced": ("tp", "not reduced", 2),
}
"""Runs by name: how the model is split, the injected fault, and the number of ranks."""
SAMPLES, LENGTH, MICRO_BATCH, WIDTH, HEAD, VOCABULARY = 4, 12, 2, 32, 8, 64


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            projection(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(n): Block() for n in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        out: Tensor = self.output(self.norm(x))
        return out


class NotReduced(RowwiseParallel):
    """Inject a fault: each rank continues with its own term of the sum."""

    @staticmethod
    def _prepare_output_fn(_layouts, _local, _module, output, _mesh):  # type: ignore[no-untyped-def]
        return output.to_local()


def split(model: Llama, mesh: DeviceMesh, fault: str) -> None:
    whole = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(
        model,
        mesh,
        {"tok_embeddings": whole, "output": ColwiseParallel(output_layouts=Replicate())},
    )
    for name, layer in model.layers.items():
        faulty = fault == "not reduced" and name == "1"
        columns = (
            "attention.wq",
            "attention.wk",
            "attention.wv",
            "feed_forward.w1",
            "feed_forward.w3",
        )
        plan = dict.fromkeys(columns, ColwiseParallel())
        rows = {"attention.wo": RowwiseParallel()}
        rows["feed_forward.w2"] = NotReduced() if faulty else RowwiseParallel()
        parallelize_module(layer, mesh, {**plan, **rows})


def train(rank: int, world: int, mode: str, folder: str, fault: str, store: str) -> None:
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(1)
    model, groups = Llama(), {}
    if mode == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (*model.layers.values(), model):
            fully_shard(layer, mesh=mesh)
        groups["data"] = mesh.get_group()
    elif mode == "tp":
        mesh = init_device_mesh("cpu", (world,))
        split(model, mesh, fault)
        groups["tensor"] = mesh.get_group()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(
        VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(2)
    )
    replicas = world if mode == "fsdp" else 1
    batches = tokens.split(MICRO_BATCH)[rank % replicas :: replicas]
    for _ in capture(model, optimizer, folder, seeds=0 if mode != "one" else 3, **groups):
        for batch in batches:
            logits = model(batch[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            (loss / len(batches)).backward()
        for parameter in model.parameters() if fault == "divided twice" else ():
            parameter.grad.div_(world)  # FSDP2 has averaged the gradients already.
        optimizer.step()
    if world > 1:
        dist.destroy_process_group()


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for name, (mode, fault, world) in RUNS.items():
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (world, mode, f"{folder}/{name}", fault, f"{scratch}/store")
            mp.start_processes(train, arguments, nprocs=world, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1])
