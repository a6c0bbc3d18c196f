"""A finished `.bin/.idx` pair: its format, its manifest, and what can be said of it without torch.

Takes a path without suffix, such as `owt-ds/sample_text_document`, and gives descriptions, checks and
statistics. Whoever trains on data sets imports from here; the rest of the package builds on it.
"""

from tools.preprocess.dataset.files import (
    Dataset,
    bin_path,
    idx_path,
    largest_token,
    open_dataset,
    strip_suffix,
)
from tools.preprocess.dataset.split import Part, split_documents
from tools.preprocess.errors import DatasetError

__all__ = [
    "Dataset",
    "DatasetError",
    "Part",
    "bin_path",
    "idx_path",
    "largest_token",
    "open_dataset",
    "split_documents",
    "strip_suffix",
]
