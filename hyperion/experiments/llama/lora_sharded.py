"""Train LoRA adapters with FSDP2.

The experiment checks three requirements: the losses equal those on one device, each decoder layer is an FSDP unit, and a single
process can load the saved adapters.
"""

import gc
from dataclasses import replace

import numpy as np
import pandas as pd
from safetensors.torch import load_file, save_file

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.rows import checked, sample_frame, timed_row
from hyperion.chapter.variants import RankOptions, merged, run_on_ranks
from hyperion.checkpoints import checkpoint_path
from hyperion.data.batches import InstructionBatches
from hyperion.measure import PeakMemoryRegion, RanksClock, Timing, time_function
from hyperion.models import LlamaShape, layout_of, random_llama_shape
from hyperion.parallel import (
    ParallelPlan,
    assert_ranks_agree,
    fsdp_units,
    full_parameter_bytes,
    local_parameter_bytes,
    parallelize,
)
from hyperion.processes import World, world
from hyperion.results import Row
from hyperion.training import LanguageEngine, Precision, choose_precision, frozen_sha256, save_adapter
from hyperion.units import GIB
from hyperion.workloads.fine_tuning import (
    DATA,
    LOADED_TOLERANCE,
    LORA,
    FineTuningData,
    FineTuningOptions,
    TokenCounts,
    base_model,
    count_tokens,
    equality_row,
    fine_tuning_engine,
    frozen_dtype,
    largest_difference,
    least_flops,
    load_base_and_adapter,
    probe_logits,
    shape_of,
    state_bytes,
    with_lora,
)
from hyperion.workloads.recipes import rank_zero_first
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

VARIANT = "LoRA under FSDP2"
TOLERANCE = 1e-4  # largest allowed relative difference between the losses of a step on one device and on all ranks
SHARE_TOLERANCE = 0.1
_PROBE = "logits.safetensors"
_EXACT = Precision("fp32", "parity is judged in float32")


class LoraShardedOptions(FineTuningOptions, RankOptions):
    """Options for the `lora_sharded` experiment.

    Args:
        parity_model: name of the model with random weights whose losses are compared in float32. For `model`, only the speed and
            the memory are measured.
    """

    parity_model: str

    def of_parity_model(self) -> "LoraShardedOptions":
        """Return the same options with `model` replaced by `parity_model`."""
        return self.model_copy(update={"model": self.parity_model, "real_weights": False})


def forecast(context: Context) -> list[Forecast]:
    """Predict the number of FSDP units, the largest difference between the losses, and each rank's share of parameter bytes."""
    options = LoraShardedOptions.of(context)
    ranks, steps = options.rank_count(context, options.batch_size), options.steps
    layers = random_llama_shape(options.parity_model, 1).num_hidden_layers
    drift = f"{steps} steps, each of which rounds sums of another order once: {steps} x 2^-24, the unit of float32"
    return [
        Forecast(
            VARIANT, "count", layers + 1, f"{layers} decoder layers and the root", params={"what": "FSDP units", "ranks": ranks}
        ),
        Forecast(
            VARIANT,
            "relative_difference",
            steps * 2.0**-24,
            drift,
            dtype="fp32",
            params={"what": "training loss", "ranks": ranks},
        ),
        Forecast(
            VARIANT,
            "share",
            1 / ranks,
            f"each of {ranks} ranks holds its part",
            dtype="fp32",
            params={"what": "parameter bytes held", "ranks": ranks},
            each_rank=True,
        ),
    ]


def run(context: Context, report: Report) -> Result:
    """Start the ranks once and train on them. Then load the saved adapters in this process, which has no process group."""
    options = LoraShardedOptions.of(context)
    ranks = options.rank_count(context, options.batch_size)
    results = run_on_ranks(context, report, on_rank, ranks=ranks)
    shared = merged(results)
    return Result([*shared.rows, _loaded_row(context, options, ranks)], results[0].samples, shared.source)


EXPERIMENT = Experiment(forecast, run, data=DATA, options=LoraShardedOptions)


def on_rank(context: Context, report: Report) -> Result:
    """Run all training of the experiment. Every rank runs this function.

    Compare the losses of a small float32 model and save its adapters. Then measure the memory and speed of the large model.
    """
    options = LoraShardedOptions.of(context)
    small = options.of_parity_model()
    data = rank_zero_first(lambda: small.data(context))
    engine = _engine(context, small, data, _EXACT, _alone())
    # Compute the hash of the whole base model before the second engine shards it. The saved adapters contain this hash.
    base_sha256 = frozen_sha256(engine.model)
    alone = _train(context, small, report, data, engine, "one device")
    engine = _engine(context, small, data, _EXACT, world())
    # This hash covers only the shards of this rank. It is compared with the hash after training.
    shards_sha256 = frozen_sha256(engine.model)
    losses = _train(context, small, report, data, engine, "all ranks")
    rows = [*_layout_rows(context, data, engine), _frozen_row(context, data, engine, shards_sha256)]
    _save(context, small, data, engine, base_sha256)
    rows += [] if world().rank else [_parity_row(context, small, data, alone, losses)]
    curve = pd.DataFrame({"kind": "step", "step": range(1, len(losses) + 1), "alone": alone, "sharded": losses})
    del engine
    speed, samples = _speed_rows(context, options, report)
    return Result(rows + speed, pd.concat([curve, samples], ignore_index=True), data.rows.source)


def _alone() -> World:
    """Return a `World` (the group of ranks that train together) with only this process and no process group."""
    here = world()
    return World(rank=0, size=1, local_rank=here.local_rank, backend="", device=here.device)


def _engine(
    context: Context, options: LoraShardedOptions, data: FineTuningData, precision: Precision, here: World
) -> LanguageEngine:
    """Return the training engine for a base model with LoRA adapters, whose parameters FSDP2 shards over the ranks in `here`.

    The initial weights of the base model and the adapters are the same on every rank. If `here` is a single process without a
    process group, nothing is sharded.
    """
    model = with_lora(base_model(context, data, frozen_dtype(precision)), context.seed)
    if here.size > 1 or here.backend:
        param_dtype = "bf16" if precision.dtype == "bf16" else None
        model = parallelize(model, ParallelPlan(strategy="fsdp", param_dtype=param_dtype), here)
    return fine_tuning_engine(context, options, model, precision, world=here)


def _batches(context: Context, options: LoraShardedOptions, data: FineTuningData, here: World) -> InstructionBatches:
    device = context.device.torch_device
    return InstructionBatches(data.train, options.batch_size, context.seed, device=device, rank=here.rank, ranks=here.size)


def _train(
    context: Context, options: LoraShardedOptions, report: Report, data: FineTuningData, engine: LanguageEngine, name: str
) -> list[float]:
    """Train the model and return the loss of every step.

    If several ranks share a batch, the loss is that of the whole batch.
    """
    batches = _batches(context, options, data, _alone() if engine.ranks == 1 else world())
    losses = []
    for step in range(options.steps):
        losses.append(float(engine.train_step(batches.next_batch()).loss))
        report(step + 1, options.steps, f"{name}: loss {losses[-1]:.3f}")
    return losses


def _layout_rows(context: Context, data: FineTuningData, engine: LanguageEngine) -> list[Row]:
    """Return a row with the share of all parameter bytes held by this rank.

    On rank 0, also return a row with the number of FSDP units.
    """
    here, model = world(), engine.model
    share = local_parameter_bytes(model) / full_parameter_bytes(model)
    params = {"model": data.model, "ranks": here.size}
    rows = [
        context.row(
            VARIANT,
            "share",
            share,
            dtype="fp32",
            rank=here.rank,
            params=params | {"what": "parameter bytes held"},
            **checked("1 / ranks", abs(share * here.size - 1), SHARE_TOLERANCE),
        )
    ]
    if here.rank == 0:
        units, expected = fsdp_units(model), len(layout_of(model).blocks) + 1
        rows.append(
            context.row(
                VARIANT,
                "count",
                len(units),
                params=params | {"what": "FSDP units"},
                **checked("decoder layers and the root", abs(len(units) - expected), 0),
            )
        )
    return rows


def _frozen_row(context: Context, data: FineTuningData, engine: LanguageEngine, shards_sha256: str) -> Row:
    changed = float(frozen_sha256(engine.model) != shards_sha256)
    what = "base weights after training"
    row = equality_row(context, data, VARIANT, what, changed, "sha256 of this rank's shards unchanged", 0)
    return replace(row, rank=world().rank)


def _save(context: Context, options: LoraShardedOptions, data: FineTuningData, engine: LanguageEngine, base_sha256: str) -> None:
    """Gather the adapters from all ranks and save them.

    Also save the trained model's logits for a fixed input. A model that loads the adapters must give the same logits.
    """
    save_adapter(context.workspace / "adapters", options.steps, engine.model, base_sha256)
    assert_ranks_agree(engine.model)
    logits = probe_logits(engine.model, data, engine.device.torch_device).cpu()
    if world().rank == 0:
        save_file({"logits": logits}, context.workspace / _PROBE)


def _loaded_row(context: Context, options: LoraShardedOptions, ranks: int) -> Row:
    """Load the saved adapters into a new base model in one process, and compare its logits with the sharded model's."""
    data = options.of_parity_model().data(context)
    path = checkpoint_path(context.workspace / "adapters", options.steps)
    model = load_base_and_adapter(context, data, path, frozen_dtype(_EXACT))
    expected = load_file(context.workspace / _PROBE)["logits"]
    difference = largest_difference(probe_logits(model, data, context.device.torch_device).cpu(), expected)
    return equality_row(
        context,
        data,
        VARIANT,
        "logits, adapter loaded by one process",
        difference,
        "logits of the sharded model",
        LOADED_TOLERANCE,
        ranks=ranks,
    )


def _parity_row(
    context: Context, options: LoraShardedOptions, data: FineTuningData, alone: list[float], losses: list[float]
) -> Row:
    difference = float(np.max(np.abs(np.array(losses) / np.array(alone) - 1)))
    return context.error_row(
        VARIANT,
        "relative_difference",
        difference,
        f"losses of one device, step by step; {SCATTER_FP32}",
        TOLERANCE,
        dtype="fp32",
        params={
            "model": data.model,
            "what": "training loss",
            "ranks": world().size,
            "steps": options.steps,
            "batch_size": options.batch_size,
        },
        data_source=data.rows.source,
    )


def _speed_rows(context: Context, options: LoraShardedOptions, report: Report) -> tuple[list[Row], pd.DataFrame]:
    """Return the rows and samples of the speed of sharded training, in this device's training precision.

    The rows give the step time, the throughput summed over all ranks, and the peak memory of each rank.
    """
    here = world()
    # The engine of the small model must be freed before the large model is built.
    gc.collect()
    report(0, 1, f"{options.model} on {here.size} ranks")
    data = options.data(context)
    precision = choose_precision(context.device, options.precision)
    engine = _engine(context, options, data, precision, here)
    shape = shape_of(engine.model.get_submodule("lm"))
    batch = _batches(context, options, data, here).next_batch()
    counts = count_tokens(_batches(context, options, data, _alone()).next_batch())  # over all ranks
    shared = {"dtype": precision.dtype, "data_source": data.rows.source}
    params = {"model": data.model, "ranks": here.size, "step": "steady"}
    engine.train_step(batch)  # allocates the optimizer's moments
    with PeakMemoryRegion(engine.device) as region:
        timing = time_function(
            lambda: engine.train_step(batch),
            engine.device,
            cold=False,
            time_limit_s=options.steady_time_limit_s,
            # With a time limit per rank, one rank could stop while the others wait in a collective.
            clock=RanksClock(here, lambda: None, lambda what: None),  # all ranks take the same number of samples
        )
    peak = region.peak
    if peak.metric == "peak_memory_gib":
        part = state_bytes(shape, LORA, precision.dtype) / here.size / GIB
        bound = {
            "limit": part * (1 - SHARE_TOLERANCE),
            "limit_source": f"a rank's part of weights, gradients and moments, less {SHARE_TOLERANCE:.0%}",
        }
    else:
        bound = {"limit_source": "no limit: the whole process, interpreter and libraries included", "value_reason": peak.reason}
    rows = [context.row(VARIANT, peak.metric, peak.gib, rank=here.rank, params=params, **bound, **shared)]
    if here.rank == 0:
        rows += _rate_rows(context, timing, counts, shape, params, shared)
    return rows, sample_frame(timing, VARIANT, precision.dtype, params).assign(kind="steady step")


def _rate_rows(context: Context, timing: Timing, counts: TokenCounts, shape: LlamaShape, params: dict, shared: dict) -> list[Row]:
    flops_of_rank = least_flops(shape, LORA, counts) * counts.tokens / params["ranks"]
    floor, source = flops_floor(context.device, shared["dtype"], flops_of_rank)
    step = timing.estimate
    rows = [timed_row(context, VARIANT, "step_time_s", step, timing, limit=(floor, source), params=params, **shared)]
    for what, count in (("prompt and completion", counts.tokens), ("completion", counts.completion_tokens)):
        rate = step.map(lambda seconds, count=count: count / seconds)
        rows.append(
            timed_row(
                context,
                VARIANT,
                "tokens_per_s",
                rate,
                timing,
                limit=(None if floor is None else count / floor, source),
                params=params | {"tokens": what, "batch": count},
                **shared,
            )
        )
    return rows
