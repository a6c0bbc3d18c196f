#!/usr/bin/env bash
# The kit's packages beside the image's, which must come out as they went in.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_CONSTRAINT=${PIP_CONSTRAINT:-/etc/pip/constraint.txt}
cache=/var/cache/kit # Mounted by BuildKit; an older builder has none.
if [[ -d $cache ]]; then
  export PIP_CACHE_DIR=$cache/pip UV_CACHE_DIR=$cache/uv UV_LINK_MODE=copy
else
  export PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
fi

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
python3 tools/install.py --beside "$PIP_CONSTRAINT" docker/requirements.in requirements.txt || {
  echo "The packages of docker/requirements.in do not fit $PIP_CONSTRAINT or cannot be reached; see the message" \
    "above." >&2
  exit 1
}
after=$(own)
[[ $before == "$after" ]] || {
  echo "Installing docker/requirements.in changed the image's own packages:" >&2
  diff <(echo "$before") <(echo "$after") >&2 || true
  exit 1
}
