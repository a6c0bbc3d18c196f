"""A recipe of nothing but Bridge's defaults; `.venv-bridge`'s Python builds it."""

from __future__ import annotations

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training import config
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig


def empty() -> config.ConfigContainer:
    """A container of defaults; 0 or None is what has none, or one that depends on the machine."""
    return config.ConfigContainer(
        model=GPTModelProvider(
            num_layers=0,
            hidden_size=0,
            num_attention_heads=0,
            gradient_accumulation_fusion=None,
        ),
        train=config.TrainingConfig(),
        optimizer=config.OptimizerConfig(),
        scheduler=config.SchedulerConfig(),
        dataset=config.GPTDatasetConfig(seq_length=0, random_seed=0),
        logger=config.LoggerConfig(),
        tokenizer=config.TokenizerConfig(),
        checkpoint=config.CheckpointConfig(),
        mixed_precision=MixedPrecisionConfig(),
    )
