#!/usr/bin/env bash
# EP 2 in each of two pipeline stages: a rank holds half of the experts of half of the layers.
# Usage: train_pp2ep2.sh MODEL DEVICES, for example train_pp2ep2.sh moe-tiny 4cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run pp2ep2 "$@" -- \
  --pipeline-model-parallel-size 2 \
  --expert-model-parallel-size 2
