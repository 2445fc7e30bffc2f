#!/usr/bin/env bash
# Trains the language model under FSDP2, a rank for each device of this machine.
#
#   phase2_development/run_language_fsdp.sh [RANKS] [options of run_distributed.py …]
#
# RANKS, or the variable NPROC, in the place of the number of devices (2 on a CPU); PYTHON names an interpreter in the place of
# .venv's. Works from any directory, and ends with the exit code of torchrun.
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-$here/../.venv/bin/python}"
command -v -- "$python" >/dev/null || python=python3

ranks="${NPROC:-}"
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then
    ranks="$1"
    shift
fi
if [[ -z "$ranks" ]]; then
    ranks="$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
if ! [[ "$ranks" =~ ^[1-9][0-9]*$ ]]; then
    echo "run_language_fsdp.sh: '$ranks' is no number of ranks above 0" >&2
    exit 2
fi
exec "$python" -m torch.distributed.run --standalone --nproc_per_node="$ranks" \
    "$here/run_distributed.py" --model language_fsdp "$@"
