#!/usr/bin/env bash
# Make .venv with the pinned requirements, once; quick when nothing has changed. A fitting Python is
# looked for on PATH, among pyenv's versions and through uv; PYTHON= names one. Without a GPU, torch's
# build for CPUs is taken if an index that pip is configured for has it (PIP_EXTRA_INDEX_URL=).
set -euo pipefail
cd "$(dirname "$0")/.."

[[ -n ${KIT_IMAGE:-} ]] && exit 0 # the kit's image has everything, and its own torch

VENV=.venv
STAMP=$VENV/.requirements.sha256
UNFINISHED=$VENV/.unfinished # there from an installation's begin to its end
LOG=$VENV/setup.log

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

install() { # as `pip install`, with its words in the log and how far it is on the terminal
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@" \
    2>&1 | tee -a "$LOG" | show_progress
}

show_progress() { # of pip's lines: redrawn on a terminal, else a line at each quarter
  local line phase=downloaded count=0 name='' quarter=0
  while :; do
    if IFS= read -r -t 1 line; then
      case $line in
        *.whl.metadata*) ;;
        *Downloading\ *.whl* | *"Using cached "*.whl* | Processing\ *.whl*)
          count=$((count + 1)) name=${line#*ing }
          ;;
        "Installing collected packages"*) phase=unpacked name='' ;;
      esac
    elif (($? <= 128)); then # not the second's end but that of pip
      break
    fi
    [[ $phase == downloaded ]] || count=$(find "$VENV"/lib/*/site-packages -maxdepth 1 -name '*.dist-info' | wc -l)
    ((count <= packages)) || count=$packages
    if [[ -t 2 ]]; then
      printf '\r\033[K  %s %d of %d packages  %.50s' "$phase" "$count" "$packages" "$name" >&2
    elif ((count * 4 / packages != quarter)); then
      quarter=$((count * 4 / packages))
      echo "  $phase $count of $packages packages" >&2
    fi
  done
  [[ ! -t 2 ]] || printf '\r\033[K' >&2
}

has_gpu() { # or may have: a cluster's login node sets up for nodes that do
  [[ -e /proc/driver/nvidia/version ]] || command -v nvidia-smi > /dev/null || command -v sbatch > /dev/null
}

install_cpu_torch() { # exit code 0 if an index has that build: 0.2 GB instead of 3, the same results on CPU ranks
  local version
  version=$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' requirements.txt)
  [[ $(uname -sm) == "Linux x86_64" ]] && ! has_gpu || return 1
  "$VENV/bin/python" -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
    "torch==$version+cpu" >> "$LOG" 2>&1
}

without_cuda() { # the requirements without torch and what only its build for CUDA needs
  awk '/^[a-zA-Z0-9]/ {kept = !/^(torch|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ || /^nvidia-ml-py==/} kept' requirements.txt
}

if [[ ${1:-} == --python ]]; then # which one setup would take
  find_python
  exit
fi

wanted=$(sha256sum requirements.txt)
ready && exit 0

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
  ready && exit 0
fi

make_venv
touch "$UNFINISHED"
rm -f "$STAMP" "$LOG"
requirements=requirements.txt
size="2.8 GB to download and 6.6 GB on the disk; about 2 minutes on two free cores and a fast line"
if install_cpu_torch; then
  without_cuda > "$VENV/requirements.txt"
  requirements=$VENV/requirements.txt
  size="torch for CPUs; about 0.4 GB to download and 2 GB on the disk; a minute on a fast line"
fi
packages=$(grep -c '^[a-zA-Z0-9]' "$requirements")
echo "Setting up $VENV with $("$VENV/bin/python" --version), once: $packages packages, $size." >&2
install --require-hashes --requirement "$requirements" || {
  sed -n '/^ERROR/,$p' "$LOG" | sed '/^WARNING/d' | tail -n 12 >&2
  echo "Packages of requirements.txt could not be installed (see above, and $LOG); fix that and run 'make setup'." >&2
  exit 1
}
echo "$wanted" > "$STAMP"
rm "$UNFINISHED"
