"""Train with Megatron-DeepSpeed on the GPUs of this machine: `train_all_mgds.py [llama|qwen|tiny …] [options of hyperion frameworks run]`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from hyperion.commands.frameworks_benchmark import main  # the line above finds it, installed or not

if __name__ == "__main__":
    sys.exit(main("run", ["--frameworks", "mgds", "--config", str(HERE / "config.yaml")], "--model"))
