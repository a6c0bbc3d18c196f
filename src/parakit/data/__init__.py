"""Finished data sets in Megatron's `.bin/.idx` format: opened, verified, split, measured and merged.

This package decides what a valid data set is; every refusal is a `DatasetError`. It makes none from text, which
`tools.preprocess` does. It loads no torch.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.data.checks import DatasetUse, dataset_problems
    from parakit.data.folder import locked, publish, retire, working_folder
    from parakit.data.indexed import (
        Dataset,
        DatasetError,
        DocumentIndex,
        InputIdentity,
        IntArray,
        RunIdentity,
        ShardHash,
        TokenType,
        bin_path,
        idx_path,
        open_dataset,
        strip_suffix,
        token_dtype,
        write_index,
        write_manifest,
    )
    from parakit.data.inputs import HUB_CACHES, HUB_PREFIX, find_input_files
    from parakit.data.merge import join, merge_datasets
    from parakit.data.split import (
        EVAL_ITERATIONS_FLAG,
        SPLIT_FLAG,
        Split,
        draws,
        epochs_for,
        parts_of,
        samples_of,
        sizes_sentence,
        split_bounds,
        split_documents,
        unusable_parts,
        usable_split_flags,
    )
    from parakit.data.stats import describe_counts, describe_draws, measure_dataset, text_histogram
    from parakit.data.verify import verify_dataset
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "EVAL_ITERATIONS_FLAG",
    "HUB_CACHES",
    "HUB_PREFIX",
    "SPLIT_FLAG",
    "Dataset",
    "DatasetError",
    "DatasetUse",
    "DocumentIndex",
    "InputIdentity",
    "IntArray",
    "RunIdentity",
    "ShardHash",
    "Split",
    "TokenType",
    "bin_path",
    "dataset_problems",
    "describe_counts",
    "describe_draws",
    "draws",
    "epochs_for",
    "find_input_files",
    "idx_path",
    "join",
    "locked",
    "measure_dataset",
    "merge_datasets",
    "open_dataset",
    "parts_of",
    "publish",
    "retire",
    "samples_of",
    "sizes_sentence",
    "split_bounds",
    "split_documents",
    "strip_suffix",
    "text_histogram",
    "token_dtype",
    "unusable_parts",
    "usable_split_flags",
    "verify_dataset",
    "working_folder",
    "write_index",
    "write_manifest",
]
