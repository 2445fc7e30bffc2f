"""Matrix of the capabilities of frameworks. Each cell is the outcome of a probe, or what the result files show."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from hyperion.engines import STACKS
from hyperion.engines.environments import installed_python, why_not_installed
from hyperion.engines.external import why_not_found
from hyperion.errors import HyperionError
from hyperion.frameworks.comparison import load_results
from hyperion.frameworks.config import MEGATRON_DEEPSPEED, PRIMUS, Config
from hyperion.frameworks.plan import EXTERNAL, TITLES
from hyperion.frameworks.result import Result
from hyperion.hardware import detect
from hyperion.processes.child_process import child_environment

MARKS = (
    "ran: a result file shows that the part was used; yes: the probe imported the part; no: the import failed; ?: not installed, "
    "so not probed; -: there is no probe. bf16 is that of the matrix units of this device. Measured values are those of result "
    "files."
)
# For each capability and framework: the attribute ("module:attribute") whose import proves the capability.
_PROBES = {
    "data parallel": {
        "tran": "torch.nn.parallel:DistributedDataParallel",
        "deep": "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer",
        "fsdp": "torch.distributed.fsdp:fully_shard",
        "nemo": "nemo_automodel.components.distributed.fsdp2:FSDP2Manager",
        "mgds": "megatron.core.parallel_state:initialize_model_parallel",
        "mcore": "megatron.core.distributed:DistributedDataParallel",
    },
    "sharded state": {
        "deep": "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
        "fsdp": "torch.distributed.fsdp:fully_shard",
        "nemo": "nemo_automodel.components.distributed.fsdp2:FSDP2Manager",
    },
    "tensor parallel": {
        "mgds": "megatron.core.tensor_parallel:ColumnParallelLinear",
        "mcore": "megatron.core.tensor_parallel:ColumnParallelLinear",
    },
    "pipeline parallel": {"mcore": "megatron.core.pipeline_parallel:get_forward_backward_func"},
    "fp8": {"tran": "transformer_engine.pytorch:fp8_autocast", "prim": "transformer_engine.pytorch:fp8_autocast"},
}
# For each capability: whether a result shows that it was used. A group of one rank divides nothing.
_USED: dict[str, Callable[[Result], bool]] = {
    "data parallel": lambda result: result.parallelism_config.data_parallel_size > 1,
    "sharded state": lambda result: (
        result.training_config.parallel_strategy.startswith(("deepspeed zero-", "hyperion fsdp"))
        and result.parallelism_config.data_parallel_size > 1
    ),
    "tensor parallel": lambda result: result.parallelism_config.tensor_model_parallel_size > 1,
    "pipeline parallel": lambda result: result.parallelism_config.pipeline_model_parallel_size > 1,
    "fp8": lambda result: result.precision in ("fp8", "mxfp8"),
}
# The garbage collector is disabled to save time, because imports leave no garbage.
_SCRIPT = """
import gc, importlib, json, sys
gc.disable()
found = {}
for name, entry in json.load(sys.stdin).items():
    module, attribute = entry.split(":")
    try:
        found[name] = hasattr(importlib.import_module(module), attribute)
    except Exception:
        found[name] = False
print("\\n" + json.dumps(found))
"""


def capability_rows(config: Config, folder: Path) -> tuple[list[str], list[list[str]]]:
    """Return (headings, rows) of the matrix, with one row for each framework.

    Args:
        config: the configuration, which names the folders of frameworks that run from their sources.
        folder: folder of result files. Without results, the cells of measured values are empty.
    """
    device = detect()
    headings = ["framework", "installed", "platforms", *_PROBES, f"bf16 on {device.name}"[:40], "best tokens/s/GPU", "peak GB"]
    results = load_results(folder) if any(folder.glob("train_*.json")) else []
    rows = []
    for code in TITLES:
        python, sources, reason = _place(code, config)
        wanted = {name: entries[code] for name, entries in _PROBES.items() if code in entries}
        found = {} if reason else _probe(python, sources, wanted)
        mine = [result for result in results if result.framework == code]
        used = {name for name in _PROBES if any(_USED[name](result) for result in mine)}
        marks = [
            "ran" if name in used else "-" if name not in wanted else "?" if reason else "yes" if found.get(name) else "no"
            for name in _PROBES
        ]
        best = max(mine, key=lambda result: result.performance_metrics.tokens_per_second_per_gpu, default=None)
        speed = f"{best.performance_metrics.tokens_per_second_per_gpu:,.0f} ({best.platform} {best.model})" if best else ""
        peaks = [result.memory_metrics.peak_memory_allocated_gb for result in mine]
        peak = max((value for value in peaks if value), default=None)
        platforms = ", ".join(getattr(config.frameworks, code).platforms)
        bf16 = device.supports("bf16")[1]
        rows.append([code, "no" if reason else "yes", platforms, *marks, bf16, speed, f"{peak:.2f}" if peak else ""])
    return headings, rows


def _place(code: str, config: Config) -> tuple[str, str, str]:
    """Return (Python that runs a framework, folder of its sources or "", why it is absent or "")."""
    if code not in EXTERNAL:
        environment = {"deep": "deepspeed", "mcore": "megatron-core"}.get(code, "")
        absent = why_not_installed(environment) if environment else STACKS["HF Trainer"].why_absent() if code == "tran" else ""
        return installed_python(environment), "", absent
    folders = {"prim": config.paths.primus, "mgds": config.paths.megatron_deepspeed}
    named = {PRIMUS: config.paths.primus, MEGATRON_DEEPSPEED: config.paths.megatron_deepspeed}
    return installed_python(""), folders.get(code, ""), why_not_found(EXTERNAL[code], named)


def _probe(python: str, sources: str, wanted: dict[str, str]) -> dict[str, bool]:
    """Return which attributes a Python can import. Each framework is probed in a process of its own."""
    environment = child_environment()
    if sources:
        environment["PYTHONPATH"] = f"{sources}:{environment['PYTHONPATH']}"
    done = subprocess.run([python, "-c", _SCRIPT], input=json.dumps(wanted), env=environment, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        what = f"the probe ended with exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        raise HyperionError(what, where=python, next_step="install the framework again: hyperion frameworks install --all")
    return json.loads(lines[-1])
