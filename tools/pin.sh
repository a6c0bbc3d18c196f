#!/usr/bin/env bash
# requirements.txt and those for DeepSpeed, transformers, Megatron-Bridge and the documentation from their .in files: all
# they need, pinned, with the hash of every file of these versions, for Linux on x86_64 and aarch64, CPython 3.12 and 3.13.
# What is pinned stays as it is, but for what the .in files changed; --upgrade takes the newest.
set -euo pipefail
cd "$(dirname "$0")/.."

uv=$(command -v uv || echo .venv/bin/uv)

pin() { # NAME, then more of uv's options
  "$uv" pip compile "$1.in" --output-file "$1.txt" --universal --python-version 3.12 --generate-hashes \
    --no-emit-index-url --no-emit-find-links --custom-compile-command tools/pin.sh --quiet "${@:2}"
}

pin requirements "$@"
pin requirements-deepspeed --constraint requirements.txt "$@"
pin requirements-hf --constraint requirements.txt "$@"
pin requirements-docs "$@"

# .venv-bridge reads recipes and trains nothing: without what needs a GPU or is for other clouds, and over .venv's torch.
left_out() {
  printf '%s; python_version < "3"\n' torch wandb tensorboard transformer-engine mamba-ssm causal-conv1d \
    flash-linear-attention nvidia-resiliency-ext nvidia-modelopt tensorstore timm open-clip-torch mlflow qwen-vl-utils \
    accelerate leptonai ray
  grep -o '^megatron-core==[^ ]*' requirements-bridge.in # without the extras that Megatron-Bridge asks for
}
shared() { # one version with .venv, of which it sees the packages
  grep -oE '^(numpy|pandas|pyarrow|safetensors|regex|pyyaml|rich|jinja2|psutil)==[^ ;]*' requirements.txt
}
pin requirements-bridge --override <(left_out) --constraint <(shared) "$@"
# Comments name the files above by the descriptors that the shell happened to give them.
sed -i 's|-c /dev/fd/.*|-c requirements.txt|; s|--override /dev/fd/.*|--override tools/pin.sh|' requirements-bridge.txt
