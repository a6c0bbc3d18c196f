#!/usr/bin/env bash
# `make setup-bridge`: .venv-bridge, where Megatron-Bridge builds recipes that are checked or read, with the packages
# of requirements-bridge.txt. It sees those of .venv, torch among them, behind its own.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-bridge
wanted=$(sha256sum requirements.txt requirements-bridge.txt)
if [[ -f $VENV/.requirements.sha256 && $(< "$VENV/.requirements.sha256") == "$wanted" ]]; then
  exit 0
fi
python=.venv/bin/python
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
theirs=$("$python" -c "$packages")
"$python" -m venv --clear "$VENV"
echo "$theirs" > "$("$VENV/bin/python" -c "$packages")/kit.pth"
"$VENV/bin/python" tools/install.py requirements-bridge.txt
echo "$wanted" > "$VENV/.requirements.sha256"
echo "$VENV is ready: 'make export-recipe' checks what it writes, and 'make import-recipe' reads Python files."
