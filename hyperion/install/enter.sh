#!/bin/sh
# Find a Python >= 3.11 and run hyperion.install with it. PYTHON= names the environment to use instead of .venv.
cd "$(dirname "$0")/../.." || exit 2
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'

if [ -n "${PYTHON:-}" ]; then
    if ! "$PYTHON" -c "$new_enough"; then
        echo "hyperion: PYTHON=$PYTHON does not run or is older than Python 3.11: name another, or leave PYTHON out" >&2
        exit 2
    fi
    PYTHON=$(command -v "$PYTHON")
    export PYTHON
    exec "$PYTHON" -m hyperion.install "$@"
fi
# The environment's own Python first: which python3 comes first in PATH may change.
for candidate in .venv/bin/python python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c "$new_enough" 2>/dev/null; then
        exec "$candidate" -m hyperion.install "$@"
    fi
done
echo "hyperion: no Python >= 3.11 found. Install one (apt install python3.11 python3.11-venv; dnf install python3.11;" >&2
echo "          module load python; uv python install 3.12) or name one: make setup PYTHON=/path/to/python3.12" >&2
exit 2
