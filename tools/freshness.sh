#!/usr/bin/env bash
# Verify the six strategies with the newest megatron-core wheel, or with Megatron-LM's main, and write the verdict.
# Usage: freshness.sh wheel|main FILE. Exits with 1 if a strategy differs from one rank or does not train.
set -euo pipefail
cd "$(dirname "$0")/.."
megatron=$1 verdict=$2
python=.venv/bin/python
export ALLOW_UNKNOWN_MEGATRON=1

case $megatron in
wheel)
  $python -m pip install --quiet --upgrade --no-deps megatron-core
  version="megatron-core $($python -c 'import importlib.metadata as m; print(m.version("megatron-core"))')"
  ;;
main)
  MEGATRON_LM=$(mktemp -d)
  export MEGATRON_LM
  git clone --quiet --depth 1 "${MEGATRON_URL:-https://github.com/NVIDIA/Megatron-LM.git}" "$MEGATRON_LM"
  version="Megatron-LM main at $(git -C "$MEGATRON_LM" rev-parse HEAD)"
  ;;
*)
  echo "freshness.sh: '$megatron' is neither wheel nor main." >&2
  exit 2
  ;;
esac

failed=0
printf '## %s\n\n| strategy | verdict |\n|---|---|\n' "$version" >"$verdict"
for strategy in dp2 tp2 sp2 cp2 pp2 vpp2; do
  output=$(mktemp)
  code=0
  make "verify-$strategy-gpt2-tiny-2cpu" >"$output" 2>&1 || code=$?
  cat "$output"
  case $code in
  0) sentence=held ;;
  *)
    failed=1
    sentence="exit code $code: $(grep -v '^make' "$output" | tail -n 1 | tr '|' '/')"
    ;;
  esac
  printf '| %s | %s |\n' "$strategy" "$sentence" >>"$verdict"
done
cat "$verdict"
exit "$failed"
