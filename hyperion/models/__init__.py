"""Models as plain `nn.Module`s. Their code does not depend on the device, the precision or the kind of parallelism.

Each model returns its structure as a `Layout`.
"""

from hyperion.models.layout import Layout, ModelFlops, layout_of, parameter_count
from hyperion.models.llama import (
    LlamaLM,
    LlamaShape,
    llama_flops_per_token,
    llama_folder,
    llama_lora_parameter_count,
    llama_parameter_count,
    load_llama,
    local_llama,
    random_llama_config,
    random_llama_shape,
    require_vocabulary,
    verify_llama_folder,
)
from hyperion.models.reference import REFERENCE_MODELS, ReferenceModel, reference_model
from hyperion.models.resnet import ResNet18, flops_per_image, resnet18
from hyperion.models.transformer import TransformerConfig, TransformerLM, flops_per_token, named_config

__all__ = [
    "REFERENCE_MODELS",
    "Layout",
    "LlamaLM",
    "LlamaShape",
    "ModelFlops",
    "ReferenceModel",
    "ResNet18",
    "TransformerConfig",
    "TransformerLM",
    "flops_per_image",
    "flops_per_token",
    "layout_of",
    "llama_flops_per_token",
    "llama_folder",
    "llama_lora_parameter_count",
    "llama_parameter_count",
    "load_llama",
    "local_llama",
    "named_config",
    "parameter_count",
    "random_llama_config",
    "random_llama_shape",
    "reference_model",
    "require_vocabulary",
    "resnet18",
    "verify_llama_folder",
]
