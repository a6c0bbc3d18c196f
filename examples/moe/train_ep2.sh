#!/usr/bin/env bash
# Expert parallelism: DP 2 whose ranks each hold half of the experts; tokens travel to theirs and back.
# Usage: train_ep2.sh MODEL DEVICES, for example train_ep2.sh moe-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run ep2 "$@" -- \
  --expert-model-parallel-size 2
