"""Open, verify, split, measure and merge finished data sets in Megatron's `.bin/.idx` format.

This package decides which data sets are valid, and raises `DatasetError` for all others. Data sets are made from
text by `tools.preprocess`. This package imports no torch.
"""

from typing import TYPE_CHECKING

from parakit.lazy import lazy_names

if TYPE_CHECKING:
    from parakit.data.checks import DatasetUse, dataset_problems
    from parakit.data.folder import lock_folder, publish, retire, working_folder
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
    from parakit.data.inputs import (
        HUB_CACHES,
        HUB_PREFIX,
        find_default_hub_cache,
        find_input_files,
    )
    from parakit.data.merge import join_datasets, merge_datasets
    from parakit.data.split import (
        EVAL_ITERATIONS_FLAG,
        SPLIT_FLAG,
        Split,
        count_draws,
        count_epochs,
        count_samples,
        divide_into_parts,
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
    "count_draws",
    "count_epochs",
    "count_samples",
    "dataset_problems",
    "describe_counts",
    "describe_draws",
    "divide_into_parts",
    "find_default_hub_cache",
    "find_input_files",
    "idx_path",
    "join_datasets",
    "lock_folder",
    "measure_dataset",
    "merge_datasets",
    "open_dataset",
    "publish",
    "retire",
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
