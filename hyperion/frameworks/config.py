"""Read and validate config.yaml.

Each key of the file is a field of a dataclass in this module. An unknown key is an error. An environment variable has precedence
over config.yaml, which has precedence over the default of the field.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field

from hyperion.errors import HyperionError
from hyperion.forms import FieldError, read_form
from hyperion.frameworks.parallelism import PRESETS, Platform, Presets
from hyperion.paths import expanded
from hyperion.untrusted import MIB, read_bounded

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
Line = Annotated[str, Field(pattern=r"^.*$", max_length=200)]
# File names without a folder.
PictureName = Annotated[str, Field(pattern=r"^\w[\w. -]*\.png$")]
ReportName = Annotated[str, Field(pattern=r"^\w[\w. -]*\.md$")]
OUTPUT, PRIMUS, MEGATRON_DEEPSPEED = "CONFIG_OUTPUT_DIR", "PRIMUS_PATH", "MEGATRON_DEEPSPEED_PATH"
GPU_COUNTS = {"amd": "CONFIG_AMD_NUM_GPUS", "nvd": "CONFIG_NVD_NUM_GPUS"}
# Number of GPUs of the documented node. Only a dry run uses it, on a machine without a device of the platform.
DOCUMENTED_GPUS = 8
LONGEST_RUN = 1_000_000  # steps


class ConfigError(HyperionError):
    """Raised if config.yaml or an environment variable has a value that cannot be used."""


@dataclass(frozen=True)
class Sizes:
    """Batch and length of a step. Rows are sequences of `sequence_length` scored tokens."""

    global_batch_size: Count = 64
    micro_batch_size: Count = 1
    sequence_length: Count = 2048


@dataclass(frozen=True)
class Training:
    """Training options. `learning_rate` is constant. `sizes` is used for full models, `tiny` for the tiny models."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 42
    steps: Annotated[int, Field(ge=2, le=LONGEST_RUN)] = 50
    precision: Literal["bf16", "fp32"] = "bf16"
    learning_rate: Positive = 3e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Positive = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: Positive = 1.0
    sizes: Sizes = Sizes()
    tiny: Sizes = Sizes(16, 2, 32)


@dataclass(frozen=True)
class Hardware:
    """Number of GPUs on each platform, and the largest number of ranks on a CPU. "auto" means all GPUs that PyTorch sees."""

    amd_num_gpus: Count | Literal["auto"] = "auto"
    nvd_num_gpus: Count | Literal["auto"] = "auto"
    cpu_ranks: Count = 2


@dataclass(frozen=True)
class Strategy:
    """The chosen preset, and all presets by name, model and platform."""

    preset: str = "identical"
    presets: Presets = field(default_factory=lambda: PRESETS)


@dataclass(frozen=True)
class Benchmark:
    """Steps that are not timed at the start of a run, and the time limit of a run in seconds.

    In an observed run, at least the first half of the steps is not timed.
    """

    skip_first_steps: Annotated[int, Field(ge=0)] = 1
    timeout_s: Positive = 7200.0


@dataclass(frozen=True)
class GpuPrices:
    """Price of a GPU hour on each platform, in one currency. None means that the price is unknown. No default is assumed."""

    amd: Positive | None = None
    nvd: Positive | None = None


@dataclass(frozen=True)
class Comparison:
    """File names of `hyperion frameworks compare`, the resolution of its picture in dots per inch, and the user's prices.

    `price_source` says where the prices come from, and in which currency they are.
    """

    plot: PictureName = "compare.png"
    report: ReportName = "comparison_report.md"
    dpi: Annotated[int, Field(ge=50, le=600)] = 150
    price_per_gpu_hour: GpuPrices = GpuPrices()
    price_source: Line = ""


@dataclass(frozen=True)
class Paths:
    """Folder of the JSON files ("" is results/frameworks), and folders of frameworks that run from their sources."""

    output_dir: str = ""
    primus: str = ""
    megatron_deepspeed: str = ""


@dataclass(frozen=True)
class RocmSettings:
    """Environment variables of a run on ROCm. A variable whose setting is "" is not changed.

    No variable is set on other platforms.

    `expandable_segments` is off, so that all platforms use the same allocator: PyTorch ignores it on ROCm before version 7, and
    supports it on ROCm 7 since 2026 only. RCCL reads NCCL_DEBUG. No library reads RCCL_DEBUG, so it is not set.
    """

    expandable_segments: bool = False
    hsa_no_scratch_reclaim: Literal["", "0", "1"] = "1"
    hsa_enable_sdma: Literal["", "0", "1"] = "1"
    nccl_debug: Literal["", "VERSION", "WARN", "INFO", "TRACE"] = ""

    def variables(self) -> dict[str, str]:
        """Return the environment variables."""
        segments = "expandable_segments:True" if self.expandable_segments else ""
        values = {"PYTORCH_ALLOC_CONF": segments, "HSA_NO_SCRATCH_RECLAIM": self.hsa_no_scratch_reclaim}
        values |= {"HSA_ENABLE_SDMA": self.hsa_enable_sdma, "NCCL_DEBUG": self.nccl_debug}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True)
class Docker:
    """Image and shared memory of `train_docker_amd.sh`."""

    image: str = "rocm/primus:v25.11"
    shm_size: str = "16G"


@dataclass(frozen=True)
class Settings:
    """Settings of any framework: whether it runs if FRAMEWORKS is not set, and its platforms."""

    enabled: bool = True
    platforms: tuple[Platform, ...] = ("amd", "nvd")


@dataclass(frozen=True)
class DeepSpeedSettings(Settings):
    """DeepSpeed's ZeRO stage."""

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 3


@dataclass(frozen=True)
class NemoSettings(Settings):
    """A recipe (YAML file) of NeMo AutoModel."""

    recipe: str = ""


@dataclass(frozen=True)
class PrimusSettings(Settings):
    """Primus' experiment files, relative to its folder."""

    platforms: tuple[Platform, ...] = ("amd",)
    llama_experiment: str = "examples/megatron/configs/MI300X/llama3.1_8B-BF16-pretrain.yaml"
    qwen_experiment: str = "examples/megatron/configs/MI300X/qwen2.5_7B-BF16-pretrain.yaml"


@dataclass(frozen=True)
class MegatronDeepSpeedSettings(Settings):
    """Settings of Megatron-DeepSpeed: the prefix of its .bin and .idx files, its tokenizer, and its ZeRO stage."""

    data_path: str = ""
    tokenizer: str = ""
    zero_stage: Annotated[int, Field(ge=0, le=1)] = 1


@dataclass(frozen=True)
class Frameworks:
    """Settings of the six documented frameworks, and of megatron-core, which runs only if it is named or enabled."""

    tran: Settings = Settings()
    deep: DeepSpeedSettings = DeepSpeedSettings()
    fsdp: Settings = Settings()
    nemo: NemoSettings = NemoSettings()
    prim: PrimusSettings = PrimusSettings()
    mgds: MegatronDeepSpeedSettings = MegatronDeepSpeedSettings()
    mcore: Settings = Settings(enabled=False)


@dataclass(frozen=True)
class Config:
    """The whole configuration. `version` is the version of the format of config.yaml."""

    version: Literal[1] = 1
    models: Annotated[tuple[Literal["llama", "qwen"], ...], Field(min_length=1)] = ("llama", "qwen")
    dataset: Literal["wikitext-2", "synthetic"] = "wikitext-2"
    training: Training = Training()
    hardware: Hardware = Hardware()
    parallelism: Strategy = field(default_factory=Strategy)
    benchmark: Benchmark = Benchmark()
    comparison: Comparison = Comparison()
    paths: Paths = Paths()
    rocm: RocmSettings = RocmSettings()
    docker: Docker = Docker()
    frameworks: Frameworks = Frameworks()


def load_config(path: Path | None, environment: Mapping[str, str] | None = None) -> Config:
    """Return the configuration of a file, or the defaults if there is none, overridden by environment variables.

    Raises:
        ConfigError: the file or a variable has a value that cannot be used. The message names the key and the value.
    """
    variables = os.environ if environment is None else environment
    config = Config() if path is None else parse_config(_content(path), str(path))
    paths, hardware = config.paths, config.hardware
    paths = replace(
        paths,
        output_dir=variables.get(OUTPUT) or paths.output_dir,
        primus=variables.get(PRIMUS) or paths.primus,
        megatron_deepspeed=variables.get(MEGATRON_DEEPSPEED) or paths.megatron_deepspeed,
    )
    counts = {f"{key}_num_gpus": _count(variables[name], name) for key, name in GPU_COUNTS.items() if variables.get(name)}
    config = replace(config, paths=paths, hardware=replace(hardware, **counts))
    require_preset(config, f"{path or 'defaults'}: parallelism.preset")
    for name, source in (("paths.primus", PRIMUS), ("paths.megatron_deepspeed", MEGATRON_DEEPSPEED)):
        folder = getattr(paths, name.partition(".")[2])
        if folder and not expanded(folder).is_dir():
            origin = source if variables.get(source) else f"{path}: {name}"
            raise ConfigError(f"{folder!r} is not a folder", where=origin, next_step=f"correct it, or unset it: {source}=")
    return config


def require_preset(config: Config, where: str) -> None:
    """Raise a ConfigError if the chosen preset is not one of the presets.

    Args:
        config: the configuration.
        where: the option or the file that names the preset.
    """
    if config.parallelism.preset not in config.parallelism.presets:
        raise ConfigError(
            f"there is no preset {config.parallelism.preset!r}",
            where=where,
            next_step=f"choose from {', '.join(config.parallelism.presets)}",
        )


def parse_config(content: bytes | str, where: str) -> Config:
    """Convert a YAML document to a configuration.

    Raises:
        ConfigError: the document is not YAML, contains a duplicate key, an alias or an unknown key, or has an invalid value.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        document = yaml.load(text, _StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        what = " ".join(str(error).split())[:300]
        raise ConfigError(f"not a valid YAML document: {what}", where=where, next_step="correct the file") from error
    try:
        return read_form(Config, {} if document is None else document, "config")
    except (FieldError, RecursionError, ValueError) as error:
        what = error.what if isinstance(error, FieldError) else f"a value cannot be read: {error}"
        next_step = "docs/running.md and the comments of config.yaml list the keys; write exponents with a point, as 3.0e-4"
        raise ConfigError(what, where=where, next_step=next_step) from error


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that refuses duplicate keys and aliases.

    The standard loader would silently drop the first value of a duplicate key. Nested aliases could grow without bound.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not supported")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        texts = [key for key in keys if isinstance(key, str)]
        if len(texts) < len(keys):
            raise yaml.YAMLError(f"a key is not a text: {next(key for key in keys if not isinstance(key, str))!r:.60}")
        if doubled := next((key for key in texts if texts.count(key) > 1), None):
            raise yaml.YAMLError(f"the key {doubled!r} occurs twice")
        return super().construct_mapping(node, deep)


def _content(path: Path) -> bytes:
    next_step = "give the path of a config.yaml with --config, or leave it out to use the defaults"
    try:
        return read_bounded(path, ConfigError, next_step, limit_bytes=MIB)
    except OSError as error:
        raise ConfigError(f"the file cannot be read: {error.strerror}", where=path, next_step=next_step) from error


def _count(text: str, variable: str) -> int:
    # int() would also accept " 8", "8_0" and digits of other scripts.
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0) or len(text) > 9:
        raise ConfigError(f"{text!r} is not a number of GPUs above 0", where=variable, next_step=f"set {variable}=8 or unset it")
    return int(text)
