"""How the devices of a run are divided: tensor (TP), pipeline (PP) and data parallelism (DP), and gradient accumulation (GA)."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from hyperion.errors import HyperionError
from hyperion.models.llama import LlamaShape

Platform = Literal["amd", "nvd"]
Family = Literal["llama", "qwen"]


@dataclass(frozen=True)
class Preset:
    """TP and PP of a preset, for one model on one platform. DP and GA are computed from the devices and the batch."""

    tensor: Annotated[int, Field(ge=1)] = 1
    pipeline: Annotated[int, Field(ge=1)] = 1


Presets = dict[str, dict[Family, dict[Platform, Preset]]]
_FAMILIES: tuple[Family, ...] = ("llama", "qwen")
# By preset, model and platform. All presets work with eight GPUs, and also with the tiny models.
PRESETS: Presets = {
    # With sharding, an 8 B model and its optimizer need no tensor parallelism on an AMD Instinct MI300X (192 GB). GPUs with 80 GB
    # need it.
    "max_perf": {model: {"amd": Preset(), "nvd": Preset(tensor=2)} for model in _FAMILIES},
    "identical": {model: {"amd": Preset(), "nvd": Preset()} for model in _FAMILIES},
    "memory_opt": {model: {"amd": Preset(2, 2), "nvd": Preset(2, 2)} for model in _FAMILIES},
    # Pipeline stages exchange only the activations at their boundaries.
    "minimal_comm": {model: {"amd": Preset(), "nvd": Preset(pipeline=2)} for model in _FAMILIES},
    "balanced": {model: {"amd": Preset(tensor=2), "nvd": Preset(tensor=2)} for model in _FAMILIES},
}


@dataclass(frozen=True)
class Parallelism:
    """Parallelism of a run, as written in a result file.

    Args:
        strategy_name: name of the preset.
        tensor_model_parallel_size: TP, ranks that share each layer.
        pipeline_model_parallel_size: PP, groups of consecutive layers.
        data_parallel_size: DP, copies of the model.
        gradient_accumulation_steps: GA, micro-batches of a rank in an optimizer step.
    """

    strategy_name: str
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    gradient_accumulation_steps: int

    def faults(self, devices: int, global_batch_size: int, micro_batch_size: int, shape: LlamaShape | None = None) -> list[str]:
        """Return a message for each condition that is violated, such as TP·PP·DP = devices, with the numbers.

        Heads and layers are not checked if `shape` is None.
        """
        tp, pp, dp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size, self.data_parallel_size
        ga, found = self.gradient_accumulation_steps, []
        if min(tp, pp, dp, ga) < 1:
            return [f"TP {tp}, PP {pp}, DP {dp} and GA {ga} must all be at least 1"]
        if tp * pp * dp != devices:
            found.append(f"TP {tp} x PP {pp} x DP {dp} is {tp * pp * dp}, but there are {devices} devices")
        if ga * micro_batch_size * dp != global_batch_size:
            found.append(f"GA {ga} x micro-batch {micro_batch_size} x DP {dp} is not the global batch of {global_batch_size}")
        if shape is not None:
            heads = {"attention heads": shape.num_attention_heads, "key-value heads": shape.num_key_value_heads}
            found += [f"{count} {name} cannot be divided by TP {tp}" for name, count in heads.items() if count % tp]
            if shape.num_hidden_layers % pp:
                found.append(f"{shape.num_hidden_layers} layers cannot be divided by PP {pp}")
        return found


def divide(
    name: str, preset: Preset, devices: int, global_batch_size: int, micro_batch_size: int, shape: LlamaShape, where: str
) -> Parallelism:
    """Return the parallelism of a run: DP = devices / (TP·PP), and GA = global batch / (micro-batch·DP).

    Raises:
        HyperionError: a condition of `Parallelism.faults` is violated. The message lists all violated conditions.
    """
    dp = max(1, devices // (preset.tensor * preset.pipeline))
    ga = max(1, global_batch_size // (micro_batch_size * dp))
    parallelism = Parallelism(name, preset.tensor, preset.pipeline, dp, ga)
    if faults := parallelism.faults(devices, global_batch_size, micro_batch_size, shape):
        raise HyperionError(
            f"the preset {name} does not fit: {'; '.join(faults)}",
            where=where,
            next_step="choose another preset with --preset, another number of devices, or another batch in config.yaml",
        )
    return parallelism
