#!/usr/bin/env bash
# Data parallelism: a replica with all experts on each device, gradients all-reduced once an iteration.
# It needs no flag: what the other degrees leave over is data parallel.
# Usage: train_dp2.sh MODEL DEVICES, for example train_dp2.sh moe-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run dp2 "$@"
