"""What must hold of adapters after training: the base is as it was, and saved, loaded and merged they compute the same."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from hyperion.chapter.context import Context
from hyperion.checkpoints import frozen_sha256, load_adapter, save_adapter
from hyperion.experiments.llama.llama_rows import LORA
from hyperion.models import LlamaLM
from hyperion.results import Row
from hyperion.training import LanguageEngine
from hyperion.workloads.llama_setup import Material, base_model, frozen_dtype, with_lora

PROBE_ROWS = 4
# Loading copies float32 values; merging rounds B A into W, and then sums in another order.
LOADED_TOLERANCE, MERGED_TOLERANCE = 1e-5, 1e-4


def adapter_rows(context: Context, found: Material, engine: LanguageEngine, base_sha256: str) -> list[Row]:
    """Save the engine's adapters, load them into a fresh base, merge them; each must give the logits of the trained model.

    Logits are compared in float32, in which "the same" can be told from "nearly". The engine gives its model away: two
    at a time need not fit.

    Args:
        base_sha256: `frozen_sha256` of the base before training.
    """
    step, dtype = context.sizes["steps"], frozen_dtype(engine.precision)
    after = frozen_sha256(engine.model)
    path = save_adapter(context.workspace / "adapters", step, engine.model, base_sha256)
    trained = probe_logits(engine.model, found, engine.device.torch_device)
    engine.model = engine.optimizer = None
    gc.collect()
    fresh = loaded_adapter(context, found, path, dtype)
    loaded = probe_logits(fresh, found, engine.device.torch_device)
    merged = probe_logits(LlamaLM(fresh.lm.merge_and_unload()), found, engine.device.torch_device)
    size = sum(file.stat().st_size for file in path.iterdir())
    return [
        equality_row(context, found, LORA, "base weights after training", float(after != base_sha256), "sha256 unchanged", 0),
        equality_row(
            context,
            found,
            LORA,
            "logits, adapter loaded",
            relative(loaded, trained),
            "logits of the trained model",
            LOADED_TOLERANCE,
        ),
        equality_row(
            context,
            found,
            LORA,
            "logits, adapter merged",
            relative(merged, trained),
            "logits of the trained model",
            MERGED_TOLERANCE,
        ),
        context.row(LORA, "stored_gb", size / 1e9, params={"model": found.model, "what": "adapter checkpoint"}),
    ]


def loaded_adapter(context: Context, found: Material, path: Path, dtype: torch.dtype) -> LlamaLM:
    """A base made again, with adapters of its own first and the saved ones then.

    Raises:
        CheckpointError: the base is not the one that the adapters were trained on.
    """
    fresh = with_lora(base_model(context, found, dtype), context.seed + 1)
    load_adapter(fresh, path, frozen_sha256(fresh))
    return fresh


def equality_row(
    context: Context, found: Material, variant: str, what: str, difference: float, check: str, tolerance: float, **params
) -> Row:
    """A difference that is checked."""
    return context.row(
        variant,
        "relative_difference",
        difference,
        dtype="fp32",
        params={"model": found.model, "what": what, **params},
        check=check,
        check_error=difference,
        check_tolerance=tolerance,
        data_source=found.rows.source,
    )


@torch.no_grad()
def probe_logits(model: nn.Module, found: Material, device: str) -> Tensor:
    """Logits float32 of the first held-out rows, from the model in float32 (it stays so)."""
    width = int(found.held_out.sizes[:PROBE_ROWS].max())
    inputs = torch.from_numpy(found.held_out.inputs[:PROBE_ROWS, :width]).long().to(device)
    return model.float().eval()(inputs)


def relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    return float((found - expected).abs().max() / expected.abs().max())


@contextmanager
def keeping_adapters(model: nn.Module) -> Iterator[None]:
    """Steps that are made within, to time and to weigh them, leave no trace in what was trained."""
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in trained:
                parameter.copy_(trained[name])
