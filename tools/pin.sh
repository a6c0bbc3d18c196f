#!/usr/bin/env bash
# requirements.txt and those for DeepSpeed, transformers and the documentation from their .in files: all they need, pinned,
# with the hash of every file of these versions, for Linux on x86_64 and aarch64 and CPython 3.12 and 3.13.
# Needs uv. What is pinned stays as it is, but for what the .in files changed; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

pin() { # NAME, then more of uv's options
  uv pip compile "$1.in" --output-file "$1.txt" --universal --python-version 3.12 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --custom-compile-command tools/pin.sh --quiet "${@:2}"
}

pin requirements "$@"
pin requirements-deepspeed --constraint requirements.txt "$@"
pin requirements-hf --constraint requirements.txt "$@"
pin requirements-docs "$@"
