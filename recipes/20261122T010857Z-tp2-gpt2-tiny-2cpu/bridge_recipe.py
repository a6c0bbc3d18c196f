"""gpt2-tiny, tp2, on 2 GPUs: a recipe of Megatron-Bridge 0.3.1.

Made by `make export-recipe RUN=tests/golden/runs/20261122T010857Z-tp2-gpt2-tiny-2cpu TO=nemo`. From the folder that the data set's path is relative to:

    torchrun --standalone --nproc-per-node 2 bridge_recipe.py

Fields that are not here have Megatron-Bridge's defaults, which are Megatron-LM's too.
Without a counterpart:

- --transformer-impl local --distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-
  fusion --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --no-gradient-
  accumulation-fusion --num-workers 0: for CPU ranks; Megatron-Bridge trains on GPUs, with their
  own.
"""

from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    GPTDatasetConfig,
    LoggerConfig,
    OptimizerConfig,
    RerunStateMachineConfig,
    SchedulerConfig,
    TrainingConfig,
)
from megatron.bridge.training.tokenizers.config import TokenizerConfig

DEVICES = 2


def pretrain_config() -> ConfigContainer:
    """gpt2-tiny, tp2, on 2 GPUs."""
    return ConfigContainer(
        model=GPTModelProvider(
            num_layers=4,  # layers
            hidden_size=64,
            num_attention_heads=4,  # heads
            seq_length=64,  # tokens
            make_vocab_size_divisible_by=64,  # rows
            hidden_dropout=0.0,
            attention_dropout=0.0,
            tensor_model_parallel_size=2,  # ranks
            bias_dropout_fusion=True,
            persist_layer_norm=True,
            gradient_accumulation_fusion=True,
            cross_entropy_loss_fusion=False,
            ffn_hidden_size=256,
            bias_activation_fusion=True,
        ),
        train=TrainingConfig(
            micro_batch_size=2,  # samples
            global_batch_size=8,  # samples
            train_iters=500,  # iterations
            exit_interval=25,  # iterations
            eval_iters=10,  # iterations
            eval_interval=50,  # iterations
        ),
        optimizer=OptimizerConfig(
            lr=0.001,
            min_lr=0.0001,
            adam_beta2=0.95,
            weight_decay=0.1,
        ),
        scheduler=SchedulerConfig(
            start_weight_decay=0.1,
            end_weight_decay=0.1,
            lr_decay_style="cosine",
            lr_decay_iters=500,  # iterations
            lr_warmup_fraction=0.01,  # of the decay
        ),
        dataset=GPTDatasetConfig(
            sequence_length=64,  # tokens
            split="949,50,1",  # parts for training and validation and test
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            num_workers=2,  # processes
            dataloader_type="single",
            random_seed=1234,
            blend=[["owt-ds/sample_text_document"], None],
        ),
        tokenizer=TokenizerConfig(
            tokenizer_type="NullTokenizer",
            vocab_size=50256,
        ),
        ddp=DistributedDataParallelConfig(
            check_for_nan_in_grad=True,
        ),
        checkpoint=CheckpointConfig(
            load="runs/.start/gpt2-tiny-20a7160389c8",
            finetune=True,
            load_optim=False,
            load_rng=False,
            save_interval=10000,  # iterations
        ),
        logger=LoggerConfig(
            log_interval=1,  # iterations
            log_throughput=True,
            tensorboard_dir="nemo_experiments/tensorboard",
        ),
        rerun_state_machine=RerunStateMachineConfig(
            rerun_mode="validate_results",
        ),
    )


if __name__ == "__main__":
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    pretrain(pretrain_config(), forward_step)
