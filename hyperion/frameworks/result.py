"""Result files: the JSON format for the result of one combination, its validation, and the migration of older files.

Times are in seconds, memory in GB (10^9 bytes). A value that was not measured is always null, never a default.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from hyperion.errors import HyperionError
from hyperion.forms import FieldError, read_form
from hyperion.frameworks.parallelism import Parallelism
from hyperion.frameworks.shapes import MODELS
from hyperion.results.files import write_atomically
from hyperion.untrusted import read_json

SCHEMA_VERSION = 1
Count = Annotated[int, Field(ge=1, le=2**40)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Number = Annotated[float, Field(ge=-1e39, le=1e39)]  # of float32
Text = Annotated[str, Field(min_length=1, max_length=100)]
# "mega" is Megatron-LM, whose results come only from logs. "mcore" is its library, megatron-core, in this library's loop.
Framework = Literal["tran", "deep", "fsdp", "nemo", "prim", "mgds", "mega", "mcore"]
DEFAULT_DATASET, DEFAULT_PRECISION, UNKNOWN = "wikitext-2", "bf16", "unknown"
PRECISIONS = ("bf16", "fp32", "tf32", "fp16", "fp8", "mxfp8", "mxfp4", "nvfp4", UNKNOWN)
# "_" joins the parts of a file name, so no part contains it.
_DATASET = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*")
_OTHER_PARTS = {"tiny", *PRECISIONS} - {UNKNOWN}
_UNSTATED = "not stated by the older file"
_ROUNDING = 1e-6  # derived values are recomputed from the series
_OLDER_PLATFORMS = {"cuda": "nvd", "nvidia": "nvd", "rocm": "amd"}
_OLDER_NAME = re.compile(r"train_(?:(amd|nvd|cpu)_)?(tran|deep|fsdp|nemo|prim|mgds|mega)_((?:llama|qwen)(?:_tiny)?).*")
_MIGRATE = "correct the file, or convert an older one: hyperion frameworks validate --migrate FILE"


class ResultError(HyperionError):
    """Raised if a result file cannot be read, or if its values contradict its own values per step."""


@dataclass(frozen=True)
class GpuInfo:
    """The devices of a run. `gpu_cores` is the number of compute units (SMs or CUs) of a GPU, or cores of a CPU."""

    device_count: Count
    device_name: str | None = None
    total_memory_gb: Positive | None = None
    gpu_cores: Count | None = None
    pytorch_version: str | None = None
    software_stack: Literal["rocm", "cuda", "cpu"] | None = None
    software_version: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """Numbers of parameters."""

    total_params: Count
    trainable_params: Count


@dataclass(frozen=True)
class TrainingConfig:
    """The work of a run. A value that was not observed, or that an older file does not contain, is null.

    Args:
        max_steps, global_batch_size, micro_batch_size, sequence_length, num_gpus: sizes.
        parallel_strategy: name of the stack or of the preset.
        gradient_accumulation_steps: micro-batches of a rank in a step.
        initial_state_sha256, row_order_sha256: hashes that identify the initial state and the order of the rows.
        optimizer: algorithm, such as "AdamW".
        betas, eps, weight_decay: options of the optimizer. Norms and biases have no weight decay.
        clip_norm: limit of the gradient norm.
        master_dtype: dtype of the weights that the optimizer updates.
        reduction_dtype: dtype of gradient reductions. It is also null if no gradient is reduced, as on one rank.
    """

    max_steps: Count
    global_batch_size: Count
    micro_batch_size: Count
    sequence_length: Count
    num_gpus: Count
    parallel_strategy: str
    gradient_accumulation_steps: Count
    initial_state_sha256: str | None = None
    row_order_sha256: str | None = None
    optimizer: str | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    clip_norm: float | None = None
    master_dtype: str | None = None
    reduction_dtype: str | None = None


@dataclass(frozen=True)
class PerformanceMetrics:
    """Values computed from the step times. The first `skipped_steps` steps count only in the two totals, not in other values."""

    total_steps: Count
    total_time_seconds: Positive
    skipped_steps: Annotated[int, Field(ge=0)]
    avg_step_time_seconds: Positive
    min_step_time_seconds: Positive
    max_step_time_seconds: Positive
    steps_per_second: Positive
    tokens_per_second: Positive
    tokens_per_second_per_gpu: Positive
    throughput_per_gpu_core: Positive | None = None


@dataclass(frozen=True)
class MemoryMetrics:
    """Memory of a device. `measurement_method` says what was read, or why nothing was."""

    measurement_method: Text
    peak_memory_allocated_gb: Positive | None = None
    avg_memory_allocated_gb: Positive | None = None
    min_memory_allocated_gb: Positive | None = None
    peak_memory_reserved_gb: Positive | None = None
    avg_memory_reserved_gb: Positive | None = None
    min_memory_reserved_gb: Positive | None = None
    peak_memory_in_use_gb: Positive | None = None


@dataclass(frozen=True)
class Result:
    """Content of a result file. `source` says where the values come from: an observed run, a log, or a migrated older file."""

    schema_version: Literal[1]
    platform: Literal["amd", "nvd", "cpu"]
    framework: Framework
    model: Text
    dataset: Text
    precision: Text
    timestamp: Text
    source: Literal["observed", "log", "migrated"]
    gpu_info: GpuInfo
    model_info: ModelInfo | None
    parallelism_config: Parallelism
    training_config: TrainingConfig
    performance_metrics: PerformanceMetrics
    step_times: tuple[Seconds, ...]
    loss_values: tuple[Number, ...]
    learning_rates: tuple[Number, ...]
    memory_metrics: MemoryMetrics
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    plan_sha256: str | None = None
    source_log_file: str | None = None

    def __post_init__(self):
        steps, training = self.performance_metrics.total_steps, self.training_config
        for name in ("step_times", "loss_values", "learning_rates"):
            if (length := len(getattr(self, name))) != steps:
                raise ValueError(f"{name} has {length} values, but total_steps is {steps}")
        if steps != training.max_steps:
            raise ValueError(f"total_steps is {steps}, but max_steps is {training.max_steps}")
        if fault := label_fault(self.model, self.dataset, self.precision):
            raise ValueError(fault)
        batch = (training.num_gpus, training.global_batch_size, training.micro_batch_size)
        if faults := self.parallelism_config.faults(*batch, MODELS[self.model].shape):
            raise ValueError("; ".join(faults))
        if training.gradient_accumulation_steps != self.parallelism_config.gradient_accumulation_steps:
            raise ValueError("gradient_accumulation_steps differs between training_config and parallelism_config")
        if self.gpu_info.device_count != training.num_gpus:
            raise ValueError(f"device_count is {self.gpu_info.device_count}, but num_gpus is {training.num_gpus}")
        derived = derive(self.step_times, self.performance_metrics.skipped_steps, training, self.gpu_info.gpu_cores)
        for name, expected in asdict(derived).items():
            stated = getattr(self.performance_metrics, name)
            if (stated is None) != (expected is None) or (stated is not None and not _near(stated, expected)):
                raise ValueError(f"performance_metrics.{name} is {stated}, but the step times give {expected}")

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """(platform, framework, model, dataset, precision), which identifies a combination."""
        return self.platform, self.framework, self.model, self.dataset, self.precision

    @property
    def timed_s(self) -> tuple[float, ...]:
        """Times in seconds of the steps after the first `skipped_steps` steps."""
        return self.step_times[self.performance_metrics.skipped_steps :]

    @property
    def step_tokens(self) -> int:
        """Number of scored tokens in a step, summed over all devices."""
        return self.training_config.global_batch_size * self.training_config.sequence_length

    @property
    def file_name(self) -> str:
        """Name of the file."""
        return file_name(*self.key)


def file_name(platform: str, framework: str, model: str, dataset: str, precision: str) -> str:
    """Return the documented name train_<platform>_<framework>_<model>.json.

    A data set or a precision that is not the documented one (WikiText-2, bf16) is appended, so that names never collide.
    """
    # If the precision is unknown, always append the data set too. Otherwise the name would be that of an unknown data set.
    parts = [platform, framework, model, *([dataset] * (dataset != DEFAULT_DATASET or precision == UNKNOWN))]
    return f"train_{'_'.join(parts + [precision] * (precision != DEFAULT_PRECISION))}.json"


def label_fault(model: str, dataset: str, precision: str) -> str:
    """Return why these labels cannot be parts of a file name, or ""."""
    for name, value, known in (("model", model, MODELS), ("precision", precision, PRECISIONS)):
        if value not in known:
            return f"{name} must be one of {', '.join(known)}, not {value!r:.60}"
    if not _DATASET.fullmatch(dataset):
        return f"dataset must consist of letters, digits, '.' and '-', and start with a letter or digit, not {dataset!r:.60}"
    return f"dataset must not be {dataset!r}, which names another part of a file" if dataset.lower() in _OTHER_PARTS else ""


def derive(step_times: tuple[float, ...], skipped: int, training: TrainingConfig, cores: int | None) -> PerformanceMetrics:
    """Return the metrics of a series of step times.

    Raises:
        ValueError: no timed step remains.
    """
    timed = step_times[skipped:]
    if not timed:
        raise ValueError(f"no step is timed: {len(step_times)} steps, of which {skipped} are skipped")
    mean = math.fsum(timed) / len(timed)
    tokens_per_s = training.global_batch_size * training.sequence_length / mean
    each = tokens_per_s / training.num_gpus
    return PerformanceMetrics(
        total_steps=len(step_times),
        total_time_seconds=math.fsum(step_times),
        skipped_steps=skipped,
        avg_step_time_seconds=mean,
        min_step_time_seconds=min(timed),
        max_step_time_seconds=max(timed),
        steps_per_second=1 / mean,
        tokens_per_second=tokens_per_s,
        tokens_per_second_per_gpu=each,
        throughput_per_gpu_core=each / cores if cores else None,
    )


def write_result(result: Result, folder: Path, replaces: Path | None = None) -> Path:
    """Validate a result and write it atomically under its documented name. Return the file.

    Args:
        result: the result.
        folder: the folder, which is created if it does not exist.
        replaces: the only existing file that may be replaced. None means that no file may be replaced.

    Raises:
        ResultError: the result does not follow the form, or a file with its name has other content and must not be replaced.
    """
    document, file = asdict(result), folder / result.file_name
    parse_result(json.loads(json.dumps(document)), result.file_name)
    content = (json.dumps(document, indent=1) + "\n").encode()
    if file.exists() and file.read_bytes() != content and not (replaces and file.samefile(replaces)):
        next_step = "move this file away, or choose another folder with --output-dir"
        raise ResultError("the file exists with other content", where=file, next_step=next_step)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, content)
    return file


def read_result(path: Path) -> Result:
    """Return the result of a file.

    Raises:
        ResultError: the file cannot be read, or its content does not follow the form.
    """
    return parse_result(_document(path), str(path))


def parse_result(document: object, where: str) -> Result:
    """Convert a parsed JSON document to a result.

    Raises:
        ResultError: the document does not follow the form. The message names the field.
    """
    try:
        return read_form(Result, document, "result")
    except FieldError as error:
        raise ResultError(error.what, where=where, next_step=_MIGRATE) from error


def migrate(path: Path, known: Mapping[str, str] | None = None) -> Result:
    """Return the result of a file of an older generation. The file is not changed.

    Older files use other field names, and their averages may cover other steps. Therefore derived values are computed again from
    the step times. Values that an older file does not contain become null or "unknown".

    Args:
        path: the file. Its name states the framework and the model if its content does not.
        known: values that the file does not state, such as {"dataset": "c4", "precision": "bf16"}.

    Raises:
        ResultError: the file lacks a series or a size, or its values contradict each other.
    """
    old = _document(path)
    if not isinstance(old, dict):
        raise ResultError("not a JSON object", where=path, next_step="give a result file")
    if old.get("schema_version") == SCHEMA_VERSION:
        return parse_result(old, str(path))
    named = _OLDER_NAME.fullmatch(path.stem)
    words = dict(zip(("platform", "framework", "model"), named.groups() if named else (), strict=False))
    stated = {name: old.get(name) or words.get(name) for name in ("platform", "framework", "model")} | dict(known or {})
    if missing := [name for name, value in stated.items() if not isinstance(value, str)]:
        what = f"neither the file nor its name states {', '.join(missing)}"
        raise ResultError(what, where=path, next_step="give them with --set, as --set framework=tran --set model=llama")
    try:
        return _migrated(old, {name: str(value) for name, value in stated.items()}, str(path))
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        what = f"missing field {error}" if isinstance(error, KeyError) else f"a value cannot be used: {error}"
        raise ResultError(what, where=path, next_step="run the combination again") from error


def _migrated(old: dict[str, Any], stated: dict[str, str], where: str) -> Result:
    training, gpu = dict(old["training_config"]), dict(old["gpu_info"])
    times = tuple(float(value) for value in old.get("step_times") or old["raw_step_times"])
    division = dict(old.get("parallelism_config") or old.get("parallelism") or {})
    devices, batch, micro = training["num_gpus"], training["global_batch_size"], training.get("micro_batch_size", 1)
    tp = division.get("tensor_model_parallel_size") or division.get("tensor_parallel_size") or 1
    pp = division.get("pipeline_model_parallel_size") or division.get("pipeline_parallel_size") or 1
    strategy = division.get("strategy_name") or division.get("strategy") or training.get("parallel_strategy") or UNKNOWN
    dp = division.get("data_parallel_size") or devices // (tp * pp)
    ga = division.get("gradient_accumulation_steps") or training.get("gradient_accumulation_steps") or batch // (micro * dp)
    sizes = {"global_batch_size": batch, "micro_batch_size": micro, "sequence_length": training["sequence_length"]}
    config = TrainingConfig(len(times), **sizes, num_gpus=devices, parallel_strategy=strategy, gradient_accumulation_steps=ga)
    metrics = derive(times, min(1, len(times) - 1), config, gpu.get("gpu_cores"))
    known, stated_memory = MemoryMetrics.__dataclass_fields__, dict(old.get("memory_metrics") or {})
    memory = {name: value for name, value in stated_memory.items() if value is not None and name in known}
    method = _UNSTATED if memory else "not measured: the older file states no memory"
    stack = str(gpu.get("software_stack", "")).lower()
    gpu |= {"device_count": devices, "software_stack": stack if stack in ("rocm", "cuda", "cpu") else None}
    platform = _OLDER_PLATFORMS.get(stated["platform"].lower(), stated["platform"].lower())
    document = {
        "schema_version": SCHEMA_VERSION,
        "platform": platform,
        "framework": stated["framework"],
        "model": stated["model"],
        "dataset": old.get("dataset") or stated.get("dataset") or UNKNOWN,
        "precision": old.get("precision") or stated.get("precision") or UNKNOWN,
        "timestamp": old.get("timestamp") or UNKNOWN,
        "source": "migrated",
        "gpu_info": {name: value for name, value in gpu.items() if name in GpuInfo.__dataclass_fields__},
        "model_info": old.get("model_info"),
        "parallelism_config": asdict(Parallelism(strategy, tp, pp, dp, ga)),
        "training_config": asdict(config),
        "performance_metrics": asdict(metrics),
        "step_times": times,
        "loss_values": old["loss_values"],
        "learning_rates": old["learning_rates"],
        "memory_metrics": {"measurement_method": method} | memory,
        "source_log_file": old.get("source_log_file") or old.get("source"),
    }
    return parse_result(json.loads(json.dumps(document)), where)


def _document(path: Path) -> object:
    next_step = "move the file away and run the combination again, or give a file that `hyperion frameworks run` wrote"
    try:
        return read_json(path, ResultError, next_step)
    except OSError as error:
        raise ResultError(f"the file cannot be read: {error.strerror}", where=path, next_step=next_step) from error


def _near(stated: float, expected: float) -> bool:
    return abs(stated - expected) <= _ROUNDING * abs(expected)
