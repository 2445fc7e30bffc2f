"""Pure `nn.Module`s that know no device, precision or parallelism; each exports its layout as data."""

from hyperion.models.layout import Layout, ModelFlops, parameter_count
from hyperion.models.resnet import ResNet18, flops_per_image, resnet18
from hyperion.models.transformer import TransformerConfig, TransformerLM, flops_per_token, named_config

__all__ = [
    "Layout",
    "ModelFlops",
    "ResNet18",
    "TransformerConfig",
    "TransformerLM",
    "flops_per_image",
    "flops_per_token",
    "named_config",
    "parameter_count",
    "resnet18",
]
