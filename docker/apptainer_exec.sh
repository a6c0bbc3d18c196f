#!/usr/bin/env bash
# apptainer exec with variables of the caller, which are named and not valued, so that no value shows in `ps` or a log.
# Usage: apptainer_exec.sh NAME... -- OPTION... IMAGE COMMAND...
set -euo pipefail
while [[ $1 != -- ]]; do
  # Apptainer sets a variable of the container from the one that has this prefix here. An unset one stays unset.
  [[ ${!1+set} ]] && export "APPTAINERENV_$1=${!1}"
  shift
done
shift
exec apptainer exec "$@"
