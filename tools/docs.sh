#!/usr/bin/env bash
# `make docs`: site/ from the repository's own pages, the planner that runs in the reader's browser, and the
# pages that are too large to be committed.
# mkdocs has an environment of its own, .venv-docs, with the packages of requirements-docs.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=.venv-docs
wanted=$(sha256sum requirements-docs.txt)
if [[ ! -f $VENV/.requirements.sha256 || $(< "$VENV/.requirements.sha256") != "$wanted" ]]; then
  "$(tools/setup.sh --python)" -m venv --clear "$VENV"
  "$VENV/bin/python" tools/install.py requirements-docs.txt
  echo "$wanted" > "$VENV/.requirements.sha256"
fi

rm -rf site
PYTHONPATH=src:. NO_MKDOCS_2_WARNING=1 "$VENV/bin/python" -m mkdocs build --strict --quiet
.venv/bin/python -m parakit.site.planner_page site/planner
.venv/bin/python -m parakit.site.generated_pages site/docs
echo "The site is in site/; 'make serve' builds it and shows it"
