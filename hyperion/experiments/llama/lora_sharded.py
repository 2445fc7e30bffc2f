"""LoRA under FSDP2: the losses of one device, decoder layers as units, and adapters that one process loads again."""

import gc
from dataclasses import replace

import numpy as np
import pandas as pd
from safetensors.torch import load_file, save_file

from hyperion.chapter.context import Context, Experiment, Forecast, Result
from hyperion.chapter.ranks import ranks_of
from hyperion.chapter.rows import sample_frame, timed_columns
from hyperion.chapter.variants import Report, merged, run_on_ranks
from hyperion.checkpoints import checkpoint_path, frozen_sha256, save_adapter
from hyperion.data.batches.instruction_batches import InstructionBatches
from hyperion.experiments.llama.llama_adapters import LOADED_TOLERANCE, equality_row, loaded_adapter, probe_logits, relative
from hyperion.experiments.llama.llama_lora import fine_tuning_engine, work_of
from hyperion.experiments.llama.llama_rows import LORA, Work, least_flops, state_bytes
from hyperion.measure import PeakMemoryRegion, RanksClock, time_function
from hyperion.measure.memory_use.peak import GIB
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
from hyperion.training import LanguageEngine, Precision, choose_precision
from hyperion.workloads.llama_setup import DATA, Material, base_model, frozen_dtype, material, with_lora
from hyperion.workloads.recipes import rank_zero_first
from hyperion.workloads.training_rows import flops_floor
from hyperion.workloads.twins import SCATTER_FP32

VARIANT = "LoRA under FSDP2"
TOLERANCE = 1e-4  # relative, between the losses of one device and of many, step by step
SHARE_TOLERANCE = 0.1
_PROBE = "logits.safetensors"
_EXACT = Precision("fp32", "parity is judged in float32")


def forecast(context: Context) -> list[Forecast]:
    """How many units there are to gather, how far losses may drift, and what a rank holds."""
    ranks, steps = ranks_of(context), context.sizes["steps"]
    layers = random_llama_shape(context.sizes["parity_model"], 1).num_hidden_layers
    drift = f"{steps} steps, each of which rounds sums of another order once: {steps} x 2^-24, the unit of float32"
    return [
        Forecast(
            variant=VARIANT,
            metric="count",
            estimate=layers + 1,
            basis=f"{layers} decoder layers and the root",
            params={"what": "FSDP units", "ranks": ranks},
        ),
        Forecast(
            variant=VARIANT,
            metric="relative_difference",
            estimate=steps * 2.0**-24,
            basis=drift,
            dtype="fp32",
            params={"what": "training loss", "ranks": ranks},
        ),
        Forecast(
            variant=VARIANT,
            metric="share",
            estimate=1 / ranks,
            basis=f"each of {ranks} ranks holds its part",
            dtype="fp32",
            params={"what": "parameter bytes held", "ranks": ranks},
            each_rank=True,
        ),
    ]


def run(context: Context, report: Report) -> Result:
    """All ranks in one launch; then this process, which is in no group, loads what they saved."""
    results = run_on_ranks(context, report, on_rank, ranks=ranks_of(context))
    shared = merged(results)
    return Result([*shared.rows, _loaded_row(context)], results[0].samples, shared.source)


EXPERIMENT = Experiment(forecast, run, data=DATA)


def on_rank(context: Context, report: Report) -> Result:
    """Parity and the adapter checkpoint on a small model in float32, then memory and speed of the profile's model."""
    exact = _named(context, context.sizes["parity_model"])
    small = rank_zero_first(lambda: material(exact))
    engine = _engine(exact, small, _EXACT, _alone())
    base_sha256 = frozen_sha256(engine.model)
    alone = _steps(exact, report, small, engine, "one device")
    engine = _engine(exact, small, _EXACT, world())
    held = frozen_sha256(engine.model)
    losses = _steps(exact, report, small, engine, "all ranks")
    rows = [*_layout_rows(context, small, engine), _frozen_row(context, small, engine, held)]
    _save(context, small, engine, base_sha256)
    rows += [] if world().rank else [_parity_row(context, small, alone, losses)]
    curve = pd.DataFrame({"kind": "step", "step": range(1, len(losses) + 1), "alone": alone, "sharded": losses})
    del engine
    speed, samples = _speed_rows(context, report)
    return Result(rows + speed, pd.concat([curve, samples], ignore_index=True), small.rows.source)


def _named(context: Context, model: str) -> Context:
    """The same experiment with a random model of that name."""
    return replace(context, sizes=context.sizes | {"model": model, "real_weights": False})


def _alone() -> World:
    """This rank without its peers."""
    here = world()
    return World(rank=0, size=1, local_rank=here.local_rank, backend="", device=here.device)


def _engine(context: Context, found: Material, precision: Precision, here: World) -> LanguageEngine:
    """The same adapters on the same base on every rank, laid over `here`."""
    model = with_lora(base_model(context, found, frozen_dtype(precision)), context.seed)
    if here.size > 1 or here.backend:
        halves = "bf16" if precision.dtype == "bf16" else None
        model = parallelize(model, ParallelPlan(strategy="fsdp", param_dtype=halves), here)
    return fine_tuning_engine(context, model, precision, world=here)


def _batches(context: Context, found: Material, here: World) -> InstructionBatches:
    return InstructionBatches(
        found.train,
        context.sizes["batch_size"],
        context.seed,
        device=context.device.torch_device,
        rank=here.rank,
        ranks=here.size,
    )


def _steps(context: Context, report: Report, found: Material, engine: LanguageEngine, who: str) -> list[float]:
    """Losses of the whole batch, step by step."""
    batches = _batches(context, found, _alone() if engine.ranks == 1 else world())
    losses = []
    for step in range(context.sizes["steps"]):
        losses.append(float(engine.train_step(batches.next_batch()).loss))
        report(step + 1, context.sizes["steps"], f"{who}: loss {losses[-1]:.3f}")
    return losses


def _layout_rows(context: Context, found: Material, engine: LanguageEngine) -> list[Row]:
    """Units that FSDP2 gathers one by one (rank 0 tells), and the share of the parameters that this rank holds."""
    here, model = world(), engine.model
    whole, units = full_parameter_bytes(model), fsdp_units(model)
    expected = len(layout_of(model).blocks) + 1
    share = local_parameter_bytes(model) / whole
    about = {"model": found.model, "ranks": here.size}
    rows = [
        context.row(
            VARIANT,
            "share",
            share,
            dtype="fp32",
            rank=here.rank,
            params=about | {"what": "parameter bytes held"},
            check="1 / ranks",
            check_error=abs(share * here.size - 1),
            check_tolerance=SHARE_TOLERANCE,
        )
    ]
    if here.rank == 0:
        rows.append(
            context.row(
                VARIANT,
                "count",
                len(units),
                params=about | {"what": "FSDP units"},
                check="decoder layers and the root",
                check_error=abs(len(units) - expected),
                check_tolerance=0,
            )
        )
    return rows


def _frozen_row(context: Context, found: Material, engine: LanguageEngine, held: str) -> Row:
    changed = float(frozen_sha256(engine.model) != held)
    what = "base weights after training"
    row = equality_row(context, found, VARIANT, what, changed, "sha256 of this rank's shards unchanged", 0)
    return replace(row, rank=world().rank)


def _save(context: Context, found: Material, engine: LanguageEngine, base_sha256: str) -> None:
    """The adapters alone, gathered from all shards, and the logits that they must give again."""
    save_adapter(context.workspace / "adapters", context.sizes["steps"], engine.model, base_sha256)
    assert_ranks_agree(engine.model)
    logits = probe_logits(engine.model, found, engine.device.torch_device).cpu()
    if world().rank == 0:
        save_file({"logits": logits}, context.workspace / _PROBE)


def _loaded_row(context: Context) -> Row:
    """One process without a group: a fresh base with the adapters of the ranks gives the logits of the ranks."""
    exact = _named(context, context.sizes["parity_model"])
    found = material(exact, quiet=True)
    path = checkpoint_path(context.workspace / "adapters", context.sizes["steps"])
    model = loaded_adapter(exact, found, path, frozen_dtype(_EXACT))
    expected = load_file(context.workspace / _PROBE)["logits"]
    difference = relative(probe_logits(model, found, context.device.torch_device).cpu(), expected)
    return equality_row(
        context,
        found,
        VARIANT,
        "logits, adapter loaded by one process",
        difference,
        "logits of the sharded model",
        LOADED_TOLERANCE,
        ranks=ranks_of(context),
    )


def _parity_row(context: Context, found: Material, alone: list[float], losses: list[float]) -> Row:
    difference = float(np.max(np.abs(np.array(losses) / np.array(alone) - 1)))
    sizes = context.sizes
    return context.row(
        VARIANT,
        "relative_difference",
        difference,
        dtype="fp32",
        params={
            "model": found.model,
            "what": "training loss",
            "ranks": world().size,
            "steps": sizes["steps"],
            "batch_size": sizes["batch_size"],
        },
        check=f"losses of one device, step by step; {SCATTER_FP32}",
        check_error=difference,
        check_tolerance=TOLERANCE,
        data_source=found.rows.source,
    )


def _speed_rows(context: Context, report: Report) -> tuple[list[Row], pd.DataFrame]:
    """Step time, throughput of all ranks and each rank's peak memory, in the type that this device trains in."""
    here, sizes = world(), context.sizes
    gc.collect()
    report(0, 1, f"{sizes['model']} on {here.size} ranks")
    found = material(context, quiet=context.sizes["model"] == context.sizes["parity_model"])
    precision = choose_precision(context.device, sizes["precision"])
    engine = _engine(context, found, precision, here)
    shape: LlamaShape = engine.model.get_submodule("lm").config
    batch = _batches(context, found, here).next_batch()
    work = work_of(_batches(context, found, _alone()).next_batch())
    shared = {"dtype": precision.dtype, "data_source": found.rows.source}
    about = {"model": found.model, "ranks": here.size, "step": "steady"}
    engine.train_step(batch)
    with PeakMemoryRegion(engine.device) as region:
        timing = time_function(
            lambda: engine.train_step(batch),
            engine.device,
            cold=False,
            time_limit_s=sizes["steady_time_limit_s"],
            clock=RanksClock(here, lambda: None, lambda what: None),
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
    rows = [context.row(VARIANT, peak.metric, peak.gib, rank=here.rank, params=about, **bound, **shared)]
    if here.rank == 0:
        rows += _rate_rows(context, timing, work, shape, about, shared)
    return rows, sample_frame(timing, VARIANT, precision.dtype, about).assign(kind="steady step")


def _rate_rows(context: Context, timing, work: Work, shape: LlamaShape, about: dict, shared: dict) -> list[Row]:
    ranks = about["ranks"]
    floor, source = flops_floor(context.device, shared["dtype"], least_flops(shape, LORA, work) * work.tokens / ranks)
    step = timing.estimate
    rows = [
        context.row(
            VARIANT,
            "step_time_s",
            step.value,
            limit=floor,
            limit_source=source,
            params=about,
            **shared,
            **timed_columns(step, timing),
        )
    ]
    for what, count in (("prompt and completion", work.tokens), ("completion", work.completion_tokens)):
        rate = step.map(lambda seconds, count=count: count / seconds)
        rows.append(
            context.row(
                VARIANT,
                "tokens_per_s",
                rate.value,
                limit=None if floor is None else count / floor,
                limit_source=source,
                params=about | {"tokens": what, "batch": count},
                **shared,
                **timed_columns(rate, timing),
            )
        )
    return rows
