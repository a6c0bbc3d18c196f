"""Data sets as `tools.preprocess` makes them, and Megatron's own builder as the reference."""

from tests.preprocess.conftest import (  # noqa: F401
    gpt2,
    hugging_face_gpt2,
    indexed_dataset,
    read_pair,
    reference,
    tool,
    write_lines,
)
