"""Turn the selected combinations into plans: the work, the number of devices and the command of each combination."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import hyperion
from hyperion.engines import STACKS
from hyperion.engines.environments import environment_folder, installed_python, why_not_installed
from hyperion.engines.external import ENTRIES, why_not_found
from hyperion.errors import HyperionError
from hyperion.frameworks.config import DOCUMENTED_GPUS, GPU_COUNTS, MEGATRON_DEEPSPEED, PRIMUS, Config
from hyperion.frameworks.parallelism import Parallelism, Preset, divide
from hyperion.frameworks.result import UNKNOWN, file_name, label_fault
from hyperion.frameworks.shapes import MODELS, TINY, family, is_tiny
from hyperion.hardware import MachineFacts
from hyperion.paths import expanded, results_folder

TITLES = {
    "tran": "Hugging Face Trainer",
    "deep": "DeepSpeed",
    "fsdp": "PyTorch FSDP2 (this library's engine)",
    "nemo": "NeMo",
    "prim": "Primus",
    "mgds": "Megatron-DeepSpeed",
    "mcore": "megatron-core",
}
_ALIASES = {
    "transformers": "tran",
    "hf": "tran",
    "trainer": "tran",
    "deepspeed": "deep",
    "zero": "deep",
    "fsdp2": "fsdp",
    "automodel": "nemo",
    "primus": "prim",
    "megatron-deepspeed": "mgds",
    "megatron_deepspeed": "mgds",
    "megatron-core": "mcore",
    "megatron_core": "mcore",
}
EXTERNAL = {"nemo": "NeMo", "prim": "Primus", "mgds": "Megatron-DeepSpeed"}
# (bytes of a parameter on each device, bytes that the devices divide): weights, gradients and both moments of AdamW in float32.
# ZeRO-1 and ZeRO-2 also keep a copy of the part of the weights that a device updates, although the weights are float32 already.
_STATE_BYTES = {
    "HF Trainer": (16, 0),
    "hyperion fsdp2": (0, 16),
    "deepspeed zero-1": (8, 12),
    "deepspeed zero-2": (4, 16),
    "deepspeed zero-3": (0, 16),
    "megatron-core": (16, 0),
}
# The stack that divides a model by tensor and pipeline parallelism. The other stacks are data-parallel.
MODEL_PARALLEL = "megatron-core"
_ROCM, _CUDA = "amd", "nvd"
_SDMA = "HSA_ENABLE_SDMA"


@dataclass(frozen=True)
class Plan:
    """Everything that is needed to run one combination.

    Args:
        asked: platform whose settings are used. It is the platform of the script.
        platform: platform of this machine: "amd", "nvd", or "cpu" for the rehearsal of a tiny model.
        framework, model, dataset, precision: the combination.
        devices: number of GPUs, or of ranks on a CPU.
        work: sizes and options of the optimizer.
        parallelism: division of the devices.
        stack: name in `hyperion.engines.STACKS`, or "" for a framework that runs by its own command.
        command, folder, files: the framework's own command, its working folder, and files to write before it starts.
        environment: environment variables of the run.
        skipped_steps: steps that are not timed.
        timeout_s: time limit.
        machine: names of the devices, and versions of torch, HIP, CUDA and the packages that train.
        reason: why this combination cannot run here, or "".
    """

    asked: str
    platform: str
    framework: str
    model: str
    dataset: str
    precision: str
    devices: int
    work: dict[str, Any]
    parallelism: Parallelism
    stack: str
    command: tuple[str, ...]
    folder: str
    files: dict[str, str]
    environment: dict[str, str]
    skipped_steps: int
    timeout_s: float
    machine: dict[str, Any]
    reason: str

    @property
    def file_name(self) -> str:
        """Name of the result file."""
        return file_name(self.platform, self.framework, self.model, self.dataset, self.precision)

    @property
    def digest(self) -> str:
        """Hash of everything that the result depends on. A finished run with the same hash is not repeated."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("asked", "timeout_s", "reason")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def select_frameworks(names: str | Sequence[str], config: Config, extra: Sequence[str] = ()) -> list[str]:
    """Return the codes of the named frameworks in the given order, each once. No name selects those that are enabled.

    Args:
        names: codes or aliases, such as "tran,deepspeed".
        config: the configuration.
        extra: further valid codes.

    Raises:
        HyperionError: a name is unknown, the text has no name, or no name is given and no framework is enabled.
    """
    valid, where = (*TITLES, *extra), "FRAMEWORKS or --frameworks"
    given = _words(names, where, f"choose from {', '.join(valid)}, or leave it out")
    if not given:
        enabled = [code for code in TITLES if getattr(config.frameworks, code).enabled]
        if not enabled:
            next_step = "set enabled: true for one of them, or name it with --frameworks"
            raise HyperionError("no framework is enabled", where="frameworks of config.yaml", next_step=next_step)
        return enabled
    codes = [_ALIASES.get(name, name) for name in given]
    if unknown := [name for name, code in zip(given, codes, strict=True) if code not in valid]:
        aliases = ", ".join(f"{alias} ({code})" for alias, code in _ALIASES.items())
        raise HyperionError(
            f"no framework is named {', '.join(map(repr, unknown))}",
            where=where,
            next_step=f"choose from {', '.join(valid)}; other names: {aliases}",
        )
    return list(dict.fromkeys(codes))


def select_models(names: str | Sequence[str], config: Config) -> list[str]:
    """Return the names of the selected models, or of the models in the configuration if none is named.

    The name "tiny" replaces each selected model by its small version for a CPU.

    Raises:
        HyperionError: a name is unknown, or the text has no name. The message lists the valid ones.
    """
    choices = f"choose from {', '.join(MODELS)}, or tiny"
    given = _words(names, "--model", choices)
    tiny, named = "tiny" in given, [name for name in given if name != "tiny"]
    if unknown := [name for name in named if name not in MODELS]:
        raise HyperionError(f"no model is named {', '.join(map(repr, unknown))}", where="--model", next_step=choices)
    models = named or list(config.models)
    return list(dict.fromkeys(f"{family(model)}{TINY}" if tiny else model for model in models))


def platform_of(facts: MachineFacts) -> str:
    """Return "amd", "nvd", or "cpu" for a machine on which PyTorch sees no GPU."""
    return ("amd" if facts.hip else "nvd") if facts.gpus else "cpu"


def asked_platform(asked: str, facts: MachineFacts, dry_run: bool) -> str:
    """Return the platform whose settings are used. "auto" means the platform of this machine, or "nvd" if it has no GPU.

    Raises:
        HyperionError: this machine has GPUs of the other platform.
    """
    here = platform_of(facts)
    if asked == "auto":
        return here if here != "cpu" else "nvd"
    if here not in ("cpu", asked) and not dry_run:
        raise HyperionError(
            f"the platform {asked} was asked for, but PyTorch {facts.torch} sees {facts.gpus[0].name}, which is {here}",
            where="--platform",
            next_step=f"use train_{here}.sh, or look at the plan with --dry-run",
        )
    return asked


def resolve(
    config: Config,
    framework: str,
    model: str,
    asked: str,
    facts: MachineFacts,
    dry_run: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Plan:
    """Return the plan of a combination.

    Args:
        config: the configuration, with environment variables applied.
        framework: code of the framework.
        model: name of the model.
        asked: platform whose settings are used, "amd" or "nvd".
        facts: facts about this machine.
        dry_run: if True, the plan may be for another machine.
        environment: environment variables that have precedence over `rocm` of the configuration.

    Raises:
        HyperionError: the preset does not fit the devices and the batch, there are fewer GPUs than asked for, or no step would be
            timed.
    """
    variables = os.environ if environment is None else environment
    here, settings, training = platform_of(facts), getattr(config.frameworks, framework), config.training
    platform = here if is_tiny(model) and here == "cpu" else asked
    devices = _devices(config, asked, platform, facts, dry_run)
    sizes = training.tiny if is_tiny(model) else training.sizes
    name = config.parallelism.preset
    where = f"preset {name}, model {model}, platform {asked}"
    preset = config.parallelism.presets[name].get(family(model), {}).get(asked)  # type: ignore[call-overload]
    if preset is None:
        raise HyperionError("the preset has no entry", where=where, next_step="add it in config.yaml, or choose another preset")
    batch = (sizes.global_batch_size, sizes.micro_batch_size)
    parallelism = divide(name, preset, devices, *batch, MODELS[model].shape, where)
    work = asdict(sizes) | {field: getattr(training, field) for field in _OPTIONS}
    rocm = {key: variables.get(key) or value for key, value in config.rocm.variables().items()} if platform == _ROCM else {}
    external = framework in EXTERNAL
    stack = {"tran": "HF Trainer", "fsdp": "hyperion fsdp2", "mcore": MODEL_PARALLEL}.get(framework, "")
    stack = f"deepspeed zero-{settings.zero_stage}" if framework == "deep" else stack
    command, folder, files, extra = _command(config, framework, model, devices, work, parallelism) if external else _NO_COMMAND
    # The observer reads the gradients in the first half of the steps, which takes time.
    skipped = max(config.benchmark.skip_first_steps, 0 if external else training.steps // 2)
    if skipped >= training.steps:
        raise HyperionError(
            f"no step would be timed: {config.benchmark.skip_first_steps} of {training.steps} steps are skipped",
            where="benchmark.skip_first_steps",
            next_step="set a smaller number in config.yaml, or more steps with training.steps or --steps",
        )
    plan = Plan(
        asked,
        platform,
        framework,
        model,
        _dataset(config, framework),
        training.precision,
        devices,
        work,
        parallelism,
        stack,
        command,
        folder,
        files,
        extra | rocm,
        skipped,
        config.benchmark.timeout_s,
        {"devices": sorted({gpu.name for gpu in facts.gpus}) or [facts.cpu.name]}
        | {name: getattr(facts, name) for name in ("torch", "hip", "cuda")}
        | ({"packages": _packages(stack)} if stack in STACKS else {}),
        "",
    )
    return Plan(**{**vars(plan), "reason": _why_not(plan, config, facts, preset)})


_Command = tuple[tuple[str, ...], str, dict[str, str], dict[str, str]]
_NO_COMMAND: _Command = (), "", {}, {}
_OPTIONS = ("seed", "steps", "learning_rate", "beta1", "beta2", "eps", "weight_decay", "clip_norm")


def _why_not(plan: Plan, config: Config, facts: MachineFacts, preset: Preset) -> str:
    settings, title = getattr(config.frameworks, plan.framework), TITLES[plan.framework]
    if plan.asked not in settings.platforms:
        supported = ", ".join(settings.platforms)
        return f"unavailable: {title} supports {supported}, not {plan.asked}; next step: select other frameworks with FRAMEWORKS="
    if plan.framework in EXTERNAL:
        return _why_no_command(plan, config, facts)
    if plan.stack not in STACKS:
        raise HyperionError(f"no framework is named {plan.stack!r}", where="hyperion/engines/stacks.py")
    if preset != Preset() and plan.stack != MODEL_PARALLEL:
        model_parallel = f"TP {preset.tensor} and PP {preset.pipeline}"
        return f"unavailable: the preset {plan.parallelism.strategy_name} needs {model_parallel}, but {title} runs data-parallel \
here; next step: --preset identical, or --frameworks mcore"
    if plan.stack == MODEL_PARALLEL and plan.precision != "fp32":
        return f"unavailable: {title} trains in fp32 only here, not {plan.precision}; next step: --precision fp32"
    if not is_tiny(plan.model):
        if platform_of(facts) != plan.platform:
            return f"unavailable: {MODELS[plan.model].title} needs a GPU of platform {plan.asked}; next step: --model tiny"
        whole, divided = _STATE_BYTES[plan.stack]
        replica = preset.tensor * preset.pipeline  # devices that divide a replica of the model
        needed = (whole / replica + divided / plan.devices) * MODELS[plan.model].parameters
        if needed > (memory := facts.gpus[0].total_memory_bytes):
            return f"unavailable: weights, gradients and optimizer need {needed / 1e9:.0f} GB on each GPU, which has \
{memory / 1e9:.0f} GB; next step: use more GPUs with a framework that shards them, or --model tiny"
    return STACKS[plan.stack].why_absent()


def _why_no_command(plan: Plan, config: Config, facts: MachineFacts) -> str:
    named = {PRIMUS: config.paths.primus, MEGATRON_DEEPSPEED: config.paths.megatron_deepspeed}
    if reason := why_not_found(EXTERNAL[plan.framework], named):
        return reason
    if platform_of(facts) != plan.asked:
        return f"unavailable: {TITLES[plan.framework]} needs a GPU of platform {plan.asked}; next step: run it on such a machine"
    if plan.framework == "nemo":
        return "unavailable: NeMo was found, but its log is not read; next step: run the command of --dry-run by itself"
    if is_tiny(plan.model):
        return f"unavailable: {TITLES[plan.framework]} has no tiny twin; next step: use the full model"
    if plan.framework == "prim":
        if plan.precision != "bf16":
            return f"unavailable: the experiment files of Primus train in bf16, not {plan.precision}; next step: --precision bf16"
        if plan.environment[_SDMA] != "1":
            return f"unavailable: run_pretrain.sh of Primus always sets {_SDMA}=1; next step: set {_SDMA}=1 or leave it out"
    if plan.framework == "mgds":
        if MODELS[plan.model].architecture == "qwen2":
            return "unavailable: Megatron-DeepSpeed cannot add biases to q, k and v only, as in Qwen2.5; next step: --model llama"
        settings = config.frameworks.mgds
        if not (settings.data_path and settings.tokenizer):
            return "unavailable: frameworks.mgds.data_path or tokenizer is not set; next step: set them in config.yaml"
        if fault := label_fault(plan.model, plan.dataset, plan.precision):
            return f"unavailable: {fault}; next step: rename the files of frameworks.mgds.data_path"
        return why_not_installed("deepspeed")
    return ""


def _packages(stack: str) -> dict[str, str]:
    """Return the versions of the packages with which a stack trains, and the folder of its own environment, whose name depends on
    its pinned requirements. A package that is not installed is left out.
    """
    entry = STACKS[stack]
    found = {"environment": environment_folder(entry.environment).name} if entry.environment else {}
    # transformers defines the model of every stack.
    for name in sorted({"transformers", *(name.partition(".")[0] for name in entry.packages)}):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = hyperion.__version__ if name == "hyperion" else importlib.metadata.version(name)
    return found


def _dataset(config: Config, framework: str) -> str:
    """Return the name of the data set that a framework reads.

    The experiment files of Primus use mock data. Megatron-DeepSpeed reads its own indexed files.
    """
    if framework != "mgds":
        return "mock" if framework == "prim" else config.dataset
    return re.sub(r"[^A-Za-z0-9.-]+", "-", Path(config.frameworks.mgds.data_path).name).strip("-.") or UNKNOWN


def _devices(config: Config, asked: str, platform: str, facts: MachineFacts, dry_run: bool) -> int:
    wanted = getattr(config.hardware, f"{asked}_num_gpus")
    if platform == "cpu":
        return min(config.hardware.cpu_ranks, config.hardware.cpu_ranks if wanted == "auto" else wanted)
    visible = len(facts.gpus) if platform_of(facts) == asked else 0
    if wanted == "auto":
        return visible or DOCUMENTED_GPUS
    if visible and wanted > visible and not dry_run:
        raise HyperionError(
            f"{wanted} GPUs are asked for, but PyTorch sees {visible}",
            where=f"{GPU_COUNTS[asked]} or hardware.{asked}_num_gpus",
            next_step=f"set {GPU_COUNTS[asked]}={visible}",
        )
    return wanted


def _command(
    config: Config, framework: str, model: str, devices: int, work: dict[str, Any], parallelism: Parallelism
) -> _Command:
    """Return (command, working folder, files, environment variables) of a framework that runs by its own entry point."""
    files = ENTRIES[EXTERNAL[framework]].files
    rate, tp, pp = str(work["learning_rate"]), parallelism.tensor_model_parallel_size, parallelism.pipeline_model_parallel_size
    if framework == "nemo":
        return (
            (sys.executable, "-m", ENTRIES["NeMo"].module, "--config", config.frameworks.nemo.recipe or "RECIPE.yaml"),
            "",
            {},
            {},
        )
    options: dict[str, Any] = {
        "train_iters": work["steps"],
        "global_batch_size": work["global_batch_size"],
        "micro_batch_size": work["micro_batch_size"],
        "seq_length": work["sequence_length"],
        "max_position_embeddings": work["sequence_length"],
        "lr": rate,
        "min_lr": rate,
        "lr_warmup_iters": 0,
        "lr_decay_style": "constant",
        "weight_decay": work["weight_decay"],
        "adam_beta1": work["beta1"],
        "adam_beta2": work["beta2"],
        "adam_eps": work["eps"],
        "clip_grad": work["clip_norm"],
        "seed": work["seed"],
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "log_interval": 1,
    }
    if framework == "prim":
        experiment = getattr(config.frameworks.prim, f"{family(model)}_experiment")
        words = ["bash", files[1], *_flags(options, "_")]
        # run_pretrain.sh sets HSA_ENABLE_SDMA=1 whatever its environment says.
        extra = {"EXP": experiment, "GPUS_PER_NODE": str(devices), _SDMA: "1"}
        return tuple(words), _folder(config.paths.primus, PRIMUS), {}, extra
    entry, settings, bf16 = MODELS[model], config.frameworks.mgds, config.training.precision == "bf16"
    options |= {
        "num_layers": entry.shape.num_hidden_layers,
        "hidden_size": entry.shape.hidden_size,
        "ffn_hidden_size": entry.shape.intermediate_size,
        "num_attention_heads": entry.shape.num_attention_heads,
        "num_key_value_heads": entry.shape.num_key_value_heads,
        "make_vocab_size_divisible_by": 1,
        "normalization": "rmsnorm",
        "layernorm_epsilon": entry.options["rms_norm_eps"],
        "rotary_position_embeddings_theta": int(entry.options["rope_parameters"]["rope_theta"]),
        "attention_dropout": 0,
        "hidden_dropout": 0,
        "data_path": settings.data_path,
        "tokenizer_type": "HFTokenizer",
        "tokenizer_model": settings.tokenizer,
        "zero_stage": settings.zero_stage,
    }
    switches = ["--swiglu", "--use-rotary-position-embeddings", "--no-position-embedding", "--no-query-key-layer-scaling"]
    switches += ["--untie-embeddings-and-output-weights", "--disable-bias-linear", *["--bf16"] * bf16, "--deepspeed"]
    file = str(output_folder(config).absolute() / "logs" / f"deepspeed_{model}.json")
    content = {
        "train_batch_size": work["global_batch_size"],
        "train_micro_batch_size_per_gpu": work["micro_batch_size"],
        "gradient_clipping": work["clip_norm"],
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": bf16},
    }
    launcher = [installed_python("deepspeed"), "-m", "deepspeed.launcher.runner", "--num_gpus", str(devices), files[0]]
    command = (*launcher, *_flags(options, "-"), *switches, f"--deepspeed_config={file}")
    return command, _folder(config.paths.megatron_deepspeed, MEGATRON_DEEPSPEED), {file: json.dumps(content)}, {}


def _folder(named: str, variable: str) -> str:
    return str(expanded(named).absolute()) if named else f"${variable}"


def _flags(options: dict[str, Any], joint: str) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', joint)}", str(value))]


def _words(names: str | Sequence[str], where: str, next_step: str) -> list[str]:
    """Return the words of a list with commas. An empty text has none, and a text of commas and spaces is an error."""
    parts = [names] if isinstance(names, str) else names
    words = [word.strip().lower() for part in parts for word in part.split(",") if word.strip()]
    if not words and any(parts):
        raise HyperionError(f"{','.join(parts)!r} contains no name", where=where, next_step=next_step)
    return words


def output_folder(config: Config) -> Path:
    """Return the folder of the result files."""
    return expanded(config.paths.output_dir) if config.paths.output_dir else results_folder() / "frameworks"
