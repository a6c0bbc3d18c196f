#!/usr/bin/env bash
# Pipeline parallelism: the layers are split into stages, micro batches flow through them.
# Usage: train_pp2.sh MODEL DEVICES, for example train_pp2.sh gpt2-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run pp2 "$@" -- \
  --pipeline-model-parallel-size 2
