"""Does the model see future tokens?

The tokens are drawn independently and uniformly from a vocabulary of V tokens. A causal model's expected loss on them is at least
ln V nats per token. A clearly lower loss shows that the model sees its targets.
"""

import math

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Options, Report, Result
from hyperion.chapter.rows import checked
from hyperion.hardware import Device
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import LanguageEngine, Precision, WarmupCosine, adamw, evaluate_language, seed_everything

_STANDARD_ERRORS = 4.0
VARIANT = "causal transformer"


class LeakageOptions(Options):
    """Options for the `leakage` experiment.

    Args:
        vocabulary: number of distinct tokens, V.
        sequence_length: number of tokens in a sequence.
        batch_size: number of sequences in a batch.
        steps: number of optimizer steps.
        held_out_batches: number of batches to score after training.
    """

    vocabulary: int
    sequence_length: int
    batch_size: int
    steps: int
    held_out_batches: int


def forecast(context: Context) -> list[Forecast]:
    """Predict the validation loss ln V, the entropy in nats of a token drawn uniformly from V tokens."""
    size = LeakageOptions.of(context).vocabulary
    basis = f"the entropy of a token drawn uniformly from {size} tokens is ln {size} nats"
    return [Forecast(VARIANT, "validation_loss", math.log(size), basis, dtype="fp32")]


def run(context: Context, report: Report) -> Result:
    """Train on new random tokens at every step, then measure the loss on unseen tokens.

    The check fails if this loss is more than 4 standard errors below ln V.
    """
    seed_everything(context.seed)
    options, device = LeakageOptions.of(context), context.device
    generator = torch.Generator().manual_seed(context.seed)
    config = TransformerConfig(options.vocabulary, options.sequence_length, width=64, heads=4, layers=2)
    model = TransformerLM(config).to(device.torch_device)
    schedule = WarmupCosine(3e-3, 10, options.steps)
    engine = LanguageEngine(model, adamw(model, 3e-3), schedule, Precision("fp32", "a check of exactness"), device)
    losses = []
    for step in range(options.steps):
        losses.append(engine.train_step(_fresh_batch(options, generator, device)).loss)
        report(step + 1, options.steps, "training on random tokens")
    held_out = (_fresh_batch(options, generator, device) for _ in range(options.held_out_batches))
    scored = evaluate_language(model, held_out, engine.precision, device)
    row = context.row(
        VARIANT,
        "validation_loss",
        scored.loss,
        dtype="fp32",
        n=scored.tokens,
        ci_low=scored.loss - 1.96 * scored.independent_error_nats,
        ci_high=scored.loss + 1.96 * scored.independent_error_nats,
        limit_source="no limit: ln V bounds the expectation; the check allows a sample 4 standard errors",
        **checked(
            "standard errors below ln V (false alarm 3 in 100,000)",
            (math.log(options.vocabulary) - scored.loss) / scored.independent_error_nats,
            _STANDARD_ERRORS,
        ),
    )
    curve = {"kind": "step", "step": range(1, len(losses) + 1), "loss": torch.stack(losses).tolist()}
    return Result([row], pd.DataFrame(curve))


EXPERIMENT = Experiment(forecast, run, options=LeakageOptions)


def _fresh_batch(options: LeakageOptions, generator: torch.Generator, device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (options.batch_size, options.sequence_length + 1)
    tokens = torch.randint(options.vocabulary, shape, generator=generator).to(device.torch_device)
    return tokens[:, :-1], tokens[:, 1:]
