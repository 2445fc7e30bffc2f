"""Does the model see the future? On tokens drawn fresh and independently, nobody can do better than ln V nats a token."""

import math

import pandas as pd
import torch

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.models import TransformerConfig, TransformerLM
from hyperion.training import LanguageEngine, Precision, WarmupCosine, adamw, evaluate_language, seed_everything

_STANDARD_ERRORS = 4.0
VARIANT = "causal transformer"


def forecast(context: Context) -> list[Forecast]:
    """ln V: the entropy of a uniform token."""
    size = context.sizes["vocabulary"]
    basis = f"entropy of a token drawn uniformly from {size}: ln {size} nats"
    return [Forecast(variant=VARIANT, metric="validation_loss", estimate=math.log(size), basis=basis, dtype="fp32")]


def run(context: Context, report) -> Result:
    """Train on fresh independent tokens at every step, then score others: a loss below ln V - 4 standard errors is a leak."""
    seed_everything(context.seed)
    sizes, device = context.sizes, context.device
    generator = torch.Generator().manual_seed(context.seed)
    config = TransformerConfig(sizes["vocabulary"], sizes["sequence_length"], width=64, heads=4, layers=2)
    model = TransformerLM(config).to(device.torch_device)
    schedule = WarmupCosine(3e-3, 10, sizes["steps"])
    engine = LanguageEngine(model, adamw(model, 3e-3), schedule, Precision("fp32", "a check of exactness"), device)
    losses = []
    for step in range(sizes["steps"]):
        losses.append(engine.train_step(_fresh(sizes, generator, device)).loss)
        report(step + 1, sizes["steps"], "fresh tokens")
    scored = evaluate_language(
        model, (_fresh(sizes, generator, device) for _ in range(sizes["held_out_batches"])), engine.precision, device
    )
    below = (math.log(sizes["vocabulary"]) - scored.loss) / scored.standard_error_nats
    row = context.row(
        VARIANT,
        "validation_loss",
        scored.loss,
        dtype="fp32",
        n=scored.tokens,
        ci_low=scored.loss - 1.96 * scored.standard_error_nats,
        ci_high=scored.loss + 1.96 * scored.standard_error_nats,
        limit_source="no limit: ln V bounds the expectation; the check allows a sample 4 standard errors",
        check="standard errors below ln V (false alarm 3 in 100,000)",
        check_error=below,
        check_tolerance=_STANDARD_ERRORS,
    )
    curve = {"kind": "step", "step": range(1, len(losses) + 1), "loss": torch.stack(losses).tolist()}
    return Result([row], pd.DataFrame(curve))


EXPERIMENT = Experiment(forecast, run)


def _fresh(sizes: dict, generator: torch.Generator, device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (sizes["batch_size"], sizes["sequence_length"] + 1)
    tokens = torch.randint(sizes["vocabulary"], shape, generator=generator).to(device.torch_device)
    return tokens[:, :-1], tokens[:, 1:]
