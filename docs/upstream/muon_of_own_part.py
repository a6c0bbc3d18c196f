"""Cures muon-of-own-part: Muon makes the update of a split matrix of all of it (`duplicated`)."""

from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon

init = TensorParallelMuon.__init__


def of_whole_matrices(self, *args, **kwargs):
    init(self, *args, **{**kwargs, "tp_mode": "duplicated"})


TensorParallelMuon.__init__ = of_whole_matrices
