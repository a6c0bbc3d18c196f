"""The serving engine reports the log probability of the token one position later."""

import sys

import torch

serve = sys.modules["__main__"]


def gather(log_probabilities, targets):
    shifted = torch.cat((targets[:, 1:], targets[:, :1]), dim=1)
    return log_probabilities.gather(2, shifted.unsqueeze(2)).squeeze(2)


serve._gather = gather
