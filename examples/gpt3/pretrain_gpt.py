"""Train a GPT with Megatron from the PyPI wheel `megatron-core`, which brings no `pretrain_gpt.py`.

The training itself is `megatron.training.pretrain`; this entry only builds the model, the data sets
and one forward step. Flags, losses and checkpoints are those of the `pretrain_gpt.py`
of Megatron-LM core_v0.19.0, for dense and mixture-of-experts GPT models. What it does not cover it
refuses by name; a checkout (`MEGATRON_LM=…`) covers everything.
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain, print_rank_0
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

WRITTEN_FOR = "0.19."

NOT_COVERED = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "logits_load_dir",
    "overlap_moe_expert_parallel_comm",
    "heterogeneous_layers_config_path",
    "experimental_attention_variant",
    "check_for_spiky_loss",
    "per_dataset_sequences_path",
    "record_memory_history",
    "yaml_cfg",
)
"""Options that change the data, the loss or the model in ways this entry does not implement."""

BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
PACKED_KEYS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
"""Further keys of a batch whose sequences are packed from documents (`--dataloader-inter-document-masking`)."""


def refuse_what_is_not_covered(args: Namespace) -> None:
    """Exit with a message if this entry cannot train what was asked for; return nothing otherwise.

    It refuses another version of megatron-core than the one it was written for, and the first option of
    NOT_COVERED that is set, because only Megatron-LM's `pretrain_gpt.py` supports these options.
    """
    version = importlib.metadata.version("megatron-core")
    if not version.startswith(WRITTEN_FOR):
        sys.exit(
            f"This entry is written for megatron-core {WRITTEN_FOR}x, but {version} is installed; "
            "run 'make setup', or set MEGATRON_LM to a checkout."
        )
    for option in NOT_COVERED:
        if getattr(args, option, None):
            sys.exit(
                f"--{option.replace('_', '-')} is not covered by this entry; set MEGATRON_LM to a "
                "Megatron-LM checkout to use its own pretrain_gpt.py."
            )


def read_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None
) -> dict[str, Any]:
    """This rank's part of the next micro batch, tensors of [micro batch, sequence / CP].

    TP rank 0 reads and broadcasts, every CP rank keeps its chunks, and a pipeline stage receives only
    what it uses (the first the tokens, the last the labels, and the tokens if it predicts those ahead).
    If sequences are packed, every stage also receives where documents begin.
    """
    args = get_args()
    is_packed = args.dataloader_inter_document_masking
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tensor_rank == 0:
        assert data_iterator is not None
        sample = next(data_iterator)
        for key in (*BATCH_KEYS, *PACKED_KEYS):
            tensor = sample.get(key)
            batch[key] = None if tensor is None else tensor.cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp_on_this_rank(
            mtp_num_layers=args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
        ),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    local: dict[str, Any] = get_batch_on_this_cp_rank(
        flatten_batch_for_packed_sequences(batch),
        is_hybrid_cp=False,
        cp_group=mpu.get_context_parallel_group(),
        use_per_sequence_balancing=is_packed,
    )
    return local


def packed_parameters(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Return where the documents of a packed micro batch begin; None if sequences are not packed."""
    starts = batch.get("cu_seqlens")
    if starts is None:
        return None
    starts, longest = starts.squeeze(0), int(batch["max_seqlen"].item())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )


def summed_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of the unmasked token losses, their number, and both in the form of Megatron's log."""
    mask = loss_mask.view(-1).float()
    loss = (losses.view(-1).float() * mask).sum()
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for is_bad, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=is_bad,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.cat([loss.detach().view(1), tokens.view(1)])}


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: Any
) -> tuple[torch.Tensor, Any]:
    """One micro batch through this stage: its output, and the loss function for the last stage."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    if is_first_or_last_pipeline_stage(vp_stage) or get_args().dataloader_inter_document_masking:
        batch = read_batch(data_iterator, vp_stage)
    timer.stop()
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=packed_parameters(batch),
    )
    return output, functools.partial(summed_loss, batch["loss_mask"])


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's data-set options from its arguments."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        inter_document_masking=args.dataloader_inter_document_masking,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )


def build_datasets(samples: tuple[int, int, int], vp_stage: int | None = None) -> Any:
    """Return the train, validation and test data set, as Megatron's training loop asks for them.

    Only tensor-parallel rank 0 of the first and the last pipeline stage reads data, and of every stage if
    sequences are packed. All other ranks get None for each data set.

    Args:
        samples: Number of train, validation and test samples.
        vp_stage: Virtual pipeline stage; None without virtual stages.
    """
    args = get_args()
    print_rank_0("> building train, validation, and test datasets for GPT ...")

    def reads_data() -> bool:
        at_an_end: bool = is_first_or_last_pipeline_stage(vp_stage)
        is_read: bool = at_an_end or args.dataloader_inter_document_masking
        return is_read and mpu.get_tensor_model_parallel_rank() == 0

    dataset = MockGPTDataset if args.mock_data else GPTDataset
    built = BlendedMegatronDatasetBuilder(
        dataset, samples, reads_data, dataset_config(args)
    ).build()
    print_rank_0("> finished creating GPT datasets ...")
    return built


# Megatron asks whether every rank helps to build the data sets.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's arguments and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    refuse_what_is_not_covered(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
