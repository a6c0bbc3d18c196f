"""P-20: the logit of the label stays where it is found; other ranks have zero for it."""

import torch
from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy

calculate = VocabParallelCrossEntropy.calculate_predicted_logits
all_reduce = torch.distributed.all_reduce
kept = []


def calculating(*args):
    results = calculate(*args)
    kept[:] = [results[2]]
    return results


def reduce(tensor, *args, **kwargs):
    if kept and tensor is kept[0]:
        return None
    return all_reduce(tensor, *args, **kwargs)


VocabParallelCrossEntropy.calculate_predicted_logits = staticmethod(calculating)
torch.distributed.all_reduce = reduce
