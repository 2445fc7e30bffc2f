"""`python -m hyperion`: the `hyperion` command, also where its console script is not installed (PYTHON=…)."""

import sys

from hyperion.cli import main

if __name__ == "__main__":
    sys.exit(main())
