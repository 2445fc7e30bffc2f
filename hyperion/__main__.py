"""Run the `hyperion` command as `python -m hyperion`.

This also works in an environment named by PYTHON=, where the console script `hyperion` is not installed.
"""

import sys

from hyperion.cli import main

if __name__ == "__main__":
    sys.exit(main())
