"""Measure what torch.compile brings: eager, default, max-autotune and reduce-overhead, each in a process of its own.

    python compilation_optimization.py --base_dir . --dtype bf16 --repeat 50

Works from any directory; `--help` lists the options. The chapter 07_compilation_optimization explains the method.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hyperion.commands.compilation import main  # the line above finds it, installed or not

if __name__ == "__main__":
    sys.exit(main())
