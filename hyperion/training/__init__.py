"""Training: a loop over an Engine, with precision, optimizers, learning-rate schedules, seeds and evaluation."""

from hyperion.training.activations import ActivationBytes, image_activations, language_activations
from hyperion.training.baseline_engines import ImageEngine, LanguageEngine
from hyperion.training.captured import compile_options
from hyperion.training.engine import Engine, StepMetrics, TorchEngine
from hyperion.training.evaluate import ImageEvaluation, LanguageEvaluation, evaluate_images, evaluate_language
from hyperion.training.history import EpochRecord, History, mean_over_ranks
from hyperion.training.loop import Batches, Plan, train
from hyperion.training.memory_estimate import MemoryEstimate, estimate_memory, fewest_checkpointed, largest_batch
from hyperion.training.nonfinite import NonFiniteError
from hyperion.training.optimizers import WarmupCosine, adamw, decay_groups, sgd_nesterov
from hyperion.training.precision import TRAINING_DTYPES, LossScaler, Precision, choose_precision
from hyperion.training.seeds import rng_state, seed_everything, set_rng_state
from hyperion.training.stopping import EXIT_CODE, Interrupted, StopFlag

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
    "Plan",
    "Precision",
    "StepMetrics",
    "StopFlag",
    "TorchEngine",
    "WarmupCosine",
    "adamw",
    "choose_precision",
    "compile_options",
    "decay_groups",
    "estimate_memory",
    "evaluate_images",
    "evaluate_language",
    "fewest_checkpointed",
    "image_activations",
    "language_activations",
    "largest_batch",
    "mean_over_ranks",
    "rng_state",
    "seed_everything",
    "set_rng_state",
    "sgd_nesterov",
    "train",
]
