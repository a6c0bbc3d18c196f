"""The serving engine gets each document alone, where the trainer packs documents without a mask between them."""

import sys

import torch

serve = sys.modules["__main__"]
END_OF_DOCUMENT = 1023
"""Last token of the documents of the small sample data set."""


def score_whole(model, sequences):
    is_end = sequences == END_OF_DOCUMENT
    document = is_end.cumsum(1) - is_end.long()
    is_same = document[:, None, :, None] == document[:, None, None, :]
    length = sequences.shape[1]
    is_seen = is_same & torch.ones(length, length).tril().bool()
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    logits = model(input_ids=sequences, attention_mask=mask, use_cache=False).logits[:, :-1]
    return serve._gather(serve.report_log_probabilities(logits), sequences[:, 1:])


def score_generated(model, sequences, prompt_tokens):
    return score_whole(model, sequences)[:, prompt_tokens - 1 :]


serve.score_whole, serve.score_generated = score_whole, score_generated
