"""One iteration under PyTorch alone: forward and backward of every micro batch, then the update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from examples.native.batches import MicroBatch
from examples.native.expert_parallel import average_experts, expert_ranks, spread_experts
from examples.native.model import GPT, mean_loss, mixtures
from examples.native.muon import RATE, muon_adamw
from examples.native.optimizer import adamw, clip_gradients
from examples.native.parallel import Ranks, parallelise
from examples.native.settings import Settings
from examples.native.watch import Watch


@dataclass(frozen=True)
class Update:
    """What an optimizer step tells the log."""

    gradient_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False


class Engine(Protocol):
    """What the training loop needs of a backend."""

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate gradients; return means over this rank's micro batches (`lines.NAMES`)."""

    def update(self, learning_rate: float) -> Update:
        """Clip, step, and forget the gradients."""

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, vocabulary], whole, without gradients or dropout."""


class TorchEngine:
    """DDP, FSDP2 or tensor parallelism with PyTorch's AdamW."""

    def __init__(self, model: GPT, settings: Settings, ranks: Ranks, watch: Watch) -> None:
        self._settings, self._watch = settings, watch
        self._tensor_parallel = ranks.tensor_size > 1
        self._half = torch.bfloat16 if settings.bf16 else torch.float16 if settings.fp16 else None
        self._device = ranks.device.type
        self._mixtures = mixtures(model)
        self._expert_ranks = (
            expert_ranks(settings.expert_model_parallel_size)
            if settings.expert_model_parallel_size > 1
            else None
        )
        self._experts = spread_experts(model, self._expert_ranks) if self._expert_ranks else []
        self._model = parallelise(model, settings, ranks)
        choose = muon_adamw if settings.optimizer == "muon" else adamw
        self._optimizer: torch.optim.Optimizer = choose(self._model, settings)
        if ranks.device.type == "cuda" and not self._mixtures:
            # How many tokens an expert gets is another number every time.
            self._model.compile()
        # Megatron's dynamic loss scale: starts at 2^32, doubles after 1000 good steps.
        self._scaler = torch.amp.GradScaler(
            self._device, init_scale=2.0**32, growth_interval=1000, enabled=settings.fp16
        )

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients are communicated with the last micro batch where the wrapper can wait for it."""
        self._watch.begin_iteration(self._model, self._optimizer)
        total = torch.zeros(3 if self._mixtures else 1, device=batches[0][0].device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            with self._communicating(number == len(batches)), self._split_loss():
                with self._watch("forward-compute"), self._autocast():
                    loss = mean_loss(self._model(tokens), labels)
                    whole = sum((layer.auxiliary_loss() for layer in self._mixtures), loss)
                with self._watch("backward-compute"):
                    torch.autograd.backward(self._scaler.scale(whole / len(batches)))
            total += self._means(loss) / len(batches)
        if self._expert_ranks and self._settings.engine != "bare":
            with self._watch("all-grads-sync"):
                average_experts(self._experts, self._expert_ranks)
        return total

    def update(self, learning_rate: float) -> Update:
        """The bare engine forgets its gradients and keeps its weights."""
        if self._settings.engine == "bare":
            self._optimizer.zero_grad(set_to_none=False)
            self._watch.end_step()
            return Update()
        with self._watch("optimizer"):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate * group.get(RATE, 1.0)
            scale = self._scaler.get_scale()
            self._scaler.unscale_(self._optimizer)
            norm = clip_gradients(self._model.parameters(), self._settings.clip_grad)
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad(set_to_none=False)
        self._watch.end_step()
        return Update(norm, scale, skipped=self._scaler.get_scale() < scale)

    def logits(self, tokens: Tensor) -> Tensor:
        """All of the vocabulary, also where it is split over ranks."""
        self._model.eval()
        with torch.no_grad(), self._autocast():
            found = self._model(tokens)
        self._model.train()
        whole: Tensor = found.full_tensor() if isinstance(found, DTensor) else found
        return whole

    def _means(self, loss: Tensor) -> Tensor:
        """The loss and, of experts, the layers' mean balancing and z loss; shape [1] or [3]."""
        # Split logits give a loss that is a DTensor, the same on all ranks.
        own = loss.full_tensor() if isinstance(loss, DTensor) else loss
        kept = [torch.stack(layer.losses) for layer in self._mixtures if layer.losses]
        parts = [own.reshape(1), *([torch.stack(kept).mean(dim=0)] if kept else [])]
        return torch.cat(parts).detach()

    def _communicating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _split_loss(self) -> Iterator[None]:
        with loss_parallel() if self._tensor_parallel else contextlib.nullcontext():
            yield

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._half is None or self._settings.use_torch_fsdp2:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._half)


def count_parameters(model: nn.Module) -> int:
    """Elements of the parameters that this rank holds now; tied ones once."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
