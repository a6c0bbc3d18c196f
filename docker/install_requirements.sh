#!/usr/bin/env bash
# The kit's packages on top of the image's, which must come out as they went in.
# Usage: install_requirements.sh FILE
set -euo pipefail
file=$1
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-/etc/pip/constraint.txt}

[[ -r $PIP_CONSTRAINT ]] || {
  echo "$PIP_CONSTRAINT is missing, so nothing would keep the image's own torch; use an NGC tag from" \
    "25.03 on in docker/versions.env." >&2
  exit 1
}

own() { # what the published numbers depend on, name==version a line
  python3 -m pip list --format=freeze --disable-pip-version-check |
    grep -iE '^(torch|transformer[-_]engine|apex|flash[-_]attn|triton|numpy)(==|$)' || true
}

before=$(own)
python3 -m pip install --no-cache-dir --disable-pip-version-check --requirement "$file" || {
  echo "The packages of $file do not fit $PIP_CONSTRAINT or cannot be reached; see pip's message above." >&2
  exit 1
}
after=$(own)
[[ $before == "$after" ]] || {
  echo "Installing $file changed the image's own packages:" >&2
  diff <(echo "$before") <(echo "$after") >&2 || true
  exit 1
}
