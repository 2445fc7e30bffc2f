#!/usr/bin/env bash
# Trains Qwen2.5-7B on AMD GPUs with FSDP2.
# Options are those of `hyperion frameworks run`; see --help.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"
exec "$python" -m hyperion frameworks run --platform amd --frameworks fsdp --model qwen --config "$here/config.yaml" "$@"
