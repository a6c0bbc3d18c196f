#!/usr/bin/env bash
# Context parallelism: the sequence is split in every layer, attention exchanges keys and values.
# Usage: train_cp2.sh MODEL DEVICES, for example train_cp2.sh gpt2-tiny 2cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run cp2 "$@" -- \
  --context-parallel-size 2
