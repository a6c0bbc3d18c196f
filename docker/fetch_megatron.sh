#!/usr/bin/env bash
# One commit of Megatron-LM, without its history.
# Usage: fetch_megatron.sh URL COMMIT FOLDER
set -euo pipefail
url=$1 commit=$2 folder=$3

git init --quiet "$folder"
cd "$folder"
git fetch --quiet --depth 1 "$url" "$commit" || {
  echo "Megatron-LM $commit cannot be cloned from $url; check the network and the commit in" \
    "docker/versions.env, or name a mirror with MEGATRON_URL=." >&2
  exit 1
}
git -c advice.detachedHead=false checkout --quiet FETCH_HEAD
found=$(git rev-parse HEAD)
[[ $found == "$commit" ]] || {
  echo "$url gave $found where docker/versions.env asks for $commit; write the whole commit there." >&2
  exit 1
}
