#!/usr/bin/env bash
# Make .venv with the pinned requirements, once; quick when nothing has changed. A fitting Python is
# looked for on PATH, among pyenv's versions and through uv; PYTHON= names one.
set -euo pipefail
cd "$(dirname "$0")/.."

[[ -n ${KIT_IMAGE:-} ]] && exit 0 # the kit's image has everything, and its own torch

VENV=.venv
STAMP=$VENV/.requirements.sha256
UNFINISHED=$VENV/.unfinished # there from an installation's begin to its end

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

ready() { # installed to the end, and its Python is still there
  [[ -f $STAMP && ! -e $UNFINISHED && -x $VENV/bin/python && $(< "$STAMP") == "$wanted" ]]
}

make_venv() { # a fitting one that was installed to its end is kept, with what was added to it
  if [[ ! -e $UNFINISHED ]] && fits "$VENV/bin/python"; then
    return
  fi
  [[ ! -L $VENV ]] || {
    echo "$VENV is a link to an environment that was not installed to its end or has no Python 3.12 or 3.13;" \
      "run 'make setup' where $(readlink -f "$VENV") belongs, or remove the link." >&2
    return 1
  }
  local python
  python=$(find_python)
  if [[ -e $VENV && ! -e $UNFINISHED ]]; then
    [[ -f $VENV/pyvenv.cfg ]] || {
      echo "$VENV is there and is no virtual environment; move it away and run make again." >&2
      return 1
    }
    echo "The Python of $VENV is not 3.12 or 3.13, or is gone: $VENV is made anew." >&2
  fi
  "$python" -m venv --clear "$VENV"
}

if [[ ${1:-} == --python ]]; then # which one setup would take
  find_python
  exit
fi

# A Python of .venv imports from the clone that it is started in: site-packages gets the paths relative to
# itself, and Python does not resolve the link that the .venv of a worktree may be.
add_import_path() {
  local packages
  for packages in "$VENV"/lib/python3.*/site-packages; do
    [[ -f $packages/parakit.pth ]] || printf '%s\n' ../../../../src ../../../.. > "$packages/parakit.pth"
  done
}

# .venv/bin/parakit runs the clone that its .venv is in, as .venv/bin/python does. With -P Python does not
# import from the folder that the user is in.
add_program() {
  [[ ! -e $VENV/bin/parakit ]] || return 0
  cat > "$VENV/bin/parakit" << 'END'
#!/bin/sh
exec "$(dirname "$0")/python" -P -m parakit "$@"
END
  chmod +x "$VENV/bin/parakit"
}

add_kit() {
  add_import_path
  add_program
}

wanted=$(sha256sum requirements.txt)
if ready; then
  add_kit
  exit 0
fi

# Two at once would spoil each other's work. The folder that .venv is in, also by a link, is locked, and stays
# so while anything of a killed set-up still runs.
if command -v flock > /dev/null; then
  place=.
  [[ ! -L $VENV ]] || place=$(readlink -f "$VENV")/..
  exec 9< "$place"
  flock --nonblock 9 || {
    echo "Another make is setting up $VENV; waiting for it." >&2
    flock 9
  }
  if ready; then
    add_kit
    exit 0
  fi
fi

make_venv
touch "$UNFINISHED"
rm -f "$STAMP"
echo "Setting up $VENV with $("$VENV/bin/python" --version), once: up to 2.8 GB to download and 6.6 GB on the disk" \
  "(without a GPU a sixth, where an index has torch's build for CPUs)." >&2
"$VENV/bin/python" tools/install.py requirements.txt || {
  echo "Packages of requirements.txt could not be installed (see above); mend that and run 'make setup', or have" \
    "pip do it: 'make setup INSTALLER=pip'." >&2
  exit 1
}
add_kit
echo "$wanted" > "$STAMP"
rm "$UNFINISHED"
