#!/usr/bin/env bash
# EP 8: of eight experts each device holds one. For eight devices.
# Usage: train_ep8.sh MODEL DEVICES, for example train_ep8.sh mixtral-8x7b 8gpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run ep8 "$@" -- \
  --expert-model-parallel-size 8
