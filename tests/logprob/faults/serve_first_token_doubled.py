"""The serving engine has the first token of each sequence twice."""

import sys

import torch

serve = sys.modules["__main__"]
whole, generated = serve.score_whole, serve.score_generated


def double(sequences):
    return torch.cat((sequences[:, :1], sequences[:, :-1]), dim=1)


def score_whole(model, sequences):
    scores = whole(model, double(sequences))
    return torch.cat((scores[:, 1:], scores[:, -1:]), dim=1)


def score_generated(model, sequences, prompt_tokens):
    scores = generated(model, double(sequences), prompt_tokens + 1)
    return torch.cat((scores, scores[:, -1:]), dim=1)


serve.score_whole, serve.score_generated = score_whole, score_generated
