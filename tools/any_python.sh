#!/usr/bin/env bash
# Run a script of the kit with any Python from 3.6 on: what works before anything is set up.
set -euo pipefail
cd "$(dirname "$0")/.."

old_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 6))' > /dev/null 2>&1
}

for python in ${KIT_PYTHON:+"$KIT_PYTHON"} .venv/bin/python python3 python \
  "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.*/bin/python /usr/libexec/platform-python; do
  if old_enough "$python"; then
    PYTHONPATH=src:. exec "$python" "$@"
  fi
done
echo "fail  Python  none from 3.6 on was found on PATH or in pyenv
              → install CPython 3.12, for example 'uv python install 3.12' or 'pyenv install 3.12', and
                run make again" >&2
exit 1
