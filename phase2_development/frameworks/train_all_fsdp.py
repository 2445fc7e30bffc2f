"""Train with FSDP2 on the GPUs of this machine.

train_all_fsdp.py [llama|qwen|tiny …] [options of hyperion frameworks run]
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hyperion.commands.frameworks_benchmark import main  # the line above finds it, installed or not

if __name__ == "__main__":
    sys.exit(main("run", ["--frameworks", "fsdp", "--config", str(Path(__file__).with_name("config.yaml"))], "--model"))
