#!/usr/bin/env bash
# `make doctor`: finds any Python from 3.6 on, which is all that the checks need.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${LAUNCHER:-} in '' | torchrun | slurm) ;; *)
  echo "LAUNCHER=$LAUNCHER is not torchrun or slurm; LAUNCHER=slurm checks a cluster's nodes." >&2
  exit 2
  ;;
esac
# On a cluster every node is checked and the answers are compared, which needs the kit's packages.
if [[ ${LAUNCHER:-} == slurm || ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]]; then
  tools/setup.sh
  exec "${KIT_PYTHON:-.venv/bin/python}" -m parakit.cluster.doctor.nodes
fi
exec tools/any_python.sh -m parakit.cluster.doctor
