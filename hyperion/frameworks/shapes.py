"""Shapes of the two documented models, Llama-3.1-8B and Qwen2.5-7B, and their tiny twins for a CPU.

A tiny twin has the same architecture as its full model, and the same ratios of heads and widths. Its tokens are the 256 bytes.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyperion.models.llama import LlamaShape

if TYPE_CHECKING:
    from torch.nn import Parameter
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class DocumentedModel:
    """A model with random weights.

    Args:
        title: published name.
        architecture: architecture in transformers, "llama" or "qwen2". Qwen2 adds biases to the projections of q, k and v.
        shape: widths, layers, heads and vocabulary.
        parameters: number of parameters.
        options: further fields of the configuration of transformers.
    """

    title: str
    architecture: str
    shape: LlamaShape
    parameters: int
    options: dict[str, Any]


_LLAMA_ROPE = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA = {"rms_norm_eps": 1e-5, "rope_parameters": _LLAMA_ROPE | {"original_max_position_embeddings": 8192}}
_LLAMA |= {"max_position_embeddings": 131_072}
_QWEN = {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
_QWEN |= {"max_position_embeddings": 131_072}
# Shapes: config.json of meta-llama/Llama-3.1-8B and Qwen/Qwen2.5-7B.
MODELS = {
    "llama": DocumentedModel("Llama-3.1-8B", "llama", LlamaShape(4096, 32, 32, 8, 14336, 128_256), 8_030_261_248, _LLAMA),
    "qwen": DocumentedModel("Qwen2.5-7B", "qwen2", LlamaShape(3584, 28, 28, 4, 18944, 152_064), 7_615_616_512, _QWEN),
    "llama_tiny": DocumentedModel("tiny twin of Llama-3.1-8B", "llama", LlamaShape(64, 2, 8, 2, 224, 256), 139_584, _LLAMA),
    "qwen_tiny": DocumentedModel("tiny twin of Qwen2.5-7B", "qwen2", LlamaShape(112, 2, 14, 2, 592, 256), 513_360, _QWEN),
}
TINY = "_tiny"


def is_tiny(model: str) -> bool:
    """Return True for a tiny twin."""
    return model.endswith(TINY)


def family(model: str) -> str:
    """Return the name of the full model, "llama" or "qwen". It is the key of the model in the presets."""
    return model.removesuffix(TINY)


def transformers_config(model: str) -> "PreTrainedConfig":
    """Return the configuration of transformers for a name in MODELS."""
    from dataclasses import asdict

    from transformers import AutoConfig

    entry = MODELS[model]
    return AutoConfig.for_model(entry.architecture, **asdict(entry.shape), **entry.options, use_cache=False)


def build(model: str) -> "PreTrainedModel":
    """Return the model in float32 with random weights from torch's default generator, on the current default device."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(transformers_config(model), dtype=torch.float32)


def count_parameters(model: str) -> tuple[int, int]:
    """Return (all parameters, trainable parameters) of the built model. No memory is allocated for its weights."""
    parameters = _parameters(model)
    return sum(item.numel() for item in parameters), sum(item.numel() for item in parameters if item.requires_grad)


def count_vector_elements(model: str) -> int:
    """Return the number of elements in norms and biases, which are trained without weight decay."""
    return sum(item.numel() for item in _parameters(model) if item.ndim < 2)


def _parameters(model: str) -> "list[Parameter]":
    import torch

    with torch.device("meta"):
        return list(build(model).parameters())
