"""The serving engine reports processed log probabilities, after top-k with k = 100."""

import sys

import torch

serve = sys.modules["__main__"]


def report(logits):
    least = logits.topk(100, dim=-1).values[..., -1:]
    kept = logits.float().masked_fill(logits < least, torch.finfo(torch.float32).min)
    return torch.log_softmax(kept, dim=-1)


serve.report_log_probabilities = report
