"""gpt2-large, tp2, on 2 GPUs: a recipe of Megatron-Bridge 0.3.1.

Made by `make export-recipe RUN=train-tp2-gpt2-large-2gpu TO=nemo`.
Trains where its data set's path begins, in an image with Megatron-Bridge:

    torchrun --standalone --nproc-per-node 2 recipes/train-tp2-gpt2-large-2gpu/bridge_recipe.py

Fields that are not here have Megatron-Bridge's defaults, which are Megatron-LM's too.
"""

import torch

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    RerunStateMachineConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.tokenizers.config import TokenizerConfig

DEVICES = 2


def pretrain_config() -> ConfigContainer:
    """gpt2-large, tp2, on 2 GPUs."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=36,
            hidden_size=1280,
            num_attention_heads=16,
            seq_length=1024,  # tokens
            init_method_std=0.006,
            hidden_dropout=0.1,
            attention_dropout=0.1,
            tensor_model_parallel_size=2,  # ranks
            pipeline_model_parallel_size=1,  # stages
            context_parallel_size=1,  # ranks
            bias_dropout_fusion=True,
            persist_layer_norm=True,
            gradient_accumulation_fusion=True,
            cross_entropy_loss_fusion=False,
            ffn_hidden_size=5120,
            bias_activation_fusion=True,
        ),
        train=TrainingConfig(
            micro_batch_size=64,  # samples
            global_batch_size=64,  # samples
            train_iters=500000,
            exit_interval=100,  # iterations
            eval_iters=10,
            eval_interval=50,  # iterations
        ),
        optimizer=OptimizerConfig(
            lr=6e-05,
            min_lr=6e-06,
            adam_beta2=0.95,
            weight_decay=0.1,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            lr_decay_style="cosine",
            lr_decay_iters=430000,
            lr_warmup_fraction=0.001,  # of the decay
        ),
        dataset=GPTDatasetConfig(
            sequence_length=1024,  # tokens
            split="949,50,1",  # parts for training and validation and test
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=2,  # processes
            dataloader_type="single",
            random_seed=1234,
            blend=[["owt-ds/openwebtext-10k_text_document"], None],
        ),
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer",
            vocab_size=50256,
        ),
        mixed_precision=MixedPrecisionConfig(
            fp16=True,
            params_dtype=torch.float16,
            pipeline_dtype=torch.float16,
            grad_reduce_in_fp32=False,
        ),
        checkpoint=CheckpointConfig(
            save_interval=10000,  # iterations
        ),
        logger=LoggerConfig(
            log_interval=1,  # iterations
            log_throughput=True,
            tensorboard_dir="nemo_experiments/tensorboard",
        ),
        rng=RNGConfig(
            seed=1234,
        ),
        rerun_state_machine=RerunStateMachineConfig(
            check_for_nan_in_loss=False,
            rerun_mode="validate_results",
        ),
    )


if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(pretrain_config(), forward_step)
