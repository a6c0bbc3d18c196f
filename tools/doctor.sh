#!/usr/bin/env bash
# `make doctor`: finds any Python from 3.6 on, which is all that the checks need.
set -euo pipefail
cd "$(dirname "$0")/.."

old_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 6))' > /dev/null 2>&1
}

# On a cluster every node is checked and the answers are compared, which needs the kit's packages.
if [[ ${LAUNCHER:-} == slurm || ${SLURM_JOB_NUM_NODES:-1} -gt 1 ]]; then
  tools/setup.sh
  PYTHONPATH=. exec "${KIT_PYTHON:-.venv/bin/python}" -m tools.launch.doctor.nodes
fi

for python in ${KIT_PYTHON:+"$KIT_PYTHON"} .venv/bin/python python3 python \
  "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python /usr/libexec/platform-python; do
  if old_enough "$python"; then
    PYTHONPATH=. exec "$python" -m tools.launch.doctor
  fi
done
echo "fail  Python  none from 3.6 on was found on PATH or in pyenv
              → install CPython 3.12, for example 'uv python install 3.12' or 'pyenv install 3.12', and
                run 'make doctor' again: every other check needs one"
exit 1
