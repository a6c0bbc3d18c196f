"""The same iteration under DeepSpeed's ZeRO: `--engine deepspeed --zero-stage {0,1,2,3}`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import deepspeed  # type: ignore[import-not-found]
import torch
from torch import Tensor

from examples.native.batches import MicroBatch
from examples.native.engines import Update, count_parameters
from examples.native.model import GPT, mean_loss
from examples.native.optimizer import adamw, clip_gradients
from examples.native.parallel import Ranks
from examples.native.settings import Settings
from examples.native.watch import Watch

DEFAULT_BUCKET = 500_000_000


class DeepSpeedEngine:
    """DeepSpeed wraps model and optimizer, accumulates, clips, and communicates as its stage does."""

    def __init__(self, model: GPT, settings: Settings, ranks: Ranks, watch: Watch) -> None:
        self._watch = watch
        # Stage 0 in fp32 clips with torch's fp32 norm, which is off for a large embedding (see
        # megatron_patches/gradient_norm.py): here the engines' own clips, before DeepSpeed's update.
        self._clips = settings.zero_stage == 0 and not (settings.fp16 or settings.bf16)
        self._settings = settings
        os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)
        micro_batches = settings.global_batch_size // (settings.micro_batch_size * ranks.data_size)
        self._engine: Any = deepspeed.initialize(
            model=model,
            optimizer=adamw(model, settings),
            config=configuration(settings, micro_batches, count_parameters(model), self._clips),
            dist_init_required=False,
        )[0]

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """DeepSpeed divides by the number of micro batches itself."""
        self._watch.begin_iteration(self._engine.module, self._engine.optimizer)
        total = torch.zeros(1, device=batches[0][0].device)
        for number, (tokens, labels) in enumerate(batches, start=1):
            with self._watch("forward-compute"):
                loss = mean_loss(self._engine(tokens), labels)
            with self._watch("backward-compute"):
                self._engine.backward(loss)
            total += loss.detach() / len(batches)
            if number < len(batches):
                self._engine.step()  # Counts the micro batch; only the last one updates.
        return total

    def update(self, learning_rate: float) -> Update:
        """The step of the last micro batch, which is the update."""
        with self._watch("optimizer"):
            for group in self._engine.optimizer.param_groups:
                group["lr"] = learning_rate
            skipped_before = self._engine.skipped_steps
            norm = self._clip() if self._clips else None
            self._engine.step()
        self._watch.end_step()
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

    def _clip(self) -> float:
        return clip_gradients(self._engine.module.parameters(), self._settings.clip_grad)


def configuration(
    settings: Settings, micro_batches: int, parameters: int, own_clipping: bool
) -> dict[str, Any]:
    """DeepSpeed's configuration for Megatron's flags.

    Its buckets default to 500M elements, allocated whatever the model's size; none is larger than the
    model here.
    """
    bucket = min(DEFAULT_BUCKET, parameters)
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
