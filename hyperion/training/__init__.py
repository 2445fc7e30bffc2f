"""Training: engines that run the steps, the training loop, precisions, optimizers, schedules, seeds and evaluation."""

from hyperion.training.captured import compile_options
from hyperion.training.clocks import EXIT_CODE, Interrupted, StopFlag
from hyperion.training.engine import Engine, ImageEngine, LanguageEngine, NonFiniteError, StepMetrics, TorchEngine
from hyperion.training.evaluate import ImageEvaluation, LanguageEvaluation, evaluate_images, evaluate_language
from hyperion.training.loop import Batches, EpochRecord, History, TrainingPlan, mean_over_ranks, train
from hyperion.training.lora import (
    add_lora,
    expected_lora_parameters,
    frozen_sha256,
    load_adapter,
    save_adapter,
    trainable_parameter_count,
)
from hyperion.training.memory_estimate import (
    ActivationBytes,
    MemoryEstimate,
    estimate_memory,
    fewest_checkpointed,
    image_activations,
    language_activations,
    largest_batch,
)
from hyperion.training.recipe import (
    TRAINING_DTYPES,
    LossScaler,
    Precision,
    WarmupCosine,
    adamw,
    choose_precision,
    decay_groups,
    rng_state,
    seed_everything,
    set_rng_state,
    sgd_nesterov,
)

__all__ = [
    "EXIT_CODE",
    "TRAINING_DTYPES",
    "ActivationBytes",
    "Batches",
    "Engine",
    "EpochRecord",
    "History",
    "ImageEngine",
    "ImageEvaluation",
    "Interrupted",
    "LanguageEngine",
    "LanguageEvaluation",
    "LossScaler",
    "MemoryEstimate",
    "NonFiniteError",
    "Precision",
    "StepMetrics",
    "StopFlag",
    "TorchEngine",
    "TrainingPlan",
    "WarmupCosine",
    "adamw",
    "add_lora",
    "choose_precision",
    "compile_options",
    "decay_groups",
    "estimate_memory",
    "evaluate_images",
    "evaluate_language",
    "expected_lora_parameters",
    "fewest_checkpointed",
    "frozen_sha256",
    "image_activations",
    "language_activations",
    "largest_batch",
    "load_adapter",
    "mean_over_ranks",
    "rng_state",
    "save_adapter",
    "seed_everything",
    "set_rng_state",
    "sgd_nesterov",
    "train",
    "trainable_parameter_count",
]
