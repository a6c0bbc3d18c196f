"""Flags of a model small enough to build in a test."""

import shlex

from parakit.native.settings import Settings, parse_settings

REQUIRED = shlex.split(
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 "
    "--max-position-embeddings 8 --vocab-size 100 --micro-batch-size 1 --global-batch-size 2 "
    "--train-iters 100 --exit-interval 3 --seed 1 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-decay-iters 100 --lr-warmup-fraction .1 --weight-decay .1 --adam-beta1 .9 "
    "--adam-beta2 .95 --clip-grad 1 --data-path data"
)


def settings(*more: str) -> Settings:
    return parse_settings((*REQUIRED, *more))
