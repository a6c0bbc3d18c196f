"""P-23: every data-parallel rank reads the samples of rank 0."""

from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

original = MegatronPretrainingSampler.__init__


def init(self, *args, **kwargs):
    original(self, *args, **kwargs)
    self.data_parallel_rank = 0


MegatronPretrainingSampler.__init__ = init
