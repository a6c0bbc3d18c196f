#!/usr/bin/env bash
# DP 4 with EP 2 inside it: two copies of each half of the experts, whose gradients are reduced in pairs.
# The second 2 needs no flag: what the other degrees leave over is data parallel.
# Usage: train_ep2dp2.sh MODEL DEVICES, for example train_ep2dp2.sh moe-tiny 4cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run ep2dp2 "$@" -- \
  --expert-model-parallel-size 2
