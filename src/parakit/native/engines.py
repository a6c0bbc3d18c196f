"""One iteration: forward and backward of every micro batch, then the update; by PyTorch or DeepSpeed.

`TorchEngine` has DDP, FSDP2, tensor and expert parallelism; `DeepSpeedEngine` has ZeRO's stages
(`--engine deepspeed --zero-stage {0,1,2,3}`). Both report the parts of an iteration to the kit's ledger
under the names of Megatron's timers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from parakit.accounting import Recorder
from parakit.capturing import local_tensor
from parakit.native.batches import MicroBatch
from parakit.native.model import GPT, find_expert_layers, mean_loss
from parakit.native.optimizer import RATE_FRACTION, build_adamw, clip_gradients, muon_adamw
from parakit.native.parallel import (
    RankLayout,
    average_experts,
    keep_local_experts,
    make_expert_groups,
    parallelise,
)
from parakit.native.settings import Settings

_DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default, which it allocates whatever the model's size."""


@dataclass(frozen=True)
class Update:
    """Values of an optimizer step for the log."""

    gradient_norm: float | None = None
    loss_scale: float = 1.0
    skipped: bool = False


class Engine(Protocol):
    """What the training loop needs."""

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate gradients; return means over this rank's micro batches (`training.NAMES`)."""

    def update(self, learning_rate: float) -> Update:
        """Clip, step, and clear the gradients."""

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] to [batch, sequence, vocabulary], whole, without gradients or dropout."""


def install_recorder() -> Recorder:
    """The process's ledger, if it has one, which counts from now on."""
    recorder = Recorder.from_environment()
    recorder.install()
    return recorder


class TorchEngine:
    """DDP, FSDP2, tensor or expert parallelism with PyTorch's AdamW or Muon."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: RankLayout) -> None:
        self._settings, self._ledger = settings, install_recorder()
        self._tensor_parallel = ranks.tensor_size > 1
        self._half = torch.bfloat16 if settings.bf16 else torch.float16 if settings.fp16 else None
        self._device = ranks.device.type
        self._mixtures = find_expert_layers(model)
        size = settings.expert_model_parallel_size
        self._expert_ranks = make_expert_groups(size) if size > 1 else None
        self._experts = keep_local_experts(model, self._expert_ranks) if self._expert_ranks else []
        self._model = parallelise(model, settings, ranks)
        self.optimizer: torch.optim.Optimizer = (
            muon_adamw(self._model, settings)
            if settings.optimizer == "muon"
            else build_adamw(self._model.parameters(), settings)
        )
        if ranks.device.type == "cuda" and not self._mixtures:
            # Not with experts: their numbers of tokens change, and each would be compiled anew.
            self._model.compile()
        # Megatron's dynamic loss scale: starts at 2^32, doubles after 1000 good steps.
        self._scaler = torch.amp.GradScaler(
            self._device, init_scale=2.0**32, growth_interval=1000, enabled=settings.fp16
        )

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Gradients are communicated with the last micro batch where the wrapper can wait for it."""
        self._ledger.begin_iteration([self._model], self.optimizer)
        total = torch.zeros(3 if self._mixtures else 1, device=batches[0][0].device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            split_loss = loss_parallel() if self._tensor_parallel else contextlib.nullcontext()
            with self._communicating(number == len(batches)), split_loss:
                with self._ledger.span("forward-compute"), self._autocast():
                    loss = mean_loss(self._model(tokens), labels)
                    whole = sum((layer.auxiliary_loss() for layer in self._mixtures), loss)
                with self._ledger.span("backward-compute"):
                    torch.autograd.backward(self._scaler.scale(whole / len(batches)))
            total += self._means(loss) / len(batches)
        if self._expert_ranks and self._settings.engine != "bare":
            with self._ledger.span("all-grads-sync"):
                average_experts(self._experts, self._expert_ranks)
        return total

    def update(self, learning_rate: float) -> Update:
        """Clip and step; the bare engine clears its gradients and keeps its weights."""
        if self._settings.engine == "bare":
            self.optimizer.zero_grad(set_to_none=False)
            self._ledger.end_step()
            return Update()
        with self._ledger.span("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate * group.get(RATE_FRACTION, 1.0)
            scale = self._scaler.get_scale()
            self._scaler.unscale_(self.optimizer)
            norm = clip_gradients(self._model.parameters(), self._settings.clip_grad)
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=False)
        self._ledger.end_step()
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
        """The loss and, with experts, the layers' mean balancing and z loss; shape [1] or [3]."""
        # Split logits give a loss that is a DTensor, the same on all ranks.
        own = loss.full_tensor() if isinstance(loss, DTensor) else loss
        kept = [torch.stack(layer.losses) for layer in self._mixtures if layer.losses]
        parts = [own.reshape(1), *([torch.stack(kept).mean(dim=0)] if kept else [])]
        return torch.cat(parts).detach()

    def _communicating(self, last: bool) -> contextlib.AbstractContextManager[None]:
        if isinstance(self._model, DistributedDataParallel) and not last:
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._half is None or self._settings.use_torch_fsdp2:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._half)


def count_parameters(model: nn.Module) -> int:
    """Elements of the parameters that this rank holds now; tied ones once."""
    return sum(local_tensor(parameter).numel() for parameter in model.parameters())


class DeepSpeedEngine:
    """DeepSpeed wraps model and optimizer, accumulates, clips, and communicates as its stage does."""

    def __init__(self, model: GPT, settings: Settings, ranks: RankLayout) -> None:
        self._ledger = install_recorder()
        # Stage 0 in fp32 clips with torch's fp32 norm, which is off for a large embedding (see
        # megatron_patches/cpu/gradient_norm.py): this engine clips itself, before DeepSpeed's update.
        self._clips = settings.zero_stage == 0 and not (settings.fp16 or settings.bf16)
        self._settings = settings
        import deepspeed  # type: ignore[import-not-found]  # Optional.

        micro_batches = settings.global_batch_size // (settings.micro_batch_size * ranks.data_size)
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=build_adamw(model.parameters(), settings),
            config=_deepspeed_configuration(
                settings, micro_batches, count_parameters(model), own_clipping=self._clips
            ),
            dist_init_required=False,
        )[0]

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """DeepSpeed divides by the number of micro batches itself."""
        self._ledger.begin_iteration([self._engine.module], self._engine.optimizer)
        total = torch.zeros(1, device=batches[0][0].device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            with self._ledger.span("forward-compute"):
                loss = mean_loss(self._engine(tokens), labels)
            with self._ledger.span("backward-compute"):
                self._engine.backward(loss)
            total += loss.detach() / len(batches)
            if number < len(batches):
                self._engine.step()  # Counts the micro batch; only the last one updates.
        return total

    def update(self, learning_rate: float) -> Update:
        """The step of the last micro batch, which is the update."""
        with self._ledger.span("optimizer"):
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate
            skipped_before = self._engine.skipped_steps
            norm = None
            if self._clips:
                norm = clip_gradients(self._engine.module.parameters(), self._settings.clip_grad)
            self._engine.step()
        self._ledger.end_step()
        scale = float(getattr(self._engine.optimizer, "loss_scale", 1.0))
        norm = norm if self._clips else self._engine.get_global_grad_norm()
        skipped = self._engine.skipped_steps > skipped_before
        return Update(None if norm is None else float(norm), scale, skipped)

    def logits(self, tokens: Tensor) -> Tensor:
        """DeepSpeed gathers what its stage shards."""
        self._engine.eval()
        with torch.no_grad():
            found: Tensor = self._engine(tokens)
        self._engine.train()
        return found


def _deepspeed_configuration(
    settings: Settings, micro_batches: int, parameters: int, *, own_clipping: bool
) -> dict[str, Any]:
    """DeepSpeed's configuration for Megatron's flags; no bucket is larger than the model."""
    bucket = min(_DEEPSPEED_BUCKET_ELEMENTS, parameters)
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0 if own_clipping else settings.clip_grad,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        # The optimizer is PyTorch's AdamW, the same as under the other engines.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": settings.fp16, "initial_scale_power": 32, "loss_scale_window": 1000},
        "bf16": {"enabled": settings.bf16},
    }
