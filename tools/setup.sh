#!/usr/bin/env bash
# Make .venv with the pinned requirements, once; quick when nothing has changed. A fitting Python is
# looked for on PATH, among pyenv's versions and through uv; PYTHON= names one.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ -n ${KIT_IMAGE:-} ]] && exit 0 # the kit's image has everything, and its own torch

VENV=.venv
STAMP=$VENV/.requirements.sha256

fits() { # a pyenv shim of a version that is not chosen exists and fails, so the candidate must run
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' \
    > /dev/null 2>&1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 python \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.12*/bin/python \
    "${PYENV_ROOT:-${HOME:-}/.pyenv}"/versions/3.13*/bin/python \
    "$(uv python find 3.12 2> /dev/null || uv python find 3.13 2> /dev/null || true)"; do
    if [[ -n $candidate ]] && fits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "CPython 3.12 or 3.13 with venv is needed, and none was found on PATH, in pyenv or through uv;" \
    "install one (for example 'uv python install 3.12' or 'pyenv install 3.12') and run make again." >&2
  return 1
}

if [[ ${1:-} == --python ]]; then # which one setup would take
  find_python
  exit
fi

wanted=$(sha256sum requirements.txt)
[[ -f $STAMP && $(< "$STAMP") == "$wanted" ]] && exit 0

python=$VENV/bin/python
fits "$python" || python=$(find_python)
echo "Setting up $VENV with $("$python" --version): 6.6 GB of packages, once." >&2
[[ $python == "$VENV/bin/python" ]] || "$python" -m venv --clear "$VENV"
"$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
  --requirement requirements.txt || {
  echo "Packages of requirements.txt could not be installed (see above); fix that and run 'make setup'." >&2
  exit 1
}
echo "$wanted" > "$STAMP"
