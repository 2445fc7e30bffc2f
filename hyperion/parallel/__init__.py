"""One model on many devices: `parallelize(model, plan, world)`, LoRA, and the invariants of ranks."""

from hyperion.parallel.lora import add_lora, expected_lora_parameters, trainable_parameter_count

__all__ = ["add_lora", "expected_lora_parameters", "trainable_parameter_count"]
