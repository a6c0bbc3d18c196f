#!/usr/bin/env bash
# Every static check; all of them run, and one that fails makes the whole fail.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
bin=.venv/bin
failed=0

check() {
  echo "== $1"
  "${@:2}" || failed=1
}

mapfile -t scripts < <(git ls-files '*.sh' .ci/run)
mapfile -t dockerfiles < <(git ls-files '*Dockerfile*')
check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "import-linter" "$bin/lint-imports" --no-cache
check "style" "$bin/python" tools/style.py
check "shellcheck" "$bin/shellcheck" "${scripts[@]}"
[[ ${#dockerfiles[@]} -eq 0 ]] || check "hadolint" "$bin/hadolint" "${dockerfiles[@]}"
exit "$failed"
