#!/usr/bin/env bash
# Tensor parallelism: every weight matrix is split over the devices, two all-reduces a layer each way.
# Usage: train_tp2.sh MODEL DEVICES, for example train_tp2.sh gpt2-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run tp2 "$@" -- \
  --tensor-model-parallel-size 2
