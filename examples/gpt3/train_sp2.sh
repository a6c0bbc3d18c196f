#!/usr/bin/env bash
# Sequence parallelism: TP 2, and what TP leaves whole (norms, dropouts) is split along the sequence.
# Usage: train_sp2.sh MODEL DEVICES, for example train_sp2.sh gpt2-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run sp2 "$@" -- \
  --tensor-model-parallel-size 2 \
  --sequence-parallel
