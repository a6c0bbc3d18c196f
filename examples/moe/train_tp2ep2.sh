#!/usr/bin/env bash
# EP 2 over TP 2: every expert is split as all other matrices are. Tensor parallelism with experts needs
# sequence parallelism, or each of its ranks would route all tokens.
# Usage: train_tp2ep2.sh MODEL DEVICES, for example train_tp2ep2.sh moe-tiny 4cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run tp2ep2 "$@" -- \
  --tensor-model-parallel-size 2 \
  --expert-model-parallel-size 2 \
  --sequence-parallel
