"""Compare the result files of a folder: a table, a picture and a report.

compare.py [--results-dir FOLDER] [--platform amd] [--frameworks tran,deep] [options of hyperion frameworks compare]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hyperion.commands.frameworks_benchmark import main  # the line above finds it, installed or not

if __name__ == "__main__":
    sys.exit(main("compare", ["--config", str(Path(__file__).with_name("config.yaml"))]))
