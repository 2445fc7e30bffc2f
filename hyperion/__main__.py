"""`python -m hyperion`: the hyperion command, also where no console script is installed (PYTHON=…)."""

import sys

from hyperion.cli import main

if __name__ == "__main__":
    sys.exit(main())
