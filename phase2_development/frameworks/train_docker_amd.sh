#!/usr/bin/env bash
# Runs train_amd.sh in a container. --dry-run prints the line and needs no docker.
# Options are those of `hyperion frameworks docker`; see --help.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" -m hyperion frameworks docker --platform amd --config "$here/config.yaml" "$@"
