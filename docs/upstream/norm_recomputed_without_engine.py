"""Cures norm-recomputed-without-engine: a checkpoint that is not told of fp8 is in full precision."""

from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

build = CheckpointWithoutOutput.__init__


def in_full_precision(self, fp8=None):
    build(self, fp8 or None)


CheckpointWithoutOutput.__init__ = in_full_precision
