#!/usr/bin/env bash
# Trains the models of config.yaml on AMD GPUs with FRAMEWORKS="tran,deep", or with all that are enabled.
# Options are those of `hyperion frameworks run`; see --help.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" -m hyperion frameworks run --platform amd --config "$here/config.yaml" "$@"
