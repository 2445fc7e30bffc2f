"""Can one rank load a checkpoint that several ranks saved? Save with one layout, load without it, and compare the logits."""

import shutil

import numpy as np
import pandas as pd
import torch.distributed as dist

from hyperion.chapter.context import Context, Experiment, Forecast, Report, Result
from hyperion.chapter.variants import RankOptions, run_on_ranks
from hyperion.experiments.megatron.bytes_of_text import DATA, VOCABULARY, batches, documents
from hyperion.experiments.megatron.megatron_parity import LayoutTable, ToyOptions, initial_llama, why_not
from hyperion.models.llama import random_llama_shape
from hyperion.parallel.megatron.layouts import MegatronLayout
from hyperion.parallel.megatron.release import adapted_copy, use_adapted
from hyperion.processes import world

TOLERANCE = 1e-5


class MegatronReshardingOptions(RankOptions, ToyOptions):
    """Options of `megatron_resharding`.

    Args:
        saved: layout that trains and saves.
    """

    saved: LayoutTable

    @property
    def needed(self) -> int:
        """Number of ranks of the layout that saves."""
        return self.saved.tensor * self.saved.pipeline


def forecast(context: Context) -> list[Forecast]:
    """Predict one rounding error of float32 for each layer, because the matrix products sum in another order."""
    options = MegatronReshardingOptions.of(context)
    layers = random_llama_shape(options.model, VOCABULARY).num_hidden_layers
    basis = f"{layers} layers and the head, each of which rounds sums of another order once: {layers + 1} x 2^-24"
    return [
        Forecast(_name(options), "relative_difference", (layers + 1) * 2.0**-24, basis, dtype="fp32", params=_params(options))
    ]


def run(context: Context, report: Report) -> Result:
    """Train and save on all ranks of the layout. Then let one rank load the checkpoint."""
    options = MegatronReshardingOptions.of(context)
    if reason := why_not(options.device_count(context), options.needed):
        row = context.absent_row(_name(options), "relative_difference", reason, dtype="fp32", params=_params(options))
        return Result([row], pd.DataFrame())
    adapted_copy()
    shutil.rmtree(context.workspace, ignore_errors=True)
    results = run_on_ranks(context, report, reshard_on_rank, ranks=options.needed)
    rows = [row for result in results for row in result.rows]
    return Result(rows, pd.DataFrame(), results[0].source)


EXPERIMENT = Experiment(forecast, run, data=DATA, options=MegatronReshardingOptions)


def reshard_on_rank(context: Context, report: Report) -> Result:
    """On one rank, train with the layout and save. Then load the checkpoint with the whole model on this rank."""
    options = MegatronReshardingOptions.of(context)
    use_adapted()
    from megatron.core import dist_checkpointing  # pyright: ignore[reportMissingImports]

    from hyperion.parallel.megatron import gpt

    lines, source = documents(context)
    length = options.sequence_length
    tokens = batches(np.concatenate(lines), options.steps + 1, options.batch_size, length, context.seed)
    tokens = tokens.to(context.device.torch_device)
    probe_BT = tokens[-1, :2, :-1]
    shape, layout = random_llama_shape(options.model, VOCABULARY), options.saved.layout()
    folder = context.workspace / "checkpoint"
    if world().rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    with gpt.model_parallel(layout):
        model = gpt.build_gpt(shape, layout, length)
        gpt.load_llama_weights(model, initial_llama(context, options.model).state_dict(), shape, layout)
        model = model.to(context.device.torch_device)
        trainer = gpt.MegatronTrainer(model, layout, gpt.Adam(options.learning_rate))
        for step, tokens_BT in enumerate(tokens[:-1]):
            report(step, options.steps + 2, "training")
            trainer.step(tokens_BT)
        report(options.steps, options.steps + 2, "saving")
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        before_BTV = gpt.full_logits(model, probe_BT)
    whole = MegatronLayout()
    with gpt.model_parallel(whole):
        report(options.steps + 1, options.steps + 2, "loading")
        model = gpt.build_gpt(shape, whole, length).to(context.device.torch_device)
        fresh_BTV = gpt.full_logits(model, probe_BT)
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
        after_BTV = gpt.full_logits(model, probe_BT)
    # The last rank has the logits of both layouts, because it belongs to the last stage.
    if before_BTV is None or after_BTV is None or fresh_BTV is None or world().rank != world().size - 1:
        return Result([], pd.DataFrame(), source)
    scale = before_BTV.abs().max()
    columns = {"dtype": "fp32", "data_source": source}
    error = float((after_BTV - before_BTV).abs().max() / scale)
    check = "logits of the layout that saved"
    row = context.error_row(_name(options), "relative_difference", error, check, TOLERANCE, params=_params(options), **columns)
    # This row shows that loading changes the logits. Without it, two models that ignore the checkpoint would pass the check too.
    moved = float((fresh_BTV - before_BTV).abs().max() / scale)
    unloaded = context.row("before loading", "logit_change", moved, params=_params(options), **columns)
    return Result([row, unloaded], pd.DataFrame(), source)


def _name(options: MegatronReshardingOptions) -> str:
    return f"{options.saved.layout().name(options.needed)} to one rank"


def _params(options: MegatronReshardingOptions) -> dict:
    return {"what": "logits", "model": options.model, "steps": options.steps, "sequence_length": options.sequence_length}
