"""Compare the result files of a folder: `compare.py [--results-dir FOLDER] [options of hyperion frameworks compare]`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from hyperion.commands.frameworks_benchmark import main  # the line above finds it, installed or not

if __name__ == "__main__":
    sys.exit(main("compare", ["--config", str(HERE / "config.yaml")]))
