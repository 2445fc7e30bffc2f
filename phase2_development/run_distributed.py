"""Train on all devices of this machine, or measure how training scales over them.

    torchrun --standalone --nproc_per_node=4 phase2_development/run_distributed.py --model language_ddp --epochs 25
    python phase2_development/run_distributed.py --model llama --lora        starts a rank for each device itself
    python phase2_development/run_distributed.py --model scaling --scaling_gpus 1,2,4

Works from any directory. A run folder under results/ gets a row from every rank and epoch, samples, tables, pictures and
checkpoints; SIGTERM saves, and `--resume FOLDER` goes on. The chapters 2.5, 2.6 and 2.8 teach what is done here.

Exit codes: 0 done; 1 a training or a launch failed; 2 the request cannot be met, and the reason is printed before any training;
75 stopped by SIGTERM and saved. torchrun makes 1 of each that is not 0.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hyperion.commands.distributed_command import main  # found by the line above, installed or not
from hyperion.results import Run


def export(run: Run) -> list[str]:
    from hyperion.book import export_run  # here, because only rank 0 draws figures, and the import takes two seconds

    return export_run(run)


if __name__ == "__main__":
    sys.exit(main(__doc__ or "", export))
