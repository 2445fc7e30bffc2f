#!/usr/bin/env bash
# Trains Llama-3.1-8B on AMD GPUs with DeepSpeed.
# Options are those of `hyperion frameworks run`; see --help.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" -m hyperion frameworks run --platform amd --frameworks deep --model llama --config "$here/config.yaml" "$@"
