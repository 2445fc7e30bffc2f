# Sourced by the scripts of this folder. Finds the Python of the checkout: PYTHON=, else .venv, else python3.
# PYTHONPATH leads to this checkout, installed or not.
here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-$here/../../.venv/bin/python}"
if ! command -v -- "$python" >/dev/null; then
    if [ -n "${PYTHON:-}" ]; then
        echo "$(basename -- "$0"): PYTHON=$PYTHON is no program" >&2
        echo "  next:  correct it, or unset PYTHON" >&2
        exit 2
    fi
    python=python3
fi
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}"
if ! "$python" -c 'import typer, yaml' 2>/dev/null; then
    echo "$(basename -- "$0"): $python lacks the packages of Hyperion" >&2
    echo "  next:  run \`make setup\` in ${here%/*/*}, or set PYTHON=/path/to/python" >&2
    exit 2
fi
