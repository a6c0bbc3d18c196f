#!/usr/bin/env bash
# Baseline: all experts on one device.
# Usage: train_baseline.sh MODEL DEVICES, for example train_baseline.sh moe-tiny 1cpu
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit run baseline "$@"
