"""Run one iteration with PyTorch or DeepSpeed: forward and backward of all micro batches, then the update.

`TorchEngine` implements DDP, FSDP2, tensor and expert parallelism. `DeepSpeedEngine` implements ZeRO (`--engine
deepspeed --zero-stage {0,1,2,3}`). Both report the spans of an iteration to the kit's recorder
(`parakit.accounting`) under the names of Megatron's timers.
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
    ExpertGroups,
    RankLayout,
    average_experts,
    half_precision_dtype,
    keep_local_experts,
    make_expert_groups,
    parallelise,
)
from parakit.native.settings import Settings

_DEEPSPEED_BUCKET_ELEMENTS = 500_000_000
"""DeepSpeed's default size of its buckets, which it allocates in full even for a small model."""


@dataclass(frozen=True)
class Update:
    """The values of an optimizer step that the log prints."""

    gradient_norm: float | None = None
    """Norm before clipping; None if the engine does not compute it."""
    loss_scale: float = 1.0
    """Scale of the losses in fp16; 1 in other precisions."""
    skipped: bool = False
    """True if the gradients had overflowed in fp16, so that the weights did not change."""


class Engine(Protocol):
    """Interface between the training loop and a backend."""

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate the gradients of all micro batches, and return the mean losses over them.

        The losses are those of `training.LOSS_NAMES`: one of a dense model, three of a mixture of experts.
        """

    def update(self, learning_rate: float) -> Update:
        """Clip the gradients, run the optimizer's step, and clear the gradients."""

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, sequence, full vocabulary] for token ids [batch, sequence].

        The model runs without gradients and without dropout.
        """


def install_recorder() -> Recorder:
    """Make the recorder that the environment requests, let it begin to count, and return it.

    If the environment requests none, the recorder does nothing.
    """
    recorder = Recorder.create_from_environment()
    recorder.install()
    return recorder


class TorchEngine:
    """Engine with DDP, FSDP2, tensor or expert parallelism and PyTorch's AdamW or Muon."""

    def __init__(self, model: nn.Module, settings: Settings, ranks: RankLayout) -> None:
        """Parallelise the model, which must already have its weights, and build the optimizer."""
        self._settings, self._recorder = settings, install_recorder()
        self._is_tensor_parallel = ranks.tensor_size > 1
        self._half_precision = half_precision_dtype(settings)
        self._device = ranks.device.type
        self._expert_layers = find_expert_layers(model)
        self._expert_groups: ExpertGroups | None = None
        self._expert_parameters: list[nn.Parameter] = []
        if settings.expert_model_parallel_size > 1:
            self._expert_groups = make_expert_groups(settings.expert_model_parallel_size)
            self._expert_parameters = keep_local_experts(model, self._expert_groups)
        self._model = parallelise(model, settings, ranks)
        self.optimizer: torch.optim.Optimizer
        if settings.optimizer == "muon":
            self.optimizer = muon_adamw(self._model, settings)
        else:
            self.optimizer = build_adamw(self._model.parameters(), settings)
        # The number of tokens per expert changes with every batch, and each number would be compiled anew.
        if ranks.device.type == "cuda" and not self._expert_layers:
            self._model.compile()
        # Megatron's dynamic loss scale starts at 2^32 and doubles after 1000 steps without an overflow.
        self._scaler = torch.amp.GradScaler(
            self._device, init_scale=2.0**32, growth_interval=1000, enabled=settings.fp16
        )

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate the gradients of all micro batches, and return the losses, averaged over the micro batches.

        The result has the shape [1], or [3] with experts: then the load balancing loss and the z loss follow.
        DDP averages the gradients over ranks during the last micro batch. Gradients of experts are averaged
        afterwards. The engine `bare` averages no gradients.
        """
        self._recorder.begin_iteration([self._model], self.optimizer)
        num_losses = 3 if self._expert_layers else 1
        first_tokens, _ = batches[0]
        means = torch.zeros(num_losses, device=first_tokens.device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            is_last = number == len(batches)
            split_loss = loss_parallel() if self._is_tensor_parallel else contextlib.nullcontext()
            with self._sync_gradients_if(is_last), split_loss:
                with self._recorder.span("forward-compute"), self._autocast():
                    loss = mean_loss(self._model(tokens), labels)
                    total_loss = loss
                    for layer in self._expert_layers:
                        total_loss = total_loss + layer.auxiliary_loss()
                with self._recorder.span("backward-compute"):
                    torch.autograd.backward(self._scaler.scale(total_loss / len(batches)))
            means += self._collect_losses(loss) / len(batches)
        if self._expert_groups and self._settings.engine != "bare":
            with self._recorder.span("all-grads-sync"):
                average_experts(self._expert_parameters, self._expert_groups)
        return means

    def update(self, learning_rate: float) -> Update:
        """Clip the gradients, run the optimizer's step, and clear the gradients.

        The engine `bare` clears the gradients and changes no weight.
        """
        if self._settings.engine == "bare":
            self.optimizer.zero_grad(set_to_none=False)
            self._recorder.end_step()
            return Update()
        with self._recorder.span("optimizer"):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate * group.get(RATE_FRACTION, 1.0)
            scale = self._scaler.get_scale()
            self._scaler.unscale_(self.optimizer)
            norm = clip_gradients(self._model.parameters(), self._settings.clip_grad)
            self._scaler.step(self.optimizer)
            self._scaler.update()
            self.optimizer.zero_grad(set_to_none=False)
        self._recorder.end_step()
        # The scaler lowers the scale exactly when it has skipped the step.
        return Update(norm, scale, skipped=self._scaler.get_scale() < scale)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, sequence, full vocabulary]. If tensor parallelism splits the vocabulary, the
        parts are gathered.
        """
        self._model.eval()
        with torch.no_grad(), self._autocast():
            logits = self._model(tokens)
        self._model.train()
        full_logits: Tensor = logits.full_tensor() if isinstance(logits, DTensor) else logits
        return full_logits

    def _collect_losses(self, loss: Tensor) -> Tensor:
        """Return the loss, [1]. With experts, the load balancing loss and the z loss follow, each averaged over
        layers, [3].
        """
        # Under tensor parallelism the loss is a DTensor with the same value on all ranks.
        full_loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses = [full_loss.reshape(1)]
        losses_by_layer = [
            torch.stack(layer.losses) for layer in self._expert_layers if layer.losses
        ]
        if losses_by_layer:
            losses.append(torch.stack(losses_by_layer).mean(dim=0))
        return torch.cat(losses).detach()

    def _sync_gradients_if(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which DDP averages gradients only if this is the last micro batch."""
        if isinstance(self._model, DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for products in 16 bits; FSDP2 and fp32 need none."""
        if self._half_precision is None or self._settings.use_torch_fsdp2:
            return contextlib.nullcontext()
        return torch.autocast(self._device, self._half_precision)


def count_parameters(model: nn.Module) -> int:
    """Return the number of parameter elements that this rank holds now; tied parameters count once."""
    return sum(local_tensor(parameter).numel() for parameter in model.parameters())


class DeepSpeedEngine:
    """Engine in which DeepSpeed accumulates, communicates and clips gradients, and updates weights by its
    ZeRO stage.
    """

    def __init__(self, model: GPT, settings: Settings, ranks: RankLayout) -> None:
        """Let DeepSpeed wrap an AdamW and the model, which must already have its weights."""
        self._recorder = install_recorder()
        # In stage 0 and fp32, DeepSpeed clips by torch's fp32 norm, which is inexact for a large embedding
        # (see megatron_patches/cpu/gradient_norm.py). There this engine clips itself, before the update.
        self._clips = settings.zero_stage == 0 and not (settings.fp16 or settings.bf16)
        self._settings = settings
        import deepspeed  # type: ignore[import-not-found]  # Optional.

        micro_batches = settings.global_batch_size // (settings.micro_batch_size * ranks.data_size)
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=build_adamw(model.parameters(), settings),
            config=_deepspeed_configuration(
                settings,
                micro_batches,
                num_parameters=count_parameters(model),
                own_clipping=self._clips,
            ),
            dist_init_required=False,
        )[0]

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Accumulate the gradients of all micro batches, and return the loss, averaged over the micro batches, [1].

        Before backward, the loss is not divided by the number of micro batches, because DeepSpeed divides the
        gradients.
        """
        self._recorder.begin_iteration([self._engine.module], self._engine.optimizer)
        total = torch.zeros(1, device=batches[0][0].device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            with self._recorder.span("forward-compute"):
                loss = mean_loss(self._engine(tokens), labels)
            with self._recorder.span("backward-compute"):
                self._engine.backward(loss)
            total += loss.detach() / len(batches)
            # DeepSpeed counts micro batches by the calls of `step`, and updates at the last call. `update`
            # makes that call.
            if number < len(batches):
                self._engine.step()
        return total

    def update(self, learning_rate: float) -> Update:
        """Call DeepSpeed's `step` for the last micro batch, which updates the weights."""
        skipped_before = self._engine.skipped_steps
        norm: float | None = None
        with self._recorder.span("optimizer"):
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate
            if self._clips:
                norm = clip_gradients(self._engine.module.parameters(), self._settings.clip_grad)
            self._engine.step()
        self._recorder.end_step()
        if not self._clips:
            norm = self._engine.get_global_grad_norm()
        scale = float(getattr(self._engine.optimizer, "loss_scale", 1.0))
        is_skipped = self._engine.skipped_steps > skipped_before
        return Update(None if norm is None else float(norm), scale, skipped=is_skipped)

    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, sequence, full vocabulary]; DeepSpeed gathers sharded parameters."""
        self._engine.eval()
        with torch.no_grad():
            logits: Tensor = self._engine(tokens)
        self._engine.train()
        return logits


def _deepspeed_configuration(
    settings: Settings, micro_batches: int, *, num_parameters: int, own_clipping: bool
) -> dict[str, Any]:
    """Return the DeepSpeed configuration that corresponds to Megatron's flags.

    Args:
        settings: The run's settings.
        micro_batches: Micro batches per rank and iteration.
        num_parameters: Parameters of the model; no bucket is made larger than the model.
        own_clipping: True if the engine clips gradients itself. DeepSpeed then does not clip them.
    """
    bucket = min(_DEEPSPEED_BUCKET_ELEMENTS, num_parameters)
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0 if own_clipping else settings.clip_grad,
        "zero_optimization": {
            "stage": settings.zero_stage,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
        # The optimizer is PyTorch's AdamW, as under the other engines. DeepSpeed has its own and refuses
        # others without these two settings.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "fp16": {"enabled": settings.fp16, "initial_scale_power": 32, "loss_scale_window": 1000},
        "bf16": {"enabled": settings.bf16},
    }
